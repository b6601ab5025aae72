"""The sandbox for model-written code: bubblewrap, seccomp, landlock, limits, another user. See README.md beside this.

async with agentrl_tools.sandbox.open(packages=["numpy"]) as box:
    print((await box.run("print(6 * 7)")).output)
"""

from agentrl_tools.sandbox.fork_server_client import CodeResult, ForkServerClient
from agentrl_tools.sandbox.fork_server_client import open_sandbox as open  # noqa: A004
from agentrl_tools.sandbox.launch import SandboxLimits
from agentrl_tools.sandbox.session import Session

__all__ = ["CodeResult", "ForkServerClient", "SandboxLimits", "Session", "open"]
