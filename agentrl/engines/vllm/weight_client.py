"""The calls about weights to one server, from the sender's thread, each with a deadline.

A sender may hang where its call has failed: vLLM's own one waits in NCCL for a worker that will never come. So a
failure is also a future, for whoever waits for the sender.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import httpx2

from agentrl.engines.vllm.transfer_backend import MEMORY

INIT_S = 60.0  # more, to connect: NCCL looks at every device first
SLOWEST = {MEMORY: 50e6}  # bytes a second that a transfer carries at least: on the CPU a server computes meanwhile
SLOWEST_GPU = 1e9


@dataclass(frozen=True)
class SyncDeadline:
    """The seconds that a stage of a weight transfer may take: pause, start, update, finish, resume.

    Args:
        timeout_s: beyond what the bytes take.
        nbytes: of all that is sent.
        backend: how they travel.
    """

    timeout_s: float
    nbytes: int
    backend: str

    @property
    def stage_s(self) -> float:
        """Return the seconds of one stage."""
        return self.timeout_s + self.nbytes / SLOWEST.get(self.backend, SLOWEST_GPU)

    @property
    def connect_s(self) -> float:
        """Return the seconds to connect a sender."""
        return self.stage_s + (0.0 if self.backend == MEMORY else INIT_S)

    def describe_miss(self, stage: str) -> str:
        """Describe a stage that took longer."""
        return f"did not finish {stage} in {self.stage_s:.1f} s (engine.weight_sync_timeout_s allows more)"


class HttpTransferClient:
    """A `TransferClient` of one server.

    Args:
        options: of the HTTP client.
        deadline: of every call.
        slack_s: beyond it, for one that is let go of where another server's call is late.
    """

    def __init__(self, options: dict[str, Any], deadline: SyncDeadline, slack_s: float = 0.0) -> None:
        self._http = httpx2.Client(**options, timeout=deadline.stage_s + slack_s)
        self._deadline, self._slack_s = deadline, slack_s
        self.failure = Future[str]()  # how a call has failed

    def init_weight_transfer_engine(self, init_info: dict[str, object]) -> None:
        asks = "word" in init_info  # whether it is on this machine: one that is not answers by an error
        response = self._post(
            "/init_weight_transfer_engine",
            {"init_info": init_info},
            timeout=self._deadline.connect_s + self._slack_s,
            may_refuse=asks,
        )
        response.raise_for_status()

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", {})

    def update_weights(self, update_info: object) -> None:
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("/finish_weight_update", {"weight_version": weight_version})

    def receive_adapter(self, message: str) -> list[str]:
        response = self._post("/collective_rpc", {"method": "receive_adapter", "args": [message]})
        answers: list[str] = response.json()["results"]
        return answers

    def close(self) -> None:
        """Close the connections: a thread that still sends ends with its next call."""
        self._http.close()

    def _post(
        self, path: str, body: dict[str, object], *, timeout: float | None = None, may_refuse: bool = False
    ) -> httpx2.Response:
        try:
            response = self._http.post(path, json=body, timeout=timeout or self._deadline.stage_s + self._slack_s)
            return response if may_refuse else response.raise_for_status()
        except httpx2.TimeoutException:
            self._fail(self._deadline.describe_miss(path))
            raise
        except httpx2.HTTPStatusError as error:
            answer = f"{error.response.status_code} from {path}: {error.response.text:.200}"
            self._fail(f"could not be given weights ({answer})")
            raise
        except httpx2.HTTPError as error:
            self._fail(f"does not answer {path} ({type(error).__name__})")
            raise

    def _fail(self, how: str) -> None:
        if not self.failure.done():
            self.failure.set_result(how)
