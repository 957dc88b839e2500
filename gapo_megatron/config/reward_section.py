"""Section `reward`: how responses are verified."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from gapo_megatron.config.data_section import REASONING_GYM
from gapo_megatron.config.section import HOW, LEARNED, Section
from gapo_megatron.config.types import PathText, Seconds, Settings, Text, Workers, require_known
from gapo_megatron.isolation import REMOTE, SYSTEM_PYTHON, split_setting
from gapo_megatron.user_code import is_code

OF_ENVIRONMENT = "environment"
"""The verifier of episodes whose environment gives the verdict."""
VERIFIERS = ("math", "code", "instructions", "exact", REASONING_GYM, OF_ENVIRONMENT)
"""Verifiers of this package: values of `reward.kind`."""


class VerifierConfig(Section):
    """A verifier: one of this package, or user code."""

    role = LEARNED
    kept = "verdicts must mean the same"

    kind: Text
    """As `reward.kind`."""
    settings: Settings = Field(default_factory=dict)
    """Keyword arguments of your own verifier, checked at the start."""
    timeout_s: Seconds | None = None
    """Time limit for one call: CPU time, or time in which no CPU time is used; of an async
    verifier, wall-clock time. After it the verdict is unknown; for `code`, where it is for all
    tests of a program, wrong. Unset: 10 s, for `code` 60 s; that of `[reward]` is the default of
    all `verifiers`."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        self._require_kind()
        return self

    def _require_kind(self) -> None:
        require_known("kind", self.kind, VERIFIERS)
        if self.settings and not is_code(self.kind):
            raise ValueError(f"settings ({self.settings!r}) need a kind that is code of your own")

    @property
    def parts(self) -> Sequence[VerifierConfig]:
        """The verifiers that judge a response; their answers must suit each of them."""
        return (self,)

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.kind


class ComponentConfig(VerifierConfig):
    """A verifier whose score is a part of the total."""

    weight: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """What its score counts in the total. Negative: a penalty."""

    @model_validator(mode="after")
    def _check_weight(self) -> Self:
        if not self.weight:
            raise ValueError("weight (0) must not be 0: leave the component out")
        return self


def _verifier(value: Any) -> Any:
    if not isinstance(value, str | dict | VerifierConfig):
        raise ValueError("must be a verifier, as reward.kind, or a table with kind and settings")
    return {"kind": value} if isinstance(value, str) else value


Verifiers = dict[Text, Annotated[VerifierConfig, BeforeValidator(_verifier)]]
Components = dict[Text, Annotated[ComponentConfig, BeforeValidator(_verifier)]]
_COMPONENT = re.compile(r"[A-Za-z0-9_.+-]{1,64}")
_MOST_COMPONENTS = 16


