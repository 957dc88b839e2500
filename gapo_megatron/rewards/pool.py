"""Worker processes that judge responses, so that no verifier can stop the trainer.

Workers are subprocesses (never forks: the trainer holds GPU and engine), each connected by a socket
pair. The parent measures time: CPU time while a worker computes, so that a busy machine changes no
verdict, and wall-clock time while it does not. A worker that hangs, crashes or sends malformed
replies is killed and replaced; the verdict on its item is unknown, with the reason.

An item is a call of a verifier, or several: of each component; and a verifier that compares judges
several items in one call.
"""

from __future__ import annotations

import json
import logging
import math
import os
import selectors
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from gapo_megatron.errors import RewardError, printable
from gapo_megatron.rewards.results import total
from gapo_megatron.rewards.verifiers import Shape
from gapo_megatron.rewards.worker_process import MAX_REPLY_BYTES, Item, Worker
from gapo_megatron.types import Outcome, Verdict

logger = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
"""Failed starts in a row that are tolerated: a starting worker may be killed by chance."""

QUESTION_S = 5.0
"""Seconds between two calls of `may_end` in `collect`."""

MOST_IN_FLIGHT = 32
"""Calls of async verifiers that wait in a worker at the same time."""

ENVIRONMENT = f"{__package__}.environment"
"""The verifier in whose place the environment gives the verdict."""


