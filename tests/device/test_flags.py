"""Flags: kept on the device, read together."""

from __future__ import annotations

import pytest
import torch

from gapo_megatron.device.flags import Flags
from gapo_megatron.errors import DivergenceError
from tests.messages import mentions
from tests.synchronisations import counted_waits


def keep(flags: Flags, *raised: bool) -> None:
    for number, is_raised in enumerate(raised):
        flags.where = f"micro-batch {number}"
        flags.keep(torch.tensor(is_raised), lambda n=number: DivergenceError(f"row {n + 7}"))


def test_the_first_that_is_raised_explains() -> None:
    flags = Flags()
    keep(flags, False, True, True)
    assert bool(flags.any(torch.device("cpu")))
    with pytest.raises(DivergenceError, match=mentions("micro-batch 1", "row 8")):
        flags.check()


@pytest.mark.parametrize("raised", [(), (False,), (False, False)])
def test_none_raised_says_nothing(raised: tuple[bool, ...]) -> None:
    flags = Flags()
    keep(flags, *raised)
    assert not bool(flags.any(torch.device("cpu"))) and flags.error() is None
    flags.check()


def test_many_are_read_at_once() -> None:
    flags = Flags()
    with counted_waits() as waits:
        keep(flags, *[False] * 20)
        flags.any(torch.device("cpu"))
        assert not waits
        flags.check()
    assert sum(waits.values()) == 1
