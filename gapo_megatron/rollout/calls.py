"""Calls of an environment while the engine decodes: slow, with side effects, and possibly broken.

The first rank of a replica makes them, in threads. The other ranks get the answers by broadcast:
each tensor-parallel rank has a scheduler of its own, and all must add the same requests in the same
order, before the same decoding step.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gapo_megatron.config import EnvironmentConfig
from gapo_megatron.errors import GapoError, said
from gapo_megatron.rewards import MOST_CHARACTERS
from gapo_megatron.rollout.answers import check_answer, split_answer
from gapo_megatron.rollout.environment import Environment
from gapo_megatron.rollout.journal import Journal, Reply
from gapo_megatron.rollout.replicas import Replicas
from gapo_megatron.rollout.timing import CallCounts, Timing
from gapo_megatron.rollout.turns import Turns
from gapo_megatron.types import Episode, Prompt
from gapo_megatron.user_code import contained

logger = logging.getLogger(__name__)

EXCHANGE_EVERY = 8
"""Decoding steps between two broadcasts of answers, in a replica of several ranks."""
_STOP_WAIT_S = 2.0
"""Longest wait of a stop for answers of an environment that may not be asked again."""

_ANSWERS = {
    *("kind", "settings", "code", "structured_outputs", "max_call_tokens"),
    *("call_timeout_s", "episode_timeout_s"),
}
"""Settings that decide what a call answers, given its tokens."""

Run = Callable[[Callable[[], None]], object]
"""Starts a function in a thread."""


def in_thread(function: Callable[[], None]) -> None:
    """Start a thread that does not keep the process alive: a call that hangs is left alone."""
    threading.Thread(target=function, name="environment", daemon=True).start()


@dataclass(frozen=True, slots=True)
class Acting:
    """An environment, and all that calling it needs; made once for a run."""

    environment: Environment
    config: EnvironmentConfig
    turns: Turns
    max_response_tokens: int
    vocab_size: int
    run_dir: Path | None = None
    """Run folder, for the journal; None: calls are not recorded."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """`data.chat_template_kwargs`, with which answers are rendered."""
    run: Run = in_thread
    running: list[_Call] = field(default_factory=list)
    """Calls whose thread may still run, those of earlier steps and those given up included."""
    open: set[tuple[str, int]] = field(default_factory=set)
    """Problem id and sample of the episodes that have been asked about and are not closed."""
    failures: set[str] = field(default_factory=set)
    """How `close` has failed."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a late call closes its episode: none of its name may begin."""

    @property
    def may_repeat(self) -> bool:
        """Whether a call that was interrupted is made again (`Environment.may_repeat`)."""
        return bool(getattr(self.environment, "may_repeat", False))

    def calls(self, name: str, replicas: Replicas) -> Calls:
        """The calls of one step or evaluation. `name`: of its journal. Reads a file, if any."""
        caller, timing = None, Timing()
        if replicas.is_first_of_replica:
            what = f"{self.config.model_dump_json(include=_ANSWERS)} {self.max_response_tokens}"
            if self.template_variables:
                what += f" {json.dumps(self.template_variables, sort_keys=True)}"
            journal = self.run_dir and Journal(
                self.run_dir,
                name,
                replica=replicas.number,
                environment=what,
                may_repeat=self.may_repeat,
            )
            caller = _Caller(self, journal or None, start_s=timing.start_s)
        return Calls(
            self.turns,
            replicas,
            caller,
            timing=timing if self.config.is_called else None,
            moves_first=getattr(self.environment, "moves_first", False),
        )