class RewardConfig(VerifierConfig):
    """How responses are verified."""

    kind: Text = ""
    """Verifier; either this or `components` is required. `math` compares the boxed answer, `code`
    runs unit tests, `instructions` applies IFEval's checks, `exact` compares the text after the
    last `>` (the demo), `reasoning_gym` scores with that package, `environment` takes the
    environment's verdict. Or code of your own, `path/to/file.py:NAME` or `package.module:NAME`
    (docs/rewards.md)."""
    components: Components = Field(default_factory=dict)
    """Verifiers that all judge every response, in place of `kind`: tables with `kind`, `settings`,
    `timeout_s` and `weight` (1). The grade is the sum of weight x score (docs/rewards.md)."""
    verifiers: Verifiers = Field(default_factory=dict)
    """Further verifiers, which a row of the data chooses by `"verifier": NAME`. A value is like
    `reward.kind`, or a table with `kind`, `settings` and `timeout_s`."""
    correct_above: Annotated[float, Field(ge=-1e6, le=1e6)] = 0.5
    """A response is correct, and counts in c, if the number of `reasoning_gym`, `components`, an
    environment or your own verifier is above this value."""
    graded: bool = False
    """Advantages from the verifier's numbers instead of 0 and 1. Only with methods that do not use
    c (docs/rewards.md)."""
    code: Text = ""
    """SHA-256 of the files with code of your own. Filled in when the config is loaded."""
    num_workers: Annotated[Workers, HOW] = 0
    """Verifier processes per rank. 0: the rank's share of the node's cores, at most 8."""
    truncated: Literal["judged", "unknown"] = "judged"
    """Training's verdict on responses that reached `rollout.max_response_tokens`: `judged` like any
    other (mostly wrong), or `unknown`, so that they leave their group (docs/rewards.md)."""
    max_unknown_share: Annotated[float, Field(ge=0, le=1), HOW] = 0.9
    """The run ends with an error once more than this share of a step's responses could not be
    judged (verdict unknown) in `max_unknown_steps` steps in a row. 1: never. Responses that
    `truncated` leaves out do not count."""
    max_unknown_steps: Annotated[int, Field(ge=1), HOW] = 3
    """See `max_unknown_share`."""
    sandbox: Annotated[Text, HOW] = "bubblewrap"
    """Where the model's programs run: `bubblewrap`, `apptainer:/PATH/OF/IMAGE`, `https://HOST:PORT`
    (a service on another machine), `sandboxfusion:http://HOST:PORT`, or `unsafe`: with your own
    rights (docs/sandbox.md)."""
    python: Annotated[PathText, HOW] = SYSTEM_PYTHON
    """Python that runs the model's programs; with Apptainer, a path inside the image. A service
    has its own. Programs see only this interpreter and its libraries."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            kind, _ = split_setting(self.sandbox)
        except ValueError as error:
            raise ValueError(f"sandbox {error}") from None
        for key in ("components", "verifiers"):
            for name, one in getattr(self, key).items():
                if one.kind == OF_ENVIRONMENT:
                    raise ValueError(
                        f"{key}.{name}: kind ({one.kind!r}) must be another: only reward.kind "
                        "takes the environment's verdict, in place of a verifier"
                    )
        if kind in REMOTE and self.python != SYSTEM_PYTHON:
            raise ValueError(
                f"python ({self.python!r}) does not go with sandbox ({self.sandbox!r}): a service "
                "has its own"
            )
        return self

    def _require_kind(self) -> None:
        if not self.components:
            if not self.kind:
                raise ValueError(f"kind ({self.kind!r}) is required, or components in its place")
            return super()._require_kind()
        if self.kind or self.settings:
            key, value = ("kind", self.kind) if self.kind else ("settings", self.settings)
            raise ValueError(
                f"{key} ({value!r}) does not go with components ({', '.join(self.components)}): "
                'make it one of them, and set kind = "" if the base names one'
            )
        for name in self.components:
            if name in self.verifiers:
                raise ValueError(f"components: {name!r} is a name in verifiers too")
            if not _COMPONENT.fullmatch(name):
                raise ValueError(
                    f"components: {name!r} must have 1 to 64 letters, digits or '_.+-', as it "
                    "names a metric"
                )
        if len(self.components) > _MOST_COMPONENTS:
            raise ValueError(
                f"components: {len(self.components)} of them; at most {_MOST_COMPONENTS}"
            )

    @property
    def parts(self) -> Sequence[VerifierConfig]:
        """The verifiers that judge a response; their answers must suit each of them."""
        return (*self.components.values(),) or (self,)

    @property
    def label(self) -> str:
        """Its name in messages."""
        return " + ".join(self.components) or self.kind

    def name_for(self, verifier: str) -> str:
        """The name in `by_name` of the verifier that a row asks for; what is not there, unchanged.

        `reward.kind` has the empty name, and so have components for the rows of generated problems,
        which ask for `reasoning_gym`.
        """
        if verifier == self.kind:
            return ""
        is_component = verifier == REASONING_GYM and self.has_component(REASONING_GYM)
        return "" if is_component and verifier not in self.verifiers else verifier

    def has_component(self, kind: str) -> bool:
        """Whether a component is of this kind."""
        return any(one.kind == kind for one in self.components.values())

    @property
    def by_name(self) -> dict[str, VerifierConfig]:
        """Every verifier by the name that rows use; the empty name: by default."""
        return {"": self, **self.verifiers}

    @property
    def by_setting(self) -> dict[str, VerifierConfig]:
        """Every verifier, each of the components too, by the setting that names it."""
        return {
            **({} if self.components else {"reward.kind": self}),
            **{f"reward.components.{name}": one for name, one in self.components.items()},
            **{f"reward.verifiers.{name}": one for name, one in self.verifiers.items()},
        }

    @property
    def code_names(self) -> list[str]:
        """User code that this section names."""
        return [one.kind for one in self.by_setting.values() if is_code(one.kind)]

    @property
    def gives_numbers(self) -> bool:
        """Whether a verifier may return a number instead of right or wrong."""
        kinds = {one.kind for one in self.by_setting.values()}
        return bool(self.components or self.code_names or kinds & {REASONING_GYM, OF_ENVIRONMENT})
