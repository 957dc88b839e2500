"""Make a problem file from a published data set (docs/data.md)."""

from gapo_tools.preparation.held_out import HeldOut
from gapo_tools.preparation.output import Counts
from gapo_tools.preparation.problem_folder import prepare
from gapo_tools.preparation.rules import Lengths
from gapo_tools.preparation.sources import Source, deepcoder, deepscaler, own

__all__ = [
    "Counts",
    "HeldOut",
    "Lengths",
    "Source",
    "deepcoder",
    "deepscaler",
    "own",
    "prepare",
]
