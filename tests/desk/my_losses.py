from torch import Tensor

from agentrl import loss
from agentrl.learner.losses.losses import Tokens


@loss(
    reduction="token_mean",
    metrics={"mine/share": "share of the tokens whose ratio is over tau"},
    explain="REINFORCE with a soft cap of {tau}",
)
def mine(t: Tokens, log_ratio: Tensor, *, tau: float = 0.5) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE with a soft cap.

    Args:
        tau: where the weight of a token levels off.
    """
    ratio = log_ratio.exp()
    return -tau * (ratio / tau).tanh() * t.advantages, {"mine/share": (ratio > tau).float()}