class Pool:
    """A fixed number of worker processes, kept until `close`. No collectives.

    Create and use it in the main thread: the kernel ends a worker with the thread that started it,
    and so with the trainer, however that ends. Workers ignore signals (Ctrl-C, Slurm's warning).
    """

    def __init__(
        self,
        verifier: str,
        *,
        num_workers: int,
        timeout_s: float,
        options: Mapping[str, Any] = {},
        others: Mapping[str, tuple[str, float, Mapping[str, Any]]] = {},
        correct_above: float = 0.5,
        weights: Mapping[str, float] = {},
        shapes: Mapping[str, Shape] = MappingProxyType({}),
        output: Path | None = None,
    ) -> None:
        """Start the workers without waiting until they have imported the verifiers.

        Args:
            verifier: name as of `verifiers.load`. Only workers import it; it should import neither
                torch nor transformers.
            num_workers: number of processes.
            timeout_s: limit for one call, counted from when a worker has received all of it: in
                seconds of CPU time, and of wall-clock time without CPU time. Of an async verifier:
                in seconds of wall-clock time.
            options: further keyword arguments of `verify`; JSON values.
            others: further verifiers, by the name that items give: (verifier, timeout_s, options).
            correct_above: see `results.to_verdict`.
            weights: weights of the components, by their names in `others`. The main verifier is
                then their total (`results.total`); `verifier` and the next two count for nothing.
            shapes: how verifiers are called, by the name that items give; without the name: with
                the whole row, one item at a time.
            output: file to which is appended what the user's own verifiers print, and the first
                traceback of every place where a verifier raises; None: nowhere.
        """
        assert num_workers > 0, f"num_workers ({num_workers}) must be positive"
        self.verifier, self.correct_above = verifier, correct_above
        self._weights = weights
        main = {} if weights else {"": (verifier, timeout_s, options)}
        self._verifiers = {**main, **others}
        settings = {
            "verifiers": {name: (code, opts) for name, (code, _, opts) in self._verifiers.items()},
            "correct_above": correct_above,
            "output": str(output or os.devnull),
        }
        command = [sys.executable, "-um", "gapo_megatron.rewards.worker", json.dumps(settings)]
        # Later workers start where these do: paths of verifiers are relative to the folder.
        path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
        self._async = frozenset(name for name, one in shapes.items() if one.is_async)
        self._start = partial(
            Worker, command, variables=variables, folder=os.getcwd(), with_grace=self._async
        )
        self._workers = [self._start() for _ in range(num_workers)]
        self._num_failed_starts = 0
        self._shapes = shapes
        self._next_index = 0  # never reused: a late verdict must not count for another item
        self._waiting: deque[tuple[int, Item]] = deque()
        """Calls that no worker has begun, by number."""
        self._places: dict[int, list[int]] = {}
        """Numbers of the items that a call judges, by number of the call."""
        self._parts: dict[int, dict[str, Verdict]] = {}
        """Verdicts so far, by component, on each item that all components judge."""
        self._open: set[int] = set()
        """Items submitted and not judged yet."""
        self._verdicts: dict[int, Verdict] = {}
        self._told: set[str] = set()
        """What the log says of metrics that were left out."""

    def wait_until_ready(self) -> None:
        """Wait for the start of every worker, before expensive work. Raises as `poll`."""
        self._settle()
        while not all(worker.is_ready for worker in self._workers):
            self._wait(math.inf)
            self._settle()

    def judge(
        self, items: Iterable[tuple[Any, ...]], *, may_end: Callable[[bool], bool] = bool
    ) -> list[Verdict]:
        """Submit items and wait for their verdicts: `submit` and `collect` in one call."""
        return self.collect(self.submit(items), may_end=may_end)

    def shape(self, name: str) -> Shape:
        """What the verifiers of this name take, all components together; as of `Item.verifier`."""
        parts = [self._shapes.get(one, Shape()) for one in self._components(name)]
        columns = [one.columns for one in parts]
        return Shape(
            None if None in columns else frozenset().union(*filter(None, columns)),
            frozenset().union(*(one.extras for one in parts)),
            is_group=any(one.is_group for one in parts),
        )

    def takes_verdicts(self, name: str) -> bool:
        """Whether the environment gives the verdict, in place of the verifier of this name."""
        return not name and not self._weights and self.verifier == ENVIRONMENT

    def _components(self, name: str) -> Sequence[str]:
        return [name] if name or not self._weights else [*self._weights]

    def submit(self, items: Iterable[tuple[Any, ...]]) -> list[int]:
        """Queue the items, each the arguments of `Item`; `poll` and `collect` hand them out.

        Returns:
            The numbers of the items, for `collect`.
        """
        queued = [Item(*one) for one in items]
        numbers = list(range(self._next_index, self._next_index + len(queued)))
        self._next_index += len(queued)
        calls: dict[Any, list[tuple[int, Item]]] = {}
        for number, whole in zip(numbers, queued, strict=True):
            if self._weights and not whole.verifier:
                self._parts[number] = {}
            for name in self._components(whole.verifier):
                item = self._narrowed(whole._replace(verifier=name))
                compares = self._shapes.get(name, Shape()).is_group
                group = item.group if compares and item.group is not None else number
                calls.setdefault((group, name), []).append((number, item))
        settled: dict[int, Verdict] = {}
        for members in calls.values():
            call, ones = self._next_index, [item for _, item in members]
            self._next_index += 1
            self._places[call] = [number for number, _ in members]
            if len({one.answer for one in ones}) > 1:
                verdict = Verdict(Outcome.UNKNOWN, "its responses have different answers")
                settled |= self._settled(call, ones[0], [verdict] * len(ones))
                continue
            is_group = self._shapes.get(ones[0].verifier, Shape()).is_group
            self._waiting.append((call, _together(ones) if is_group else ones[0]))
        self._verdicts |= settled
        self._open.update({*numbers} - settled.keys())
        return numbers

    def _narrowed(self, item: Item) -> Item:
        """The item with only what its verifier takes: rows and tokens may be large."""
        shape = self._shapes.get(item.verifier, Shape())
        row, extras = item.row, item.extras
        if shape.columns is not None:
            row = {key: one for key, one in row.items() if key in shape.columns}
        kept = {key: one for key, one in extras.items() if key in shape.extras}
        return item._replace(row=row, extras=kept)

    def poll(self) -> None:
        """Receive finished verdicts and give each free worker a call. Never waits.

        Call it often during other work: workers get calls only here and in `collect`.

        Raises:
            RewardError: workers cannot start; their own error is on stderr.
        """
        # Before items are given out: an idle worker may have been killed.
        settled = self._settle()
        self._verdicts |= settled
        self._open -= settled.keys()
        gives = True
        while gives:  # one call to each worker in turn
            gives = False
            for worker in self._workers:
                if (found := self._next_call(worker)) is not None:
                    number, item = found
                    _, timeout_s, _ = self._verifiers[item.verifier]
                    worker.take(number, item, timeout_s=timeout_s)
                    worker.send()
                    gives = True

    def _next_call(self, worker: Worker) -> tuple[int, Item] | None:
        """The call that a worker should begin now, if any."""
        if not worker.is_ready or worker.failure:
            return None
        if not worker.items and worker.first:
            worker.is_alone = True
            return worker.first.pop(0)
        if not self._waiting:
            return None
        if not worker.items:
            worker.is_alone = False
            return self._waiting.popleft()
        together = [*(item for item in worker.items.values()), self._waiting[0][1]]
        is_full = worker.is_alone or worker.first or len(worker.items) >= MOST_IN_FLIGHT
        if is_full or any(item.verifier not in self._async for item in together):
            return None
        return self._waiting.popleft()

    def collect(
        self, numbers: Sequence[int], *, may_end: Callable[[bool], bool] = bool
    ) -> list[Verdict]:
        """Wait for the verdicts on these items, and drop everything else submitted so far.

        Args:
            numbers: numbers of items submitted since the last `collect`.
            may_end: called every few seconds with whether all items are judged; once they are,
                `collect` returns when it answers True. An exception of it aborts the wait; the pool
                stays usable.

        Returns:
            One verdict per item, in order; unknown, with the reason, where the worker failed.

        Raises:
            RewardError: as `poll`.
        """
        wanted = set(numbers)
        self._open &= wanted
        self._waiting = deque(one for one in self._waiting if wanted & {*self._places[one[0]]})
        next_question = time.monotonic() + QUESTION_S
        try:
            self.poll()
            while self._open:
                self._wait(next_question)
                self.poll()
                if time.monotonic() >= next_question:
                    may_end(False)
                    next_question = time.monotonic() + QUESTION_S
            while not may_end(True):
                pass
            return [self._verdicts[number] for number in numbers]
        finally:
            self._open.clear()
            self._waiting.clear()
            self._verdicts.clear()
            self._places.clear()
            self._parts.clear()

    def close(self) -> None:
        """Kill the workers and wait for their end. May be called twice."""
        while self._workers:
            self._workers.pop().kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, until: float) -> None:
        """Wait until a worker sends, can receive, or is due for a check, or until `until`."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                writes = selectors.EVENT_WRITE if worker.outbox else 0
                selector.register(worker.channel, selectors.EVENT_READ | writes)
            deadline = min(until, *(worker.deadline for worker in self._workers))
            selector.select(max(0.0, deadline - time.monotonic()))

    def _settle(self) -> dict[int, Verdict]:
        """Receive finished verdicts, by number of the item, and replace failed workers."""
        settled: dict[int, Verdict] = {}
        for place, worker in enumerate(self._workers):
            worker.exchange()  # before the check of its time: its reply may have come long ago
            if not worker.failure and not worker.verdicts and time.monotonic() > worker.deadline:
                worker.look()
            if worker.failure and worker.is_fresh and len(worker.items) == 1:
                worker.blame()
            items = dict(worker.items)
            for call, verdicts in worker.hand_over().items():
                settled |= self._settled(call, items[call], verdicts)
            for why in worker.ignored:
                if why not in self._told:
                    self._told.add(why)
                    logger.warning("a metric of a verifier is not logged: %s", printable(why))
            worker.ignored.clear()
            if worker.failure:
                self._replace(place)
        return settled

    def _settled(self, call: int, item: Item, verdicts: Sequence[Verdict]) -> dict[int, Verdict]:
        """The items on which a call's verdicts are the last ones, with their verdicts."""
        settled = {}
        for number, verdict in zip(self._places.pop(call, ()), verdicts, strict=False):
            named = self._named(verdict, item)
            if (parts := self._parts.get(number)) is None:
                settled[number] = named
                continue
            parts[item.verifier] = named
            if len(parts) == len(self._weights):
                ordered = {name: parts[name] for name in self._weights}
                settled[number] = total(ordered, self._weights, correct_above=self.correct_above)
                del self._parts[number]
        return settled

    def _named(self, verdict: Verdict, item: Item) -> Verdict:
        """The verdict with a reason for a message; if unknown, it names the verifier."""
        reason = printable(verdict.reason, most=MAX_REPLY_BYTES)
        if verdict.outcome is Outcome.UNKNOWN:
            name, _, _ = self._verifiers[item.verifier]
            reason = f"{name.removeprefix(f'{__package__}.')}: {reason}"
        return replace(verdict, reason=reason)

    def _replace(self, place: int) -> None:
        worker = self._workers[place]
        worker.kill()
        self._num_failed_starts = 0 if worker.is_ready else self._num_failed_starts + 1
        if self._num_failed_starts > MAX_FAILED_STARTS:
            raise RewardError(f"a worker for {self.verifier} cannot start: {worker.failure}")
        self._workers[place] = self._start()
        # What an earlier item has left behind may have broken the worker, and of several calls
        # nobody knows which one has: judge these again, each alone.
        self._workers[place].first = [*worker.items.items(), *worker.first]


def _together(items: Sequence[Item]) -> Item:
    """The items of a prompt as one, whose response and extras are lists."""
    names = items[0].extras.keys()
    return items[0]._replace(
        response=[one.response for one in items],
        extras={name: [one.extras.get(name) for one in items] for name in names},
    )


__all__ = ["Item", "Pool"]
