"""mini-swe-agent, as its own configuration has it: a shell of its own, in a sandbox of yours if the policy is any good.

agentrl train --env math-tools --model MODEL --agent "python examples/agents/mini_swe_agent.py"
"""

import os
from pathlib import Path

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors"}

import minisweagent
import yaml
from env_task import QUESTION
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

config = yaml.safe_load((Path(minisweagent.__file__).parent / "config" / "mini.yaml").read_text())
own = {key: value for key, value in config.get("model", {}).items() if not key.startswith(("model_", "cost_"))}
where = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"], "drop_params": True}
model = LitellmModel(model_name="openai/policy", model_kwargs=where, cost_tracking="ignore_errors", **own)
templates = {key: config["agent"][key] for key in ("system_template", "instance_template")}
DefaultAgent(model, LocalEnvironment(), **templates, step_limit=3).run(QUESTION)
