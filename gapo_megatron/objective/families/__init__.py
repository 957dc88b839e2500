"""Loss families, one file each. A new one needs a file here, an entry in `FAMILIES` and a preset.

CONTRIBUTING.md lists the tests and tables that name the families. `config.methods` names the family
of a method; `policy_loss` calls it, and does what all families share: log-ratios, clip widths,
denominators, checks.
"""

import functools
from typing import Any

import torch

from gapo_megatron import user_code
from gapo_megatron.config.methods import Method
from gapo_megatron.errors import ConfigError, shown
from gapo_megatron.objective.families.abc import abc_loss
from gapo_megatron.objective.families.aspo import aspo_loss
from gapo_megatron.objective.families.atr import atr_loss
from gapo_megatron.objective.families.base import CLIP, Family, LossInputs, LossResult
from gapo_megatron.objective.families.cispo import cispo_loss
from gapo_megatron.objective.families.clipped import clipped_loss
from gapo_megatron.objective.families.dcpo import dcpo_loss
from gapo_megatron.objective.families.dgpo import dgpo_loss
from gapo_megatron.objective.families.dppo import dppo_loss
from gapo_megatron.objective.families.fspo import fspo_loss
from gapo_megatron.objective.families.gmpo import gmpo_loss
from gapo_megatron.objective.families.nsr import nsr_loss
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
    "atr": atr_loss,
    "abc": abc_loss,
    "dgpo": dgpo_loss,
    "nsr": nsr_loss,
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
        if fault := _fault(result, tokens):
            raise ConfigError(f"{setting} ({name!r}): {fault}")
        return result

    return checked


def _fault(result: Any, tokens: LossInputs) -> str:
    """What is wrong with the result of a user's family; "" if it is a `LossResult`."""
    match result:
        case torch.Tensor() as sums, dict() as metrics:
            pass
        case _:
            return f"it returned a {type(result).__name__}; it must return (tensor, dict)"
    if (found := tuple(sums.shape)) != (wanted := tuple(tokens.advantages.shape)):
        return f"the loss has shape {found}; it must be [B], {wanted}"
    learns = torch.is_grad_enabled() and tokens.log_probs.requires_grad
    if learns and not sums.requires_grad:
        return "the loss has no gradient; it must depend on log_probs"
    shape = tuple((tokens.sequence_ids if tokens.per_token else tokens.advantages).shape)
    for name, value in metrics.items():
        if not isinstance(value, torch.Tensor) or name == "ratio":
            return f"metric {name!r} ({shown(value)}) must be a tensor, and not be 'ratio'"
        kind = "bool" if name == "clipped" else "float"
        is_kind = (value.dtype == torch.bool) == (name == "clipped")
        if name in CLIP and (tuple(value.shape) != shape or not is_kind):
            there = f"{value.dtype} {tuple(value.shape)}"
            return f"{name} is {there}; it must be {kind}, shaped like the ratio, {shape}"
    return ""


__all__ = ["FAMILIES", "Family", "LossInputs", "LossResult", "find_family"]
