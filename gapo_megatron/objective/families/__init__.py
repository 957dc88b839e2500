"""Loss families, one file each. A new one needs a file here, an entry in `FAMILIES` and a preset.

CONTRIBUTING.md lists the tests and tables that name the families. `config.methods` names the family
of a method; `policy_loss` calls it, and does what all families share: log-ratios, clip widths,
denominators, checks.
"""

import functools

from gapo_megatron import user_code
from gapo_megatron.config.methods import Method
from gapo_megatron.errors import ConfigError
from gapo_megatron.objective.families.aspo import ASPO
from gapo_megatron.objective.families.base import Family, LossInputs, Terms
from gapo_megatron.objective.families.cispo import CISPO
from gapo_megatron.objective.families.clipped import CLIPPED
from gapo_megatron.objective.families.dcpo import DCPO
from gapo_megatron.objective.families.dppo import DPPO
from gapo_megatron.objective.families.fspo import FSPO
from gapo_megatron.objective.families.gmpo import GMPO
from gapo_megatron.objective.families.sapo import SAPO
from gapo_megatron.objective.families.topr import TOPR

FAMILIES: dict[str, Family] = {
    "clipped": CLIPPED,
    "cispo": CISPO,
    "sapo": SAPO,
    "gmpo": GMPO,
    "dppo": DPPO,
    "fspo": FSPO,
    "topr": TOPR,
    "dcpo": DCPO,
    "aspo": ASPO,
}
"""Loss families of this package by `Method.family`."""


def find_family(method: Method) -> Family:
    """Return the method's loss family; code of the user's own is loaded once per process.

    Raises:
        ConfigError: it cannot be loaded, or is no `Family`.
    """
    return _load(method.family) if user_code.is_code(method.family) else FAMILIES[method.family]


@functools.cache
def _load(name: str) -> Family:
    setting = "family of objective.method"
    family = user_code.load(name, setting=setting)
    if not isinstance(family, Family):
        raise ConfigError(
            f"{setting} ({name!r}) must be a gapo_megatron.objective.families.Family, not "
            f"{type(family).__name__}"
        )
    return family


__all__ = ["FAMILIES", "Family", "LossInputs", "Terms", "find_family"]
