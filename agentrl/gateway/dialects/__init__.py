"""The dialects of the endpoint: how clients write requests and read answers, by the path that they post to."""

from agentrl.gateway.dialects.chat_completions import ChatCompletions
from agentrl.gateway.dialects.dialect import Dialect
from agentrl.gateway.dialects.messages import Messages
from agentrl.gateway.dialects.responses import Responses

DIALECTS: dict[str, type[Dialect]] = {
    "/v1/chat/completions": ChatCompletions,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
}
