"""Trainer end of a run whose last ranks only generate: it orders batches and receives them.

`run/generation_side.py` is the other end. With `rollout.max_staleness` k = 0 a batch is ordered
once its weights have been sent: generation and training alternate. With k >= 1 weights are sent
after every k-th step, then every batch up to k steps ahead is ordered and sampled during training.
Which weights sample which batch depends on k alone, never on timing: runs are reproducible.

**When generation ranks are gone**, the trainers find out at the next word from the other side, and
begin again with the ranks that are left as a resumed run would: `begin`, with the data position and
the open groups after the last batch that was collected, then all that was ordered since.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

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
from gapo_megatron.rollouts import ROW, Batch, Rollouts, Tokens
from gapo_megatron.run import open_groups
from gapo_megatron.run.attempt import Attempt
from gapo_megatron.run.bridge import Bridge, LostRanksError
from gapo_megatron.run.dealing import rows_by_trainer
from gapo_megatron.run.orders import STOP, Order, pack_probe, unpack
from gapo_megatron.run.together import together
from gapo_megatron.types import Episode, Prompt, Sample, Timeline

logger = logging.getLogger(__name__)

_TAG = 1
"""Tag of messages with the tokens of open groups, between trainers."""

TIMELINES = TypeAdapter(list[Timeline])

T = TypeVar("T")


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
    _tokens: Tokens = field(default_factory=dict)
    """This rank's share of the tokens of the batch that was collected last."""
    _wanted: Sequence[Sequence[int]] = ()
    """Rows of that batch whose tokens each trainer has."""
    _has_sent: bool = False
    """Whether the weights of the next version may have reached some of the engines."""
    _is_behind: bool = False
    """Whether ranks were lost, and batches are not ordered again yet."""
    _open_before: Rollouts | None = None
    """`open_groups` before that batch; None: this attempt has collected none."""
    _posted: exchange.Posted | None = None
    """Pending sends of open groups to the generation side."""

    def __post_init__(self) -> None:
        """Send the generation side its first data position, and open groups. Collective."""
        self.dp_ranks = DataParallelRanks.gather(self.policy.groups, self.gloo_group)
        self._begin()

    @property
    def samples_ahead(self) -> bool:
        """Whether a batch may be sampled by older weights: `Generation.samples_ahead`."""
        return self.config.rollout.max_staleness > 0

    @property
    def num_lost(self) -> int:
        """Generation ranks that have died: `Generation.num_lost`."""
        return self.bridge.num_lost

    def evaluate(self, step: int) -> dict[str, float] | None:
        """Have the held-out problems sampled and judged: `Generation.evaluate`."""
        assert self.version == step, f"weights {self.version} for the evaluation of step {step}"
        with self.stopwatch("evaluate"):
            answer = self._persist(lambda: self._wait(self._order(Order("evaluate", step))))
        metrics: dict[str, float] | None = unpack(answer)
        return metrics

    def collect(self, step: int) -> Rollouts | None:
        """Wait for the batch of a step, and receive its tokens: `Generation.collect`."""
        self.sample_ahead()
        rollouts = self._persist(lambda: self._collect(step))
        del self._samples[step]
        self.stopwatch.notes["generation/lost_ranks"] = float(self.num_lost)
        return rollouts

    def _collect(self, step: int) -> Rollouts | None:
        number = self._samples[step]
        with self.stopwatch("wait"):
            answer = unpack(self._wait(number))
            if self._posted is not None:  # they have arrived: the batch began with them
                self._together(self._posted.wait)
                self._posted = None
            if answer["is_aborted"]:
                self._num_given_back += answer["num_tokens"]
                return None
            kinds = ["batch", "table", *["open"] * self.config.batch.partial_rollouts]
            about, rows, *opened = self._from_first(*(f"{kind}/{number}" for kind in kinds))
        batch = unpack(about)
        metrics: dict[str, float] = batch["metrics"]
        if self.samples_ahead:
            metrics["rollout/version_gap"] = float(step - batch["policy_version"])
        rollouts = Rollouts(
            np.frombuffer(rows, dtype=ROW).copy(),
            metrics=metrics,
            samples=[Sample(**one) for one in batch["samples"]],
            timelines=TIMELINES.validate_python(batch["timelines"]),
        )
        with self.stopwatch("exchange"):
            wanted = rows_by_trainer(rollouts, self.config, self.dp_ranks)
            tokens, still_open = self._together(
                lambda: self._receive(rollouts, wanted, opened[0] if opened else b"", tag=number)
            )
        # Nothing of this batch can be lost any more.
        self._tokens, self._wanted = tokens, wanted
        self._open_before, self.open_groups = self.open_groups, still_open
        self.source_state = batch["source_state"]
        self.stopwatch.notes |= batch["clocks"]
        return rollouts

    def _receive(
        self, rollouts: Rollouts, wanted: Sequence[Sequence[int]], open_table: bytes, *, tag: int
    ) -> tuple[Tokens, Rollouts]:
        """Receive this rank's share of a batch, and its part of the open groups."""
        tokens = exchange.receive(
            exchange.token_columns(rollouts.table),
            rollouts.table["holder"],
            wanted[self.policy.groups.rank],
            channel=self.bridge.messages,
            tag=tag,
        )
        return tokens, open_groups.receive(open_table, self.bridge, tag=tag)

    def carry(self, step: int) -> None:
        """Nothing: open groups keep the engine's log-probs alone (docs/objective.md)."""

    def bring_tokens(self, batch: Batch) -> Batch:
        """The batch with the tokens that `collect` has received: `Generation.bring_tokens`."""
        # A checkpoint gathers a sequence from the lowest rank that receives it.
        holder = batch.table["holder"].copy()
        for rank in reversed(range(len(self._wanted))):
            holder[self._wanted[rank]] = rank
        tokens, self._tokens = self._tokens, {}
        return batch.changed(holder=holder).with_tokens(tokens)

    def sync(self, probe: Rollouts, *, policy_version: int) -> WeightCheck | None:
        """Send the weights once the generation side has reached their order: `Generation.sync`."""
        if not self._is_due(policy_version):
            return None
        with self.stopwatch("sync"):
            check, number = self._persist(lambda: self._sync(probe, policy_version))
        self._erase(before=self._num_synced)
        self.version, self._num_synced, self._has_sent = policy_version, number, False
        self._order_again()
        return check

    def _sync(self, probe: Rollouts, policy_version: int) -> tuple[WeightCheck, int]:
        adapter = low_rank_adapter(self.policy)
        scale = None if adapter is None else adapter.scale
        number = self._order(Order("weights", policy_version, scale=scale))
        log_probs = score_probe(self.policy, probe, self.gloo_group)
        if self.attempt.leads:
            self.bridge.mail.post(f"probe/{number}", pack_probe(probe, log_probs))
        sending = Sending(self.policy, unpack(self._wait(number, "ready")))
        self._has_sent = True
        if sending.brings_weights:
            shard_of = sending.weight_shard
            self._together(lambda: self.bridge.send_shards(self.policy.exported, shard_of))
        if sending.brings_factors:
            factors = sending.factor_shards()
            self._together(lambda: self.bridge.send_shards(*factors))
        check = WeightCheck(**unpack(self._wait(number)))
        return replace(check, merge_rounding=sending.rounding), number

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
        return is_there and not unpack(self._wait(number))["is_aborted"]

    def discard_ahead(self) -> int:
        """Abort what is sampled ahead: `Generation.discard_ahead`."""
        if self._samples and self.attempt.leads:
            self.bridge.mail.post(STOP, b"")
        with contextlib.suppress(LostRanksError):  # and their counts; `close` begins again
            for number in self._samples.values():
                self._num_given_back += unpack(self._wait(number))["num_tokens"]
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
        self._persist(self._end)

    def _end(self) -> None:
        self._together(self.bridge.require_whole)
        self._order(Order("end"))
        self._together(self.bridge.close)

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

    def _begin(self) -> None:
        """Tell the generation side where the next batch begins; all it had before is dropped."""
        begin = Order(
            "begin",
            source_state=self.source_state,
            dp_ranks=self.dp_ranks.dp_ranks,
            scorers=self.dp_ranks.scorers,
            has_open_groups=len(self.open_groups) > 0,
        )
        number, self._posted = self._order(begin), None
        if begin.has_open_groups:
            if self.attempt.leads:
                self.bridge.mail.post(f"open/{number}", self.open_groups.table.tobytes())
            try:
                self._posted = open_groups.post(self.open_groups, self.bridge, tag=number)
            except RuntimeError as error:
                self.bridge.require_lost(error)  # the next word from the other side fails on all

    def _persist(self, work: Callable[[], T]) -> T:
        """The result of work with the generation side, done again when ranks of it are gone.

        Args:
            work: raises LostRanksError on all trainers or on none (`_together`).
        """
        has_lost = False
        while True:
            try:
                if has_lost:
                    self._regroup()
                    has_lost = False
                self._order_again()
                return work()
            except LostRanksError:
                has_lost = True

    def _regroup(self) -> None:
        """Begin again with the generation ranks that are left. Collective over both sides.

        Raises:
            LostRanksError: one more is gone; on all trainers.
        """
        start_s = time.monotonic()
        alive, num_orders = self.attempt.restart_watch, self._num_orders
        self._together(lambda: self.bridge.regroup(alive=alive, num_orders=num_orders))
        if self.attempt.leads:
            for number in self._samples.values():
                for kind in ("batch", "table"):
                    self.bridge.mail.erase(f"{kind}/{number}")
            logger.warning(
                "%s. %d generation rank(s) go on, after %.1f s; batches that are not collected are "
                "sampled again",
                self.bridge.describe_lost(),  # a trainer may only have heard that some are gone
                self.bridge.num_generation,
                time.monotonic() - start_s,
            )
        self._begin()
        self._is_behind = True

    def _order_again(self) -> None:
        """After `_regroup`: order the batches that are not collected yet.

        Weights that were on their way come first: an engine may have a part of them.
        """
        if self._is_behind and not self._has_sent:
            self._is_behind = False
            for step in sorted(self._samples):
                self._samples[step] = self._order(Order("sample", step))

    def _together(self, action: Callable[[], T]) -> T:
        """The result of something with the generation side: `run.together`. Collective."""
        return together(action, self.bridge, self.gloo_group)

    def _wait(self, number: int, kind: str = "answer") -> bytes:
        """Wait for a message about an order while the generation side makes progress."""
        name = f"{kind}/{number}"
        found = self._together(
            lambda: self.bridge.wait(
                lambda: self.bridge.mail.look(name), alive=self.attempt.restart_watch
            )
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
