"""Make a problem file from a published data set (docs/data.md)."""

from gapo_megatron.ops.prepare.held_out import HeldOut
from gapo_megatron.ops.prepare.output import Counts
from gapo_megatron.ops.prepare.prepare import prepare
from gapo_megatron.ops.prepare.rules import Lengths
from gapo_megatron.ops.prepare.sources import Kind, Source, deepcoder, deepscaler, own

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
