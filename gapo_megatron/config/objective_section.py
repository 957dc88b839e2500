"""Section [objective]: the method, and what replaces its numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from gapo_megatron.config.methods import METHODS, Aggregation, Method
from gapo_megatron.config.section import OBJECTIVE, Section
from gapo_megatron.config.types import NonNegative, Positive, Settings, Text
from gapo_megatron.config.user_method import check_method, find_method, values_of
from gapo_megatron.user_code import is_code

METHOD_KEYS = (
    "adaptive",
    "eps_low",
    "eps_high_max",
    "aggregation",
    "normalize_std",
    "std_floor",
    "focal_gamma",
    "ratio_max",
    "eps_low_correct",
    "eps_high_wrong",
    "rescue_noise",
    "off_policy_mask",
    "second_moment_max",
    "positive_share_min",
)
"""Settings of `[objective]` that replace a number of the method's preset."""

OWN_KEYS = (
    "ratio_max",
    "eps_low_correct",
    "eps_high_wrong",
    "rescue_noise",
    "second_moment_max",
    "positive_share_min",
)
"""Those of them that some methods do not have: None or infinite in the preset."""


OwnMethod = Annotated[Settings, AfterValidator(lambda given: values_of(check_method(given)))]


def _has(method: Method, key: str) -> bool:
    number = getattr(method, key)
    return number is not None and math.isfinite(number)


