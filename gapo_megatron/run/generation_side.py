"""Ranks that only generate: they execute the trainer's orders with the code that runs colocated.

`run/generation_ranks.py` is the trainer's end. Nothing here decides anything: it draws the problems
that a colocated run would draw, samples, judges, sends the tokens to the trainers that compute
them, and says so.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gapo_megatron import exchange, rewards
from gapo_megatron.clock import Expectation, Stopwatch
from gapo_megatron.config import Config
from gapo_megatron.data.source import PromptSource
from gapo_megatron.evaluate.evaluate import evaluate
from gapo_megatron.learn.share import Places
from gapo_megatron.objective import make_batch
from gapo_megatron.rollout.engine import Engine
from gapo_megatron.rollout.rollouter import Rollouter, Sampled
from gapo_megatron.rollout.verify import verify_weights
from gapo_megatron.run.attempt import Attempt
from gapo_megatron.run.bridge import Bridge
from gapo_megatron.run.generation import evaluation_path
from gapo_megatron.run.orders import STOP, Order, pack, unpack_probe
from gapo_megatron.types import Prompt

logger = logging.getLogger(__name__)

_IDLE = "perf/rollout_idle_share"
_LOOK_EVERY_S = 1.0
_FIRST_WEIGHTS = 1
"""Number of the first order of weights, after `begin`."""


@dataclass
class Patience:
    """As `Attempt.patience`; also gives up what the trainer says that it no longer wants."""

    attempt: Attempt
    bridge: Bridge
    _next_look_s: float = 0.0
    _is_unwanted: bool = False

    def patience(self, expected: Expectation) -> Callable[[float], bool]:
        """When to break off: a function of the elapsed seconds."""
        should_abandon = self.attempt.patience(expected)

        def answer(elapsed_s: float) -> bool:
            now = time.monotonic()
            if now >= self._next_look_s:
                self._next_look_s = now + _LOOK_EVERY_S
                self._is_unwanted = self._is_unwanted or self.bridge.mail.look(STOP) is not None
            # Asked first: it says that this rank is alive.
            return should_abandon(elapsed_s) or self._is_unwanted

        return answer


@dataclass
class GenerationSide:
    """One rank that only generates: engine, rollouter and verifiers, and the orders they obey."""

    config: Config
    bridge: Bridge
    source: PromptSource
    held_out: Sequence[Prompt]
    attempt: Attempt
    engine: Engine
    rollouter: Rollouter
    pool: rewards.Pool
    is_first: bool
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    _places: Places | None = None
    """Which trainer computes what."""
    _posted: list[exchange.Posted] = field(default_factory=list)
    """Tokens on their way to the trainers."""

    def __post_init__(self) -> None:
        self._patient = Patience(self.attempt, self.bridge)

    def serve(self) -> None:
        """Execute orders until the trainer ends the run.

        Collectives: over this side those of what is ordered; with the trainers the broadcast of the
        weights.

        Raises:
            WeightSyncError: the engine does not compute what the policy computes.
        """
        tasks: dict[str, Callable[[int, Order], None]] = {
            "begin": self._begin,
            "weights": self._receive_weights,
            "evaluate": self._evaluate,
            "sample": self._sample,
        }
        for number in itertools.count():
            with self.stopwatch("wait"):
                order = Order.from_bytes(self._wait(f"order/{number}"))
            self.attempt.enter(f"{order.task} {order.step}")
            if order.task == "end":
                break
            tasks[order.task](number, order)
        self.pool.close()

    def _begin(self, number: int, order: Order) -> None:
        assert order.source_state is not None
        self.source.load_state_dict(dict(order.source_state))
        self._places = Places(tuple(order.dp_ranks), tuple(order.scorers))

    def _receive_weights(self, number: int, order: Order) -> None:
        with self.stopwatch("sync"):
            self._post(f"ready/{number}", b"")
            self.engine.wake()
            self.engine.update_weights(self.bridge.receive_weights(), policy_version=order.step)
            probe, log_probs = unpack_probe(self._wait(f"probe/{number}"))
            check = verify_weights(self.engine, probe, log_probs)
        if number == _FIRST_WEIGHTS:
            self.stopwatch.lap(num_tokens=0)  # the start is over
        self._post(
            f"answer/{number}",
            pack({"mean_abs_diff": check.mean_abs_diff, "max_abs_diff": check.max_abs_diff}),
        )

    def _evaluate(self, number: int, order: Order) -> None:
        with self.stopwatch("evaluate"):
            metrics = evaluate(
                self.engine,
                self.held_out,
                pool=self.pool,
                environment=self.rollouter.environment,
                config=self.config,
                output=evaluation_path(self.config, order.step) if self.is_first else None,
                should_abandon=self._patient.patience(self.stopwatch.expect("evaluate")),
            )
        self._post(f"answer/{number}", pack(metrics))

    def _sample(self, number: int, order: Order) -> None:
        """Sample and judge a batch; facts go to all trainers, tokens to those that compute them."""
        sampled = self.rollouter.collect(
            order.step, attempt=self._patient, stopwatch=self.stopwatch
        )
        if sampled is None:
            given_up = self.engine.replicas.gather([self.rollouter.num_tokens_in_vain])
            answer = {"is_broken_off": True, "num_tokens": sum(given_up)}
        else:
            num_tokens = int(sampled.facts.num_sampled_tokens.sum())
            answer = {"is_broken_off": False, "num_tokens": num_tokens}
            self._post(f"facts/{number}", self._send(sampled, tag=number))
            about = {
                "policy_version": self.engine.policy_version,
                "metrics": sampled.metrics,
                "source_state": sampled.source_state,
                "clocks": self._lap(),
            }
            self._post(f"batch/{number}", pack(about))
        self._post(f"answer/{number}", pack(answer))

    def _send(self, sampled: Sampled, *, tag: int) -> bytes:
        """Begin to send the tokens, as the trainers' own plan deals them; the facts they need."""
        assert self._places is not None
        # In the channel this side's ranks follow the trainers.
        facts = sampled.facts
        facts = facts.changed(holder=facts.holder + self.bridge.num_training)
        batch = make_batch(facts, self.config.objective.resolve())
        wanted = self._places.wanted(batch, self.config)
        posted = exchange.post(sampled.held, facts, wanted, channel=self.bridge.messages, tag=tag)
        self._posted = [one for one in self._posted if not one.is_done()] + [posted]
        return facts.to_bytes()

    def _lap(self) -> dict[str, float]:
        """Seconds of this side since the last batch, and how full its engines were."""
        seconds = self.stopwatch.lap(num_tokens=0)
        clocks = {
            f"generation/{name.removeprefix('time/')}": value
            for name, value in seconds.items()
            if name.startswith("time/")
        }
        return clocks | {name: value for name, value in seconds.items() if name == _IDLE}

    def _wait(self, name: str) -> bytes:
        """Wait for a message, for as long as the trainer makes progress."""
        wait, attempt = self.bridge.wait, self.attempt
        return wait(lambda: self.bridge.mail.look(name), alive=attempt.restart_watch)

    def _post(self, name: str, value: bytes) -> None:
        if self.is_first:
            self.bridge.mail.post(name, value)

    def end(self) -> None:
        """End this side together with the trainer. Collective over both sides."""
        self.attempt.end("finished")
        self.bridge.close()
