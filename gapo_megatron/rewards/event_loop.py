"""The event loop of a worker process that has async verifiers.

Calls of async verifiers wait in it together, each with its own limit. A verifier that computes
without awaiting stalls them all: the worker then ends without a verdict on those that have lost
much of their time, and the pool has each judged again, alone. All other verifiers are called while
the loop stands still, so that they may run a loop of their own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from json import loads
from typing import Any, TypeAlias

from gapo_megatron.types import Outcome, Verdict

Call: TypeAlias = Sequence[Any]
"""(index, verifier, response, answer, row, extras, limit in seconds)."""

BEAT_S = 0.1
"""Seconds between two looks at the clock; a look that is later than this shows a stall."""

MOST_STALLED = 0.25
"""Share of its limit for which the loop may stall while a call waits with others; beyond it a
timeout says nothing."""


@dataclass
class _Company:
    """Whether a call has shared the loop with another one."""

    is_shared: bool = False


class EventLoop:
    """Reads calls from the pool, and answers them until the pool closes the channel."""

    def __init__(
        self,
        channel: int,
        *,
        is_async: Callable[[str], bool],
        answer: Callable[[Call], None],
        judge: Callable[[Call], Awaitable[list[Verdict]]],
        reply: Callable[[Call, Sequence[Verdict]], None],
    ) -> None:
        """Make the loop; `serve` starts it.

        Args:
            channel: file descriptor of the socket to the pool.
            is_async: whether the verifier of this name is async.
            answer: judges with one that is not, and replies.
            judge: judges with one that is.
            reply: sends the verdicts on a call.
        """
        self._channel = channel
        self._is_async, self._answer, self._judge, self._reply = is_async, answer, judge, reply
        self._loop = asyncio.new_event_loop()  # never the thread's: other verifiers may set that
        self._reader = asyncio.StreamReader(limit=2**62, loop=self._loop)
        self._open: dict[asyncio.Task[Any], _Company] = {}
        """Judgements that have not ended, those that were given up too."""
        self._stalled_s = 0.0
        self._next_beat = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def serve(self) -> None:
        """Answer calls, then end the process. Never returns."""
        with os.fdopen(os.dup(self._channel), "rb", buffering=0) as file:
            self._loop.run_until_complete(
                self._loop.connect_read_pipe(
                    lambda: asyncio.StreamReaderProtocol(self._reader, loop=self._loop), file
                )
            )
            while call := self._loop.run_until_complete(self._until_other()):
                self._answer(call)
            os._exit(0)  # without waiting for what was given up

    async def _until_other(self) -> Call | None:
        """Begin calls of async verifiers until one of another comes; None at the end.

        The pool sends that one once all before it have been answered.
        """
        self._set_timer()
        running: set[asyncio.Task[None]] = set()  # the loop itself keeps no task alive
        try:
            while line := await self._reader.readline():
                call = loads(line)
                if not self._is_async(call[1]):
                    return call
                task = asyncio.ensure_future(self._answer_later(call))
                running.add(task)
                task.add_done_callback(running.discard)
                task.add_done_callback(_end_if_failed)
            return None
        finally:
            assert self._timer is not None
            self._timer.cancel()

    async def _answer_later(self, call: Call) -> None:
        """Judge for as long as the call's limit."""
        limit_s = call[-1]
        stalled_s, end = self._stalls(), self._loop.time() + limit_s
        task = asyncio.ensure_future(self._timed(call))
        company = self._begun(task)
        # Not `asyncio.timeout`: it waits until the task has ended, which may refuse to.
        await asyncio.wait([task], timeout=limit_s)
        if task.done() and task.cancelled():
            verdicts = [Verdict(Outcome.UNKNOWN, "it has cancelled itself")]
        elif task.done() and task.result()[1] <= end:
            verdicts, _ = task.result()
        else:
            if company.is_shared and self._stalls() - stalled_s > MOST_STALLED * limit_s:
                os._exit(0)  # the pool has each of them judged again, alone
            task.cancel()
            verdicts = [Verdict(Outcome.UNKNOWN, f"timeout: no verdict in {limit_s:g} s")]
        count = len(call[2]) if isinstance(call[2], list) else 1
        self._reply(call, verdicts if len(verdicts) == count else verdicts * count)

    async def _timed(self, call: Call) -> tuple[list[Verdict], float]:
        """The verdicts on a call, and when they were there."""
        return await self._judge(call), self._loop.time()

    def _begun(self, task: asyncio.Task[Any]) -> _Company:
        """Note that a judgement begins, for it and for those that have not ended."""
        company = _Company(is_shared=bool(self._open))
        for other in self._open.values():
            other.is_shared = True
        self._open[task] = company
        task.add_done_callback(self._open.pop)
        return company

    def _set_timer(self) -> None:
        self._next_beat = self._loop.time() + BEAT_S
        self._timer = self._loop.call_at(self._next_beat, self._beat)

    def _beat(self) -> None:
        self._stalled_s = self._stalls()
        self._set_timer()

    def _stalls(self) -> float:
        """Seconds for which the loop has stalled so far."""
        late_s = self._loop.time() - self._next_beat
        return self._stalled_s + (late_s if late_s > BEAT_S else 0.0)


def _end_if_failed(task: asyncio.Task[None]) -> None:
    """A reply that could not be sent ends the process; the pool sees it."""
    if not task.cancelled() and task.exception() is not None:
        os._exit(1)


__all__ = ["EventLoop"]
