"""Loss families, one file each. A new one needs a file here, an entry in `FAMILIES` and a preset.

CONTRIBUTING.md lists the tests and tables that name the families. `config.methods` names the family
of a method; `policy_loss` calls it, and does what all families share: log-ratios, clip widths,
denominators, checks.
"""

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
"""Loss families by `Method.family`."""

__all__ = ["FAMILIES", "Family", "LossInputs", "Terms"]
