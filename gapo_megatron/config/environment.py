"""Section of the configuration on what answers the model during an episode."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from gapo_megatron.config.section import HOW, SAMPLED, Section
from gapo_megatron.config.types import Count, Seconds, Settings, require_known
from gapo_megatron.config.types import Text as OneLine
from gapo_megatron.user_code import is_code

Stop = Annotated[str, Field(min_length=1, max_length=256)]

SERVED = ("nemo_gym", "openenv")
"""Environments behind an address, which give the verdict themselves."""
KINDS = ("one_turn", "tools", *SERVED)
"""Environments of this package."""


class EnvironmentConfig(Section):
    """What answers the model during an episode (docs/environments.md)."""

    role = SAMPLED
    kept = "samples must come from the same distribution"

    kind: OneLine = "one_turn"
    """`one_turn`: the response ends at its first EOS. `tools`: the model may call a calculator, or
    Python in the sandbox. `nemo_gym`, `openenv`: a server, `settings.url`, answers and gives the
    verdict. Or your own, `path/to/file.py:NAME`: a class, built as `NAME(tokenizer, **settings)`,
    or an agent, a function called as `NAME(session, **settings)` for each response."""
    settings: Settings = Field(default_factory=dict)
    """Settings of the environment: keyword arguments of its class or agent."""
    code: OneLine = ""
    """SHA-256 of the file with code of your own. Filled in when the config is loaded."""
    stop: Annotated[tuple[Stop, ...], Field(strict=False)] = ()
    """Texts that end the model's turn, beside EOS, such as `</tool_call>`. The token that completes
    the text is kept whole. Best are texts that are a single token (docs/environments.md)."""
    structured_outputs: bool = False
    """Let an agent's `response_format` and `tool_choice` mask the tokens of a turn."""
    max_call_tokens: Annotated[int, Field(ge=0)] = 0
    """Largest number of tokens of a call's output: its middle is cut. 0: no limit."""
    max_concurrent: Annotated[Count, HOW] = 64
    """Calls of the environment that an engine may have open at once; others wait in order."""
    call_timeout_s: Seconds = 60
    """Time limit of a call. After it the verdict on the episode is unknown."""
    episode_timeout_s: Seconds = 600
    """Time limit of all calls of an episode together. After it its verdict is unknown."""

    @property
    def code_names(self) -> list[str]:
        """User code that this section names."""
        return [self.kind] if is_code(self.kind) else []

    @property
    def takes_rows(self) -> bool:
        """Whether it gets all columns of a problem's row."""
        return is_code(self.kind) or self.kind in SERVED

    @property
    def is_called(self) -> bool:
        """Whether something answers the model; otherwise a response ends with its first turn."""
        return self.kind != "one_turn"

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_known("kind", self.kind, KINDS)
        if not self.is_called and self.settings:
            raise ValueError(f"settings ({self.settings}): 'one_turn' has none")
        if not self.is_called and self.max_call_tokens:
            raise ValueError(f"max_call_tokens ({self.max_call_tokens}): 'one_turn' has no calls")
        return self