class ObjectiveConfig(Section):
    """The method; the other keys override numbers of its preset (docs/objective.md)."""

    role = OBJECTIVE

    method: Text = "gapo"
    """Name of a preset, or code of your own, `path/to/file.py:NAME` or `package.module:NAME`
    (docs/objective.md)."""
    code: Text = ""
    """SHA-256 of the files with code of your own. Filled in when the config is loaded."""
    own_method: OwnMethod | None = None
    """What a method of your own is, so that nothing that reads a run's folder needs its code.
    Filled in when the config is loaded."""
    adaptive: bool | None = None
    """GAPO's upper clip, wider for small c, instead of one for all c. Not with `topr`, `m2po` and
    `bapo`."""
    eps_low: Positive | None = None
    """Lower clip width: the ratio is clipped at 1 - `eps_low`."""
    eps_high_max: NonNegative | None = None
    """Upper clip width: the ratio is clipped at 1 + `eps_high_max`; with `adaptive`, at c = 1. Only
    `topr` allows 0."""
    aggregation: Aggregation | None = None
    """What the summed token losses are divided by (docs/objective.md)."""
    normalize_std: bool | None = None
    """Divide advantages by their group's standard deviation, as GRPO does. So does the source of
    CISPO, but not the preset `cispo`."""
    std_floor: NonNegative | None = None
    """Least standard deviation that `normalize_std` divides by, as for graded rewards with a
    judge's noise."""
    focal_gamma: NonNegative | None = None
    """Exponent of F-GRPO's factor (1 - c/k)^gamma of the advantages. 0: off."""
    ratio_max: Annotated[Positive, Field(ge=1)] | None = None
    """Bound on the ratio, for the methods that have one (`dppo_tv`, `aspo`, `dcpo`)."""
    eps_low_correct: Annotated[Positive, Field(le=1)] | None = None
    """Lower clip width of correct responses (`abc` only)."""
    eps_high_wrong: Positive | None = None
    """Upper clip width of wrong responses (`abc` only)."""
    rescue_noise: Annotated[Positive, Field(lt=1)] | None = None
    """Width of the noise by which NSR keeps tokens beyond its clip (`nsr` only)."""
    off_policy_mask: Positive | None = None
    """Mask wrong responses whose mean log-ratio is below minus this value (OPSM); any method.
    OPSM's source compares with the engine: `old_log_probs = "rollout"`."""
    second_moment_max: Positive | None = None
    """M2PO's budget for the second moment of the log-ratio (`m2po` only)."""
    positive_share_min: Annotated[Positive, Field(lt=1)] | None = None
    """BAPO widens its clip until correct responses have this share of the loss (`bapo` only)."""
    kl_coef: NonNegative = 0.0
    """Weight of KL(policy || initial policy). Above 0, sequences with A = 0 are trained on too."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus. Above 0, sequences with A = 0 are trained on too."""
    importance_weights: Literal["none", "sequence", "token"] = "none"
    """Weight the gradient by the importance ratio of trainer to engine, truncated at
    `importance_weight_max`: corrects for other kernels, precision and older weights
    (docs/objective.md). `sequence`: one weight for a response, the geometric mean over its tokens.
    `token`: one for each token (TIS)."""
    importance_weight_max: Annotated[Positive, Field(ge=1)] | None = None
    """Largest importance weight. By default 2 with `importance_weights`. Alone it means
    `importance_weights = "sequence"`."""
    old_log_probs: Literal["trainer", "rollout"] = "trainer"
    """Denominator of the ratio. `trainer`: recomputed by the trainer at the weights that the step
    begins with. `rollout`: the engine's, at sampling time (docs/objective.md)."""

    routing_replay: Literal["none", "trainer", "rollout"] | None = None
    """Whose choice of experts the updates of a model with experts replay (docs/objective.md).
    `trainer`: that of the pass of the old log-probs. `rollout`: the engine's while sampling; that
    pass replays it, too. `none`: nobody's, the routers choose in every pass. By default `trainer`,
    and `none` where there is no such pass."""

    @model_validator(mode="before")
    @classmethod
    def _complete_weights(cls, given: Any) -> Any:
        """Each of the two settings of importance weights alone means the other, too."""
        if not isinstance(given, dict):
            return given
        if given.get("importance_weights", "none") != "none":
            if given.get("importance_weight_max") is None:
                return given | {"importance_weight_max": 2.0}
        elif "importance_weights" not in given and given.get("importance_weight_max") is not None:
            return given | {"importance_weights": "sequence"}
        return given

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.importance_weights == "none" and self.importance_weight_max is not None:
            raise ValueError(
                f"importance_weight_max ({self.importance_weight_max}) does nothing with "
                "importance_weights 'none'"
            )
        if self.own_method is not None and not is_code(self.method):
            raise ValueError(
                f"own_method ({self.own_method!r}) does not go with method {self.method!r}, which "
                "is no code of your own. Remove the line"
            )
        if self.routing_replay == "trainer" and self.old_log_probs == "rollout":
            raise ValueError(
                "routing_replay ('trainer') needs old_log_probs 'trainer': with 'rollout' there is "
                "no pass of the trainer whose routes could be replayed"
            )
        preset, method = self.preset, self.resolve()
        if method.eps_high_max == 0 < preset.eps_high_max:
            raise ValueError(f"eps_high_max ({method.eps_high_max}) must be greater than 0")
        if method.is_band and method.eps_low >= 1:
            raise ValueError(f"eps_low ({method.eps_low}) must be below 1: ratios are positive")
        if method.adaptive and not method.has_width_by_c:
            raise ValueError(
                f"adaptive (true) does nothing for method {self.method!r}: it has no fixed upper "
                "width for correct responses"
            )
        if (method.is_band or method.adaptive) and method.eps_high_max < method.eps_low:
            raise ValueError(
                f"eps_high_max ({method.eps_high_max}) must be at least eps_low ({method.eps_low})"
                + ("" if method.is_band else " with adaptive=true")
            )
        if method.advantages:
            for key in ("normalize_std", "focal_gamma", "std_floor", "virtual_correct"):
                if value := getattr(method, key):
                    raise ValueError(
                        f"{key} ({value}) does nothing for method {self.method!r}, which makes its "
                        f"advantages by {method.advantages!r}"
                    )
        if method.std_floor and not method.normalize_std:
            raise ValueError(f"std_floor ({method.std_floor}) does nothing without normalize_std")
        self._check_own_keys()
        return self

    def _check_own_keys(self) -> None:
        for key in OWN_KEYS:
            value = getattr(self, key)
            if value is None or _has(self.preset, key):
                continue
            with_it = ", ".join(name for name, one in METHODS.items() if _has(one, key))
            raise ValueError(
                f"{key} ({value}) does nothing for method {self.method!r}; methods that have it: "
                f"{with_it}"
            )

    @property
    def preset(self) -> Method:
        """The method without this section's values.

        User code is loaded, once, only if `own_method` does not say what it is.
        """
        if self.own_method is not None:
            return Method(**self.own_method)
        return find_method(self.method)

    @property
    def code_names(self) -> list[str]:
        """User code that this section names: the method, its family and its advantages."""
        parts = (self.method, self.preset.family, self.preset.advantages)
        return [one for one in parts if is_code(one)]

    def resolve(self) -> Method:
        """The method with this section's values in place of its own."""
        given = {key: value for key in METHOD_KEYS if (value := getattr(self, key)) is not None}
        return dataclasses.replace(self.preset, **given)

    @property
    def replayed_routes(self) -> Literal["none", "trainer", "rollout"]:
        """`routing_replay` of a model with experts, or its default."""
        if self.routing_replay is not None:
            return self.routing_replay
        return "trainer" if self.old_log_probs == "trainer" else "none"

    @property
    def needs_every_sequence(self) -> bool:
        """Whether sequences with A = 0 have a gradient, too."""
        return self.kl_coef > 0 or self.entropy_coef > 0
