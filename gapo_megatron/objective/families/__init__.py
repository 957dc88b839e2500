"""Loss families, one file each. A new one needs a file here, an entry in `FAMILIES` and a preset.

CONTRIBUTING.md lists the tests and tables that name the families. `config.methods` names the family
of a method; `policy_loss` calls it, and does what all families share: log-ratios, clip widths,
denominators, checks.
"""

import functools

import torch

from gapo_megatron import user_code
from gapo_megatron.config.methods import Method
from gapo_megatron.errors import ConfigError, shown
from gapo_megatron.objective.families.aspo import aspo_loss
from gapo_megatron.objective.families.base import CLIP, Family, LossInputs, LossResult
from gapo_megatron.objective.families.cispo import cispo_loss
from gapo_megatron.objective.families.clipped import clipped_loss
from gapo_megatron.objective.families.dcpo import dcpo_loss
from gapo_megatron.objective.families.dppo import dppo_loss
from gapo_megatron.objective.families.fspo import fspo_loss
from gapo_megatron.objective.families.gmpo import gmpo_loss
from gapo_megatron.objective.families.sapo import sapo_loss
from gapo_megatron.objective.families.topr import topr_loss

FAMILIES: dict[str, Family] = {
    "clipped": clipped_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "gmpo": gmpo_loss,
    "dppo": dppo_loss,
    "fspo": fspo_loss,
    "topr": topr_loss,
    "dcpo": dcpo_loss,
    "aspo": aspo_loss,
}
"""Loss families of this package by `Method.family`."""


def find_family(method: Method) -> Family:
    """The loss of the method's family; user code is loaded once per process.

    Raises:
        ConfigError: it cannot be loaded or called.
    """
    return FAMILIES.get(method.family) or _load(method.family)


@functools.cache
def _load(name: str) -> Family:
    """The user's function, with a check of what it returns in every call."""
    setting = "family of objective.method"
    family = user_code.load(name, setting=setting)
    if not callable(family):
        raise ConfigError(
            f"{setting} ({name!r}) must be a function from LossInputs to (loss, metrics), not "
            f"{type(family).__name__}"
        )

    def checked(tokens: LossInputs) -> LossResult:
        result = family(tokens)
        where = f"{setting} ({name!r})"
        match result:
            case torch.Tensor() as sums, dict() as metrics:
                pass
            case _:
                kind = type(result).__name__
                raise ConfigError(f"{where} returned a {kind}; it must return (tensor, dict)")
        if sums.shape != tokens.advantages.shape:
            raise ConfigError(
                f"{where}: the loss has shape {tuple(sums.shape)}; it must be [B], "
                f"{tuple(tokens.advantages.shape)}"
            )
        learns = torch.is_grad_enabled() and tokens.log_probs.requires_grad
        if learns and not sums.requires_grad:
            raise ConfigError(f"{where}: the loss has no gradient; it must depend on log_probs")
        shape = tuple((tokens.sequence_ids if tokens.per_token else tokens.advantages).shape)
        for metric, value in metrics.items():
            if not isinstance(value, torch.Tensor) or metric == "ratio":
                raise ConfigError(
                    f"{where}: metric {metric!r} ({shown(value)}) must be a tensor, and not be "
                    "'ratio'"
                )
            is_bool = value.dtype == torch.bool
            if metric in CLIP and (tuple(value.shape) != shape or is_bool != (metric == "clipped")):
                raise ConfigError(
                    f"{where}: {metric} is {value.dtype} {tuple(value.shape)}; it must be "
                    f"{'bool' if metric == 'clipped' else 'float'}, shaped like the ratio, {shape}"
                )
        return sums, metrics

    return checked


__all__ = ["FAMILIES", "Family", "LossInputs", "LossResult", "find_family"]
