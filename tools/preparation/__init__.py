"""Make a problem file from a published data set (docs/data.md)."""

from tools.preparation.held_out import HeldOut
from tools.preparation.output import Counts
from tools.preparation.prepare import prepare
from tools.preparation.rules import Lengths
from tools.preparation.sources import Kind, Source, deepcoder, deepscaler, own

__all__ = [
    "Counts",
    "HeldOut",
    "Kind",
    "Lengths",
    "Source",
    "deepcoder",
    "deepscaler",
    "own",
    "prepare",
]
