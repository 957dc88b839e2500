"""Trainer end of a run whose last ranks only generate: it orders batches and receives them.

`run/generation_side.py` is the other end. With `rollout.max_staleness` k = 0 a batch is ordered
once its weights have been sent: generation and training alternate. With k >= 1 weights are sent
after every k-th step, then every batch up to k steps ahead is ordered and sampled during training.
Which weights sample which batch depends on k alone, never on timing: runs are reproducible.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch.distributed as dist
from pydantic import TypeAdapter

from gapo_megatron import exchange
from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import Config
from gapo_megatron.learn.plan import DataParallelRanks
from gapo_megatron.policy import Policy
from gapo_megatron.rollout.adapter_sync import Sending, low_rank_adapter
from gapo_megatron.rollout.sync import score_probe
from gapo_megatron.rollout.table import to_episodes
from gapo_megatron.rollout.verify import WeightCheck
from gapo_megatron.rollouts import ROW, Batch, Rollouts
from gapo_megatron.run import open_groups
from gapo_megatron.run.attempt import Attempt
from gapo_megatron.run.bridge import Bridge
from gapo_megatron.run.orders import STOP, Order, pack_probe, unpack
from gapo_megatron.types import Episode, Prompt, Sample, Timeline

logger = logging.getLogger(__name__)

_TAG = 1
"""Tag of messages with the tokens of open groups, between trainers."""

TIMELINES = TypeAdapter(list[Timeline])


@dataclass
class GenerationRanks:
    """A `Generation` on other ranks of the job.

    Trainer 0 posts the orders; all trainers wait for the answers. Every batch carries the version
    of the weights that sampled it.
    """

    config: Config
    bridge: Bridge
    policy: Policy
    attempt: Attempt
    stopwatch: Stopwatch
    gloo_group: dist.ProcessGroup
    """All ranks of the trainer."""
    source_state: Mapping[str, Any]
    """Data position of the next batch that is not collected yet; see `Generation`."""
    next_step: int
    """First step whose batch is neither ordered nor collected yet."""
    problems: Sequence[Prompt]
    """Problems of the data, by the table's numbers."""
    open_groups: Rollouts
    """Groups with unfinished responses after the batch that was collected last; each rank has some
    of their tokens (`run.open_groups`). The generation side continues its own copy."""
    stages: Sequence[str] = ("wait",)
    version: int = -1
    """Version of the weights that were sent last."""
    _num_orders: int = 0
    _samples: dict[int, int] = field(default_factory=dict)
    """Number of the order of each batch that is not collected yet, by step."""
    _num_synced: int = 0
    """Number of the last order of weights: all orders up to it have been executed."""
    _num_erased: int = 0
    """Orders whose messages have been erased."""
    _num_given_back: int = 0
    """Number of tokens of aborted batches."""
    _collected: int = -1
    """Number of the order of the batch that was collected last."""
    _open_table: bytes = b""
    """Table of the groups that stay open after that batch."""
    _open_before: Rollouts | None = None
    """`open_groups` before that batch; None: this attempt has collected none."""
    _posted: exchange.Posted | None = None
    """Pending sends of open groups to the generation side."""

    def __post_init__(self) -> None:
        """Send the generation side its first data position, and open groups. Collective."""
        self.dp_ranks = DataParallelRanks.gather(self.policy.groups, self.gloo_group)
        begin = Order(
            "begin",
            source_state=self.source_state,
            dp_ranks=self.dp_ranks.dp_ranks,
            scorers=self.dp_ranks.scorers,
            has_open_groups=len(self.open_groups) > 0,
        )
        number = self._order(begin)
        if begin.has_open_groups:
            if self.attempt.leads:
                self.bridge.mail.post(f"open/{number}", self.open_groups.table.tobytes())
            self._posted = open_groups.post(self.open_groups, self.bridge, tag=number)

    @property
    def samples_ahead(self) -> bool:
        """Whether a batch may be sampled by older weights: `Generation.samples_ahead`."""
        return self.config.rollout.max_staleness > 0

    def evaluate(self, step: int) -> dict[str, float] | None:
        """Have the held-out problems sampled and judged: `Generation.evaluate`."""
        with self.stopwatch("evaluate"):
            assert self.version == step, f"weights {self.version} for the evaluation of step {step}"
            answer = self._wait(f"answer/{self._order(Order('evaluate', step))}")
        metrics: dict[str, float] | None = unpack(answer)
        return metrics

    def collect(self, step: int) -> Rollouts | None:
        """Wait for the batch of a step: `Generation.collect`."""
        self.sample_ahead()
        if self._posted is not None and self._posted.is_done():
            self._posted = None  # and its buffers
        with self.stopwatch("wait"):
            number = self._samples.pop(step)
            answer = unpack(self._wait(f"answer/{number}"))
            if answer["is_aborted"]:
                self._num_given_back += answer["num_tokens"]
                return None
            names = [f"batch/{number}", f"table/{number}"]
            names += [f"open/{number}"] if self.config.batch.partial_rollouts else []
            about, rows, *opened = self._from_first(*names)
        self._open_table = opened[0] if opened else b""
        batch = unpack(about)
        self._collected, self.source_state = number, batch["source_state"]
        self.stopwatch.notes |= batch["clocks"]
        metrics: dict[str, float] = batch["metrics"]
        if self.samples_ahead:
            metrics["rollout/version_gap"] = float(step - batch["policy_version"])
        return Rollouts(
            np.frombuffer(rows, dtype=ROW).copy(),
            metrics=metrics,
            samples=[Sample(**one) for one in batch["samples"]],
            timelines=TIMELINES.validate_python(batch["timelines"]),
        )

    def carry(self, step: int) -> None:
        """Nothing: open groups keep the engine's log-probs alone (docs/objective.md)."""

    def bring_tokens(self, batch: Batch) -> Batch:
        """Receive this rank's share, and its part of the open groups: `Generation.bring_tokens`."""
        table = batch.table
        with self.stopwatch("exchange"):
            wanted = self.dp_ranks.wanted(batch, every=True)
            tokens = exchange.receive(
                exchange.token_columns(table),
                table["holder"],
                wanted[self.policy.groups.rank],
                channel=self.bridge.messages,
                tag=self._collected,
            )
            self._open_before = self.open_groups
            self.open_groups = open_groups.receive(
                self._open_table, self.bridge, tag=self._collected
            )
        # A checkpoint gathers a sequence from the lowest rank that receives it.
        holder = table["holder"].copy()
        for rank in reversed(range(len(wanted))):
            holder[wanted[rank]] = rank
        return batch.changed(holder=holder).with_tokens(tokens)

    def sync(self, probe: Rollouts, *, policy_version: int) -> WeightCheck | None:
        """Send the weights once the generation side has reached their order: `Generation.sync`."""
        if not self._is_due(policy_version):
            return None
        with self.stopwatch("sync"):
            adapter = low_rank_adapter(self.policy)
            scale = None if adapter is None else adapter.scale
            number = self._order(Order("weights", policy_version, scale=scale))
            log_probs = score_probe(self.policy, probe, self.gloo_group)
            if self.attempt.leads:
                self.bridge.mail.post(f"probe/{number}", pack_probe(probe, log_probs))
            sending = Sending(self.policy, unpack(self._wait(f"ready/{number}")))
            if sending.brings_weights:
                self.bridge.send_shards(self.policy.exported, sending.weight_shard)
            if sending.brings_factors:
                self.bridge.send_shards(*sending.factor_shards())
            check = WeightCheck(**unpack(self._wait(f"answer/{number}")))
            check = replace(check, merge_rounding=sending.rounding)
        self._erase(before=self._num_synced)
        self.version, self._num_synced = policy_version, number
        return check

    def gather_open_groups(self, *, before_batch: bool = False) -> Sequence[tuple[Episode, ...]]:
        """Groups with unfinished responses, on rank 0: `Generation.gather_open_groups`."""
        groups = self._open_before if before_batch else self.open_groups
        assert groups is not None, "a batch that a checkpoint held is not saved again"
        if not len(groups):
            return ()
        channel = exchange.GroupChannel(self.gloo_group)
        gathered = exchange.gather_tokens(groups, channel=channel, tag=_TAG)
        if channel.rank != 0:
            return ()
        return to_episodes(gathered, [self.problems[i] for i in gathered.problems])

    def sample_ahead(self) -> None:
        """Order every batch that the weights sent last may sample: `Generation.sample_ahead`."""
        last = self.version + self.config.rollout.max_staleness
        for step in range(self.next_step, min(last + 1, self.config.run.num_steps)):
            self._samples[step] = self._order(Order("sample", step))
            self.next_step = step + 1

    def has_batch(self, step: int) -> bool:
        """Whether the batch was ordered before the last weights: `Generation.has_batch`."""
        number = self._samples.get(step, self._num_synced)
        is_there = number < self._num_synced
        return is_there and not unpack(self._wait(f"answer/{number}"))["is_aborted"]

    def discard_ahead(self) -> int:
        """Abort what is sampled ahead: `Generation.discard_ahead`."""
        if self._samples and self.attempt.leads:
            self.bridge.mail.post(STOP, b"")
        for number in self._samples.values():
            self._num_given_back += unpack(self._wait(f"answer/{number}"))["num_tokens"]
        self._samples.clear()
        num_tokens, self._num_given_back = self._num_given_back, 0
        if num_tokens and self.attempt.leads:
            logger.info(
                "discarded %d tokens that were sampled ahead; their problems are drawn again",
                num_tokens,
            )
        return num_tokens

    def leave_memory(self) -> None:
        """Nothing: the engines have devices of their own."""

    def close(self) -> None:
        """End the generation side. Collective over both sides."""
        self._order(Order("end"))
        self.bridge.close()

    def _is_due(self, version: int) -> bool:
        """Whether the weights of `version` are sent.

        They are sent after every `max_staleness`-th step, after the last one, and where older
        weights may sample no further batch.
        """
        every, last = self.config.rollout.max_staleness, self.config.run.num_steps
        return version % max(every, 1) == 0 or version == last or self.next_step <= version

    def _order(self, order: Order) -> int:
        """Post the next order; returns its number."""
        number = self._num_orders
        self._num_orders += 1
        if self.attempt.leads:
            self.bridge.mail.post(f"order/{number}", order.to_bytes())
        return number

    def _wait(self, name: str) -> bytes:
        """Wait for a message while the generation side makes progress."""
        found = self.bridge.wait(
            lambda: self.bridge.mail.look(name), alive=self.attempt.restart_watch
        )
        self.attempt.alive()
        return found

    def _from_first(self, *names: str) -> list[bytes]:
        """Read and erase large messages on trainer 0 and broadcast them to all trainers.

        They are posted before the answer that the caller has waited for. Collective.
        """
        contents: list[bytes] = [b"" for _ in names]
        if self.attempt.leads:
            contents = [self.bridge.mail.take(name) for name in names]
        dist.broadcast_object_list(contents, src=0, group=self.gloo_group)
        return contents

    def _erase(self, *, before: int) -> None:
        """Erase messages that all ranks have read, so that the mailbox does not grow.

        Args:
            before: number of an order of weights that another such order has followed: every rank
                of both sides has read all messages of earlier orders by then.
        """
        if self.attempt.leads:
            for number in range(self._num_erased, before):
                for kind in ("order", "ready", "probe", "answer", "open"):
                    self.bridge.mail.erase(f"{kind}/{number}")
        self._num_erased = max(self._num_erased, before)
