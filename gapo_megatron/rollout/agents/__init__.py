"""Agents: user code that asks the model through an OpenAI-compatible address.

`environment` makes of an agent an environment; `conversations` maps its requests to the model's
turns; `live` runs it beside its episode; `server` is the address.
"""

from gapo_megatron.rollout.agents.session import Session

__all__ = ["Session"]
