"""Groups with unfinished responses, on their way between the two sides of a run.

The generation side continues them. The trainers have them as well, since they write the
checkpoints. On either side the ranks keep the tokens of the rows in turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gapo_megatron import exchange
from gapo_megatron.rollouts import ROW, Rollouts
from gapo_megatron.run.bridge import Bridge


def post(groups: Rollouts, bridge: Bridge, *, tag: int) -> exchange.Posted:
    """Start sending the tokens on this rank to the ranks of the other side.

    Args:
        groups: the same table on every rank of this side, whose ranks its holders are.
        bridge: this rank's end.
        tag: the same as the receivers'.

    Returns:
        The messages; keep them until their `wait` has returned. Does not wait for receivers.
    """
    table, (first_here, _) = groups.table, _side(bridge, is_generation=bridge.is_generation)
    first, count = _side(bridge, is_generation=not bridge.is_generation)
    wanted: list[Sequence[int]] = [()] * first
    wanted += [range(rank, len(groups), count) for rank in range(count)]
    return exchange.post(
        groups.tokens,
        exchange.token_columns(table),
        table["holder"] + first_here,
        wanted,
        channel=bridge.messages,
        tag=tag,
    )


def receive(table: bytes, bridge: Bridge, *, tag: int) -> Rollouts:
    """Receive this rank's part of the groups that the other side has posted.

    Args:
        table: the other side's table, as bytes of `rollouts.ROW`.
        bridge: this rank's end.
        tag: the same as the senders'.

    Returns:
        The groups with the tokens of this rank; the holders are ranks of this side.
    """
    rows = np.frombuffer(table, dtype=ROW)
    first_there, _ = _side(bridge, is_generation=not bridge.is_generation)
    first, count = _side(bridge, is_generation=bridge.is_generation)
    rank = bridge.messages.rank - first
    tokens = exchange.receive(
        exchange.token_columns(rows),
        rows["holder"] + first_there,
        range(rank, len(rows), count),
        channel=bridge.messages,
        tag=tag,
    )
    return Rollouts(rows).changed(holder=np.arange(len(rows)) % count).with_tokens(tokens)


def _side(bridge: Bridge, *, is_generation: bool) -> tuple[int, int]:
    """First rank and number of ranks of a side, in the channel of both."""
    if is_generation:
        return bridge.num_training, bridge.num_generation
    return 0, bridge.num_training
