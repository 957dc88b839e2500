"""Loss families, one file each. A new one needs a file here, an entry in `FAMILIES` and a preset.

CONTRIBUTING.md lists the tests and tables that name the families. `config.methods` names the family
of a method; `policy_loss` calls it, and does what all families share: log-ratios, clip widths,
denominators, checks.
"""

import functools

from gapo_megatron import user_code
from gapo_megatron.config.methods import Method
from gapo_megatron.errors import ConfigError
from gapo_megatron.objective.families.aspo import aspo_loss
from gapo_megatron.objective.families.base import Family, LossInputs, LossResult
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
    return _load(method.family) if user_code.is_code(method.family) else FAMILIES[method.family]


@functools.cache
def _load(name: str) -> Family:
    setting = "family of objective.method"
    family: Family = user_code.load(name, setting=setting)
    if not callable(family):
        raise ConfigError(
            f"{setting} ({name!r}) must be a function from LossInputs to (loss, metrics), not "
            f"{type(family).__name__}"
        )
    return family


__all__ = ["FAMILIES", "Family", "LossInputs", "LossResult", "find_family"]
