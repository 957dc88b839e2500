"""Ranks that only generate: they execute the trainer's orders with the code that runs colocated.

`run/generation_ranks.py` is the trainer's end, which decides. These ranks draw the problems that a
colocated run would draw, sample, judge, send the tokens to the trainers that need them, and post an
answer.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

from gapo_megatron import exchange, rewards
from gapo_megatron.clock import Expectation, Stopwatch
from gapo_megatron.config import Config
from gapo_megatron.data.source import PromptSource
from gapo_megatron.evaluate.evaluate import evaluate
from gapo_megatron.learn.plan import DataParallelRanks
from gapo_megatron.models.lora import FactorRules, in_pairs, rules_of
from gapo_megatron.models.rules import split_all
from gapo_megatron.policy.export import Exported
from gapo_megatron.rollout.adapter_sync import needs_of, update_adapter
from gapo_megatron.rollout.engine import Engine
from gapo_megatron.rollout.rollouter import Rollouter
from gapo_megatron.rollout.verify import verify_weights
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.run import open_groups
from gapo_megatron.run.attempt import Attempt
from gapo_megatron.run.bridge import Bridge
from gapo_megatron.run.dealing import rows_by_trainer
from gapo_megatron.run.generation import evaluation_path
from gapo_megatron.run.orders import STOP, Order, pack, unpack_probe
from gapo_megatron.types import Prompt

logger = logging.getLogger(__name__)

_IDLE = "perf/rollout_idle_share"
_LOOK_EVERY_S = 1.0
_FIRST_WEIGHTS = 1
"""Number of the first order of weights, after `begin`."""


@dataclass
class StopSignal:
    """Like `Attempt.patience`; also aborts batches that the trainer has cancelled.

    Raises LostRanksError within a batch whose other ranks are gone.
    """

    attempt: Attempt
    bridge: Bridge
    _next_look_s: float = 0.0
    _is_unwanted: bool = False

    def patience(self, expected: Expectation) -> Callable[[float], bool]:
        """Return whether to abort, as a function of the elapsed seconds."""
        should_abort = self.attempt.patience(expected)

        def answer(elapsed_s: float) -> bool:
            now = time.monotonic()
            if now >= self._next_look_s:
                self._next_look_s = now + _LOOK_EVERY_S
                self._is_unwanted = self._is_unwanted or self.bridge.mail.look(STOP) is not None
            self.bridge.require_whole()
            # In this order: `should_abort` also reports that this rank is alive.
            return should_abort(elapsed_s) or self._is_unwanted

        return answer


@dataclass
class GenerationSide:
    """A rank that only generates: executes the trainer's orders with its engine and verifiers."""

    config: Config
    bridge: Bridge
    source: PromptSource
    held_out: Sequence[Prompt]
    attempt: Attempt
    engine: Engine
    rollouter: Rollouter
    pool: rewards.Pool
    is_first: bool
    exported: Exported
    """The weights that the trainers send."""
    factors: Sequence[FactorRules] = ()
    """The factors of section `adapter`."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    _ranks: DataParallelRanks | None = None
    """Data-parallel ranks of the trainers, by which sequences are dealt."""
    _posted: deque[tuple[int, exchange.Posted]] = field(default_factory=deque)
    """Tokens sent to the trainers, by step; until it is certain that all have them."""

    def __post_init__(self) -> None:
        self._patient = StopSignal(self.attempt, self.bridge)

    def serve(self) -> None:
        """Execute orders until the trainer ends the run, then return.

        When other ranks of this side are gone, the order is dropped, and the rest go on together:
        the trainer gives its orders again, beginning with `begin`.

        Collectives: over this side those of each order, and `_rejoin`; with the trainers the
        transfer of weights, `Bridge.regroup` and `Bridge.close`.

        Raises:
            WeightSyncError: the engine does not compute what the policy computes.
        """
        if self.engine.replicas.size == 1:  # ranks of an engine may wait for each other within vLLM
            self.bridge.may_go_on()
        number, is_apart, is_over = 0, False, False
        while not is_over:
            try:
                if is_apart:
                    number, is_apart = self._rejoin(), False
                is_over = self._execute(number)
                number += 1
            except Exception as error:
                lost = self.bridge.require_lost(error)
                logger.warning("%s. This rank drops what it was doing", lost)
                is_apart = True

    def _execute(self, number: int) -> bool:
        """Execute an order; returns whether it was the last one."""
        tasks: dict[str, Callable[[int, Order], None]] = {
            "begin": self._begin,
            "weights": self._receive_weights,
            "evaluate": self._evaluate,
            "sample": self._sample,
        }
        with self.stopwatch("wait"):
            order = Order.from_bytes(self._wait(f"order/{number}"))
        self.attempt.enter(f"{order.task} {order.step}")
        if order.task != "end":
            tasks[order.task](number, order)
            return False
        self.pool.close()
        self.attempt.end("finished")
        self.bridge.close()
        return True

    def _rejoin(self) -> int:
        """Go on with the ranks that are left; returns the number of the next order. Collective."""
        bridge = self.bridge
        number = bridge.regroup(alive=self.attempt.restart_watch)
        group = bridge.side_group()
        replicas = self.engine.replicas
        replicas.go_on(rank=bridge.place, world_size=bridge.num_generation, gloo_group=group)
        self.attempt.go_on(group)
        self.is_first = bridge.place == 0
        self._posted.clear()  # these messages were to the former groups
        return number

    def _begin(self, number: int, order: Order) -> None:
        assert order.source_state is not None
        self.source.load_state_dict(dict(order.source_state))
        self._ranks = DataParallelRanks(tuple(order.dp_ranks), tuple(order.scorers))
        self.rollouter.open_groups = Rollouts.join([])
        if order.has_open_groups:
            table = self._wait(f"open/{number}")
            self.rollouter.open_groups = open_groups.receive(table, self.bridge, tag=number)

    def _receive_weights(self, number: int, order: Order) -> None:
        with self.stopwatch("sync"):
            engine, version = self.engine, order.step
            # These weights have learned from all steps before: their tokens have arrived.
            while self._posted and self._posted[0][0] < version:
                self._posted.popleft()[1].wait()
            needs = "merged" if order.scale is None else needs_of(engine)
            self._post(f"ready/{number}", pack(needs))
            engine.wake()
            if needs != "factors":
                whole = self.bridge.receive_whole(self.exported)
                weights = split_all(self.exported.rules, whole)
                engine.update_weights(weights, policy_version=version)
            if needs != "merged":
                exported = replace(self.exported, rules=rules_of(self.factors))
                factors = in_pairs(self.factors, self.bridge.receive_whole(exported))
                update_adapter(engine, factors, scale=order.scale, policy_version=version)
            probe, log_probs = unpack_probe(self._wait(f"probe/{number}"))
            check = verify_weights(self.engine, probe, log_probs)
        if number == _FIRST_WEIGHTS:
            self.stopwatch.lap(num_tokens=0)  # discard the time of the start
        self._post(f"answer/{number}", pack(asdict(check)))

    def _evaluate(self, number: int, order: Order) -> None:
        with self.stopwatch("evaluate"):
            metrics = evaluate(
                self.engine,
                self.held_out,
                pool=self.pool,
                environment=self.rollouter.environment,
                config=self.config,
                calls=self.rollouter.evaluation_calls(order.step),
                output=evaluation_path(self.config.run.output_dir, order.step)
                if self.is_first
                else None,
                should_abort=self._patient.patience(self.stopwatch.expect("evaluate")),
            )
        self._post(f"answer/{number}", pack(metrics))

    def _sample(self, number: int, order: Order) -> None:
        """Sample and judge a batch; every trainer gets the table, and the tokens it computes."""
        rollouts = self.rollouter.collect(
            order.step, attempt=self._patient, stopwatch=self.stopwatch
        )
        if rollouts is None:
            given_up = self.engine.replicas.gather([self.rollouter.num_discarded_tokens])
            answer = {"is_aborted": True, "num_tokens": sum(given_up)}
        else:
            answer = {"is_aborted": False, "num_tokens": rollouts.num_sampled}
            self._post(f"table/{number}", self._send(rollouts, order.step, tag=number))
            if self.config.batch.partial_rollouts:
                self._post(f"open/{number}", self._send_open_groups(order.step, tag=number))
            about = {
                "policy_version": self.engine.policy_version,
                "metrics": rollouts.metrics,
                "samples": [asdict(one) for one in rollouts.samples],
                "timelines": [asdict(one) for one in rollouts.timelines],
                "source_state": self.source.state_dict(),
                "clocks": self._lap(),
            }
            self._post(f"batch/{number}", pack(about))
        self._post(f"answer/{number}", pack(answer))

    def _send(self, rollouts: Rollouts, step: int, *, tag: int) -> bytes:
        """Start sending tokens by the trainers' own plan; returns the table, encoded."""
        assert self._ranks is not None
        # In this group the ranks of this side come after the trainers.
        holder = rollouts.table["holder"] + self.bridge.num_training
        rollouts = rollouts.changed(holder=holder)
        posted = exchange.post(
            rollouts.tokens,
            exchange.token_columns(rollouts.table),
            holder,
            rows_by_trainer(rollouts, self.config, self._ranks),
            channel=self.bridge.messages,
            tag=tag,
        )
        self._posted.append((step, posted))
        return rollouts.table.tobytes()

    def _send_open_groups(self, step: int, *, tag: int) -> bytes:
        """Start sending the groups that stay open, for checkpoints; returns their table, encoded.

        Their tokens keep the engine's log-probs, and the versions that sampled them.
        """
        opened = self.rollouter.open_groups = self.rollouter.open_groups.carried()
        self._posted.append((step, open_groups.post(opened, self.bridge, tag=tag)))
        return opened.table.tobytes()

    def _lap(self) -> dict[str, float]:
        """Stage times of this side since the last batch, and the occupancy of its engines."""
        seconds = self.stopwatch.lap(num_tokens=0)
        clocks = {
            f"generation/{name.removeprefix('time/')}": value
            for name, value in seconds.items()
            if name.startswith("time/")
        }
        kept = (_IDLE, "perf/environment_s")
        return clocks | {name: value for name, value in seconds.items() if name.startswith(kept)}

    def _wait(self, name: str) -> bytes:
        """Wait for a message while the trainer makes progress."""
        wait, attempt = self.bridge.wait, self.attempt
        return wait(lambda: self.bridge.mail.look(name), alive=attempt.restart_watch)

    def _post(self, name: str, value: bytes) -> None:
        if self.is_first:
            self.bridge.mail.post(name, value)