class Calls:
    """The calls of a generation. All ranks of a replica call its methods at the same steps.

    Attributes:
        turns: decides where a turn of the model ends.
        timing: when turns and calls took place; None: nothing answers the model, and a response
            ends with its first turn.
        moves_first: an episode begins with a call (`Environment.moves_first`).
        num_open: episodes that wait for an answer; equal on the ranks of a replica.
        counts: calls by problem id and sample; equal on the ranks of a replica.
    """

    def __init__(
        self,
        turns: Turns,
        replicas: Replicas,
        caller: _Caller | None,
        *,
        timing: Timing | None,
        moves_first: bool,
    ) -> None:
        self.turns = turns
        self.timing = timing
        self.moves_first = moves_first
        self.num_open = 0
        self.counts: dict[tuple[str, int], CallCounts] = {}
        self._replicas = replicas
        self._caller = caller

    @property
    def is_called(self) -> bool:
        """Whether an environment answers the model."""
        return self.timing is not None

    def agree(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """The prompts as the environment has begun them on the first rank of the replica.

        Collectives: one broadcast within the replica, if an environment is called.
        """
        return self._replicas.agree(prompts) if self.is_called else prompts

    def ask(self, episode: Episode) -> None:
        """Ask for the answer to the model's last turn. Never waits."""
        self.num_open += 1
        if self._caller is not None:
            self._caller.ask(episode)

    def is_next(self, episode: Episode) -> bool:
        """Whether the environment has the next move in an unfinished episode, not the model."""
        if not self.is_called:
            return False
        if not len(episode.token_ids):
            return self.moves_first
        return self.turns.is_over(episode)

    def close(self, episodes: Iterable[Episode]) -> None:
        """Tell the environment that episodes, or the generation with them, have ended."""
        if self._caller is not None:
            for episode in episodes:
                self._caller.close(episode)

    def await_running(self) -> None:
        """Wait a moment for the answers of calls that run, so that a resume finds them recorded.

        Those that may be repeated are not waited for.
        """
        if self._caller is not None:
            self._caller.await_running(_STOP_WAIT_S)

    def is_due(self, num_steps: int) -> bool:
        """Whether the ranks of the replica exchange answers at this decoding step."""
        every = EXCHANGE_EVERY if self._replicas.size > 1 else 1
        return self.num_open > 0 and num_steps % every == 0

    def hold(self) -> None:
        """Begin no further call: those that wait are asked for by the next generation."""
        if self._caller is not None:
            self._caller.is_holding = True

    def any_running(self) -> bool:
        """Whether a call has begun whose answer has not been taken.

        Collectives: one broadcast within the replica, if it has more than one rank.
        """
        return self._replicas.agree(self._caller is not None and self._caller.any_running())

    def replies(self, *, wait_s: float) -> Sequence[Reply]:
        """The answers that have come, in one order on all ranks of the replica.

        Args:
            wait_s: longest wait for an answer, if none has come: the engine has nothing to decode.

        Collectives: one broadcast within the replica, if it has more than one rank.

        Raises:
            MachineError: on the first rank: an answer could not be recorded.
        """
        came: Sequence[Reply] = ()
        if self._caller is not None:
            came = self._caller.take(wait_s=wait_s)
        came = self._replicas.agree(came)
        self.num_open -= len(came)
        for reply in came:
            counts = self.counts.setdefault((reply.prompt, reply.sample), CallCounts())
            counts.num_calls += 1
            counts.num_errors += bool(reply.failure)
            counts.num_shortened += reply.turn.num_cut > 0
            counts.seconds += reply.seconds
            if self.timing is not None:
                self.timing.add_call(reply)
        return came


@dataclass(slots=True, eq=False)
class _Call:
    """A call that has begun."""

    episode: Episode
    limit_s: float
    limit: str
    """The setting that `limit_s` comes from."""
    began_s: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_settled: bool = False
    is_running: bool = True
    """Whether its thread still runs; a call that was given up does not end with that."""


class _Caller:
    """Makes the calls of a replica, in threads; lives on its first rank."""

    def __init__(self, acting: Acting, journal: Journal | None, *, start_s: float) -> None:
        self._acting = acting
        self._start_s = start_s
        self._journal = journal
        self._waiting: deque[Episode] = deque()
        self._begun: list[_Call] = []
        self._stuck_since_s: float | None = None
        """Start of the current stall: every running call has been given up."""
        self._spent_s: defaultdict[tuple[str, int], float] = defaultdict(float)
        self._results: queue.SimpleQueue[Reply | GapoError] = queue.SimpleQueue()
        self._closed: set[tuple[str, int]] = set()
        """Problem id and sample of the episodes that have ended."""
        self.is_holding = False
        """Whether calls that wait stay where they are."""

    def ask(self, episode: Episode) -> None:
        """Begin a call, or queue it; its answer may be in the journal."""
        with self._acting.lock:
            self._acting.open.add(_place(episode))
        found = self._journal and self._journal.find(episode)
        if found:
            self._results.put(found)
        else:
            self._waiting.append(episode)
            self._begin()

    def take(self, *, wait_s: float) -> list[Reply]:
        """Answers and failures since the last call; waits for the first of them, if none."""
        self._end_late()
        self._begin()
        replies = list(self._arrived(wait_s))
        for reply in replies:
            self._spent_s[reply.prompt, reply.sample] += reply.seconds
        self._begin()
        return replies

    def any_running(self) -> bool:
        """Whether a call has begun whose answer has not been taken."""
        return not self._results.empty() or any(not one.is_settled for one in self._begun)

    def close(self, episode: Episode) -> None:
        """Tell the environment that the episode has ended, if it wants to know."""
        self._closed.add(_place(episode))
        self._acting.open.discard(_place(episode))
        close = getattr(self._acting.environment, "close", None)
        if close is not None:
            try:
                with contained():
                    close(episode.for_user())
            except Exception as error:  # whatever a user's environment raises
                failure, known = said(error), self._acting.failures
                if failure not in known:  # it may fail for each episode alike
                    known.add(failure)
                    logger.warning(
                        "environment.kind: close(episode) failed: %s (said once)", failure
                    )

    def await_running(self, limit_s: float) -> None:
        """Wait until the calls that have begun have ended, unless they may be made again."""
        end_s = time.monotonic() + (0.0 if self._acting.may_repeat else limit_s)
        while any(not one.is_settled for one in self._begun) and time.monotonic() < end_s:
            time.sleep(0.001)

    def _arrived(self, wait_s: float) -> Iterator[Reply]:
        while True:
            try:
                result = self._results.get(timeout=wait_s) if wait_s else self._results.get_nowait()
            except queue.Empty:
                return
            if isinstance(result, GapoError):
                raise result
            wait_s = 0.0
            yield result

    def _begin(self) -> None:
        """Begin calls in order, while fewer than `environment.max_concurrent` run."""
        config, running = self._acting.config, self._acting.running
        self._begun = [one for one in self._begun if not one.is_settled]
        running[:] = [one for one in running if one.is_running]
        if self.is_holding:
            return
        while self._waiting and len(running) < config.max_concurrent:
            episode = self._waiting.popleft()
            left_s = config.episode_timeout_s - self._spent_s[_place(episode)]
            call = _Call(
                episode,
                *min(
                    (float(config.call_timeout_s), "call_timeout_s"), (left_s, "episode_timeout_s")
                ),
            )
            self._begun.append(call)
            if call.limit_s <= 0:
                self._end_late()
            else:
                self._start(call)
        if not self._waiting or self._begun:
            self._stuck_since_s = None
        else:
            self._end_stuck()

    def _start(self, call: _Call) -> None:
        self._acting.running.append(call)
        try:
            self._acting.run(lambda: self._make(call))
        except RuntimeError as error:  # the system has no more threads
            call.is_running = False
            self._settle(call, failure=f"the call could not begin: {error}")

    def _end_stuck(self) -> None:
        """Give up calls that wait, if for too long all that run have been ones given up."""
        config, now = self._acting.config, time.monotonic()
        if self._stuck_since_s is None:
            self._stuck_since_s = now
        if now - self._stuck_since_s < config.call_timeout_s:
            return
        while self._waiting:
            call = _Call(self._waiting.popleft(), 0.0, "call_timeout_s", is_running=False)
            failure = (
                f"the call could not begin within environment.call_timeout_s "
                f"({config.call_timeout_s}): environment.max_concurrent ({config.max_concurrent}) "
                "calls that were given up still run"
            )
            self._settle(call, failure=failure)

    def _end_late(self) -> None:
        """Give up calls that exceed a limit. No thread can be ended: nobody waits for theirs."""
        now = time.monotonic()
        for call in self._begun:
            if now - call.began_s >= call.limit_s:
                value = getattr(self._acting.config, call.limit)
                failure = f"no answer within environment.{call.limit} ({value})"
                self._settle(call, failure=failure)

    def _make(self, call: _Call) -> None:
        """Make a call; runs in a thread."""
        if _place(call.episode) in self._closed:  # the generation has ended meanwhile
            call.is_running = False
            return
        try:
            if self._journal is not None:
                self._journal.begin(call.episode)
        except GapoError as error:
            call.is_running = False
            self._results.put(error)
            return
        result: dict[str, Any]
        try:
            given, turn = split_answer(self._acting.environment.respond(call.episode.for_user()))
            if turn.grammar and not self._acting.config.structured_outputs:
                raise ValueError("TurnSettings.grammar needs environment.structured_outputs = true")
            self._acting.turns.check(turn, call.episode)
            answer = check_answer(
                given,
                max_tokens=self._acting.max_response_tokens,
                vocab_size=self._acting.vocab_size,
            )
            result = {"text" if isinstance(answer, str) else "tokens": answer, "turn": turn}
        except BaseException as error:  # a thread: also SystemExit, which would leave no answer
            result = {"failure": said(error)[:MOST_CHARACTERS]}
        is_closed = _place(call.episode) in self._closed
        if is_closed:  # the call was given up, or the generation was, and it ran on
            with self._acting.lock:  # a later generation may have an episode of the same name
                if _place(call.episode) not in self._acting.open:
                    self.close(call.episode)
        call.is_running = False
        if not (is_closed and self._acting.may_repeat):  # its end may come of the closing
            self._settle(call, **result)

    def _settle(self, call: _Call, **result: Any) -> None:
        """Record and hand over a call's result, fields of its reply; the first result counts."""
        with call.lock:
            if call.is_settled:
                return
            seconds = time.monotonic() - call.began_s
            began_s = call.began_s - self._start_s
            reply = Reply(
                *_place(call.episode), seconds=round(seconds, 6), began_s=began_s, **result
            )
            try:
                if self._journal is not None:
                    self._journal.end(call.episode, reply)
                self._results.put(reply)
            except GapoError as error:
                self._results.put(error)
            call.is_settled = True


def _place(episode: Episode) -> tuple[str, int]:
    return episode.prompt.id, episode.sample


__all__ = ["EXCHANGE_EVERY", "Acting", "CallCounts", "Calls", "Reply"]
