"""Messages between the two sides of a run: orders of the trainer, answers of the generation side.

Orders are numbered and executed in sequence. Messages are JSON, except the table.
A name is used once in a launch (`mailbox.Mailbox`).

    order/N    by trainer 0       an `Order`
    ready/N    by generation 0    it has reached this order of weights, and needs what it says
                                  (`rollout.engine.Needs`); that is sent then
    probe/N    by trainer 0       sequences and the trainer's log-probs, to verify the weights
    answer/N   by generation 0    the order is executed; its result
    batch/N    by generation 0    metrics, samples, times, data position; before the answer
    table/N    by generation 0    the same batch's table, as bytes of `rollouts.ROW`
    open/N     by generation 0    with partial rollouts: such a table of the groups that stay open
                                  after the batch; or, with `begin` and by trainer 0, of those that
                                  a checkpoint has
    run        by trainer 0       before all others: the run `begins`, or is already `finished`
    stop       by trainer 0       abort batches being sampled ahead
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from gapo_megatron.rollouts import Rollouts

STOP = "stop"


@dataclass(frozen=True, slots=True)
class Order:
    """The next task of the generation side."""

    task: Literal["begin", "weights", "evaluate", "sample", "end"]
    """`begin` comes first and sets the data position. `weights`: receive those of a version."""
    step: int = 0
    """Step to evaluate before or to sample for; or version of the weights."""
    source_state: Mapping[str, Any] | None = None
    """`begin`: data position of the next problems."""
    dp_ranks: Sequence[int] = ()
    """`begin` with `scorers`: `learn.plan.DataParallelRanks` of the trainers."""
    scorers: Sequence[int] = ()
    has_open_groups: bool = False
    """`begin`: whether groups of a checkpoint follow (`run.open_groups`)."""
    scale: float | None = None
    """`weights`: factor of B A of the policy's adapter; None if it has none."""

    def to_bytes(self) -> bytes:
        """Encode as JSON."""
        return pack(asdict(self))

    @classmethod
    def from_bytes(cls, content: bytes) -> Order:
        """What `to_bytes` wrote."""
        return cls(**unpack(content))


def pack(value: Any) -> bytes:
    """`value` as JSON."""
    return json.dumps(value).encode()


def unpack(content: bytes) -> Any:
    """What `pack` wrote."""
    return json.loads(content)


def pack_probe(probe: Rollouts, log_probs: Sequence[np.ndarray]) -> bytes:
    """Encode sequences, without masks, and float32 log-probs of their response tokens, exactly."""
    rows = range(len(probe))
    columns = (
        [probe.prompt_ids[i] for i in rows],
        [probe.response_ids[i] for i in rows],
        log_probs,
    )
    return pack([[one.tolist() for one in column] for column in columns])


def unpack_probe(content: bytes) -> tuple[Rollouts, list[np.ndarray]]:
    """What `pack_probe` wrote."""
    prompts, responses, log_probs = unpack(content)
    probe = Rollouts.of(
        [np.array(ids, dtype=np.int32) for ids in prompts],
        [np.array(ids, dtype=np.int32) for ids in responses],
    )
    return probe, [np.array(values, dtype=np.float32) for values in log_probs]
