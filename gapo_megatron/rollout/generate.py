"""Generation with any engine: sends requests, decides when to stop, collects episodes.

All ranks generate at the same time, each replica for its own prompts (`Replicas.share`).
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from gapo_megatron.errors import DataError, RolloutError, said
from gapo_megatron.rewards import MOST_CHARACTERS
from gapo_megatron.rollout.calls import Calls
from gapo_megatron.rollout.engine import Completion, Engine, Request
from gapo_megatron.rollout.environment import Environment
from gapo_megatron.rollout.process_state import generators_restored
from gapo_megatron.rollout.progress import Ending, Occupancy, Tally, progress_bar
from gapo_megatron.rollout.requests import Responses, SamplingSettings
from gapo_megatron.types import Episode, Prompt
from gapo_megatron.user_code import contained

# Decoding steps between two checks for an abort, each a broadcast within the replica.
_STEPS_PER_QUESTION = 8
_WAIT_S, _SHORT_WAIT_S = 0.1, 0.002
"""Longest waits for an environment's answer: meanwhile the verifier workers get no new work."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """Callbacks of a generation."""

    on_ended: Callable[[Sequence[Episode]], object] = lambda episodes: None
    """Receives the episodes that have ended since its last call, often none, each once: first those
    finished before this generation, then those of every decoding step. With `should_abort` it is
    also called while other replicas still generate. An exception in it ends the generation."""
    should_abort: Callable[[float], bool] | None = None
    """Whether to abort the generation, given the seconds since its start. Every rank calls it
    repeatedly; the first rank of each replica decides for the replica. It is also called while
    only other replicas generate; its answer then has no effect."""
    occupancy: Occupancy | None = None
    """Accumulates the occupancy of the replicas; needs `should_abort`."""
    on_aborted: Callable[[int], object] = lambda num_tokens: None
    """Receives the number of tokens that this replica has sampled if the generation is aborted."""
    shows_progress: bool = False
    """Whether rank 0 shows a progress bar with tokens/s."""
    keeps_unfinished: bool = False
    """Whether a later generation continues the unfinished episodes: calls of an environment that
    run at the end are then waited for, so that none is made twice."""


def begin(environment: Environment, prompt: Prompt) -> Prompt:
    """The prompt with its initial tokens for the model: `Environment.begin`.

    If that fails the prompt keeps its tokens, with the reason (`Prompt.failure`).
    """
    try:
        with contained():
            tokens = tuple(operator.index(token) for token in environment.begin(prompt.for_user()))
    except Exception as error:  # whatever a user's environment raises
        return replace(prompt, failure=f"begin: {said(error)}"[:MOST_CHARACTERS])
    return replace(prompt, token_ids=tokens)


def begin_all(
    environment: Environment, prompts: Iterable[Prompt], calls: Calls | None
) -> Sequence[Prompt]:
    """The prompts as `begin` makes them on the first rank of the replica.

    If an environment is called, the random generators of the process are then restored.

    Collectives: `Calls.agree`.
    """
    if calls is None or not calls.is_called:
        return [begin(environment, one) for one in prompts]
    with generators_restored():
        begun = [begin(environment, one) for one in prompts]
    return calls.agree(begun)


def generate(
    engine: Engine,
    prompts: Sequence[Prompt],
    settings: SamplingSettings,
    *,
    calls: Calls | None = None,
    begun: Mapping[str, tuple[Episode, ...]] | None = None,
    num_groups: int | Tally | None = None,
    hooks: Hooks | None = None,
) -> list[tuple[Episode, ...]] | None:
    """Sample responses for this replica's prompts.

    Every request has its own seed (`request_seed`), so a response depends neither on other requests
    nor on the number of replicas, up to the rounding of a batched forward pass. Random
    generators that an environment may use are restored at the end (`generators_restored`).

    Args:
        engine: awake; holds no request, before and after.
        prompts: this replica's share, with unique ids; the same on all of its ranks.
        settings: sampling settings, and the number of responses per prompt.
        calls: the environment's answers to the model's turns; None: a response ends at EOS.
        begun: by prompt id, the episodes of prompts that earlier calls have begun. Unfinished
            episodes continue from prompt + tokens so far, with a new seed.
        num_groups: stop once this many prompts of this replica are complete; by default all. Which
            prompts these are depends on response lengths and batching: on the number of replicas
            and the size of their KV caches. With a `Tally` all replicas stop at the same decoding
            step, soon after as many prompts as it wants are complete on all of them together.
        hooks: callbacks; one of them may abort the generation.

    Returns:
        `num_samples` episodes per prompt, in order. With `num_groups` the episodes of incomplete
        prompts may be unfinished. None on every rank if any replica aborted.

    Collectives: the engine's own; with `should_abort` also periodic broadcasts within the replica,
    a sum of one integer each second over all ranks (`Heartbeat`; with a `Tally` its own, and this
    one at the end alone), and one gather over all ranks; with `calls` those of `Calls.replies`.

    Raises:
        DataError: a prompt is empty, too long or has unknown tokens; names it. Raised before
            anything is generated. If an environment made these tokens, the verdicts on its
            responses are unknown instead.
        RolloutError: the engine is asleep, or has lost requests.
    """
    is_called = calls is not None and calls.is_called
    prompts = [
        _checked(engine, one, settings.max_response_tokens, is_called=is_called) for one in prompts
    ]
    hooks = hooks or Hooks()
    responses = Responses(prompts, begun or {}, settings, calls=calls)
    wanted = len(prompts) if num_groups is None else num_groups
    with generators_restored() if is_called else nullcontext():
        hooks.on_ended([one for group in responses.groups for one in group if one.finished])
        run = _Run(engine, responses, wanted, hooks, calls)
        run.decode()
        is_aborted = hooks.should_abort is not None and run.any_aborted()
    if is_aborted:
        hooks.on_aborted(run.num_tokens)
        return None
    return [tuple(group) for group in responses.groups]


def _checked(
    engine: Engine, prompt: Prompt, max_response_tokens: int, *, is_called: bool
) -> Prompt:
    """The prompt, if the engine can continue it; else with the reason, if an environment made it.

    Raises:
        DataError: the engine cannot continue a prompt of the data.
    """
    limit = engine.max_sequence_tokens - max_response_tokens
    tokens, failure = prompt.token_ids, ""
    if not 0 < len(tokens) <= limit:
        failure = (
            f"prompt {prompt.id!r} has {len(tokens)} tokens; it must have 1 to {limit} to leave "
            f"room for {max_response_tokens} response tokens"
        )
    elif wrong := [one for one in (min(tokens), max(tokens)) if not 0 <= one < engine.vocab_size]:
        failure = (
            f"prompt {prompt.id!r} has a token ({wrong[0]}) outside the model's vocabulary (0 to "
            f"{engine.vocab_size - 1})"
        )
    if failure and not is_called:
        raise DataError(failure)
    return replace(prompt, token_ids=(0,), failure=f"begin: {failure}") if failure else prompt


class _Run:
    """A generation of one replica, until enough prompts are complete.

    Attributes:
        num_tokens: number of tokens sampled so far.
    """

    def __init__(
        self,
        engine: Engine,
        responses: Responses,
        wanted: int | Tally,
        hooks: Hooks,
        calls: Calls | None,
    ) -> None:
        self._engine = engine
        self._calls = calls
        self._timing = calls.timing if calls else None
        self._responses = responses
        self.num_tokens = 0
        self._tally = wanted if isinstance(wanted, Tally) else None
        self._wanted = wanted if isinstance(wanted, int) else math.inf
        self._hooks = hooks
        self._occupancy = hooks.occupancy or Occupancy()
        self._heart = engine.replicas.heartbeat()
        self._start = time.monotonic()
        self._end = Ending(aborted=False, taken_s=0.0, seconds=0.0)
        self._is_aborted = False

    def decode(self) -> None:
        """Take decoding steps until enough groups are complete or the generation is aborted.

        Leaves no request in the engine.
        """
        begun = [*self._responses.begin()]
        shown = self._hooks.shows_progress and self._engine.replicas.is_first_rank
        left: Sequence[Completion] = ()
        has_ended = False
        try:
            self._advance(begun)
            with progress_bar(len(begun), shown=shown) as advance_bar:
                self._end = self._take_steps(len(begun), advance_bar)
            if self._calls and self._hooks.keeps_unfinished and not self._end.aborted:
                is_aborted = self._await_calls(self._calls)
                self._end = replace(self._end, aborted=is_aborted)
            has_ended = True
        finally:
            left = self._engine.abort()
            if self._calls and (self._end.aborted or not has_ended):
                self._calls.await_running()
            if self._calls:
                self._calls.close(self._responses.unfinished())
        self.num_tokens += sum(len(one.token_ids) for one in left)
        if not self._end.aborted:
            for completion in left:
                self._responses.take(completion)

    def any_aborted(self) -> bool:
        """Wait for the other replicas; return whether any replica, this one included, aborted."""
        ask, hand_over = self._hooks.should_abort, self._hooks.on_ended
        assert ask is not None
        self._heart.wait_for_all(
            on_beat=lambda: ask(time.monotonic() - self._start),
            # The verifier workers get new work only through this call.
            meanwhile=lambda: hand_over(()),
        )
        ends = self._engine.replicas.gather([self._end])
        self._occupancy.taken_s += sum(one.taken_s for one in ends)
        self._occupancy.capacity_s += len(ends) * max(one.seconds for one in ends)
        return any(one.aborted for one in ends)

    def _take_steps(self, num_open: int, advance_bar: Callable[[int, int], None]) -> Ending:
        engine, responses = self._engine, self._responses
        last, taken_s, num_steps = self._start, 0.0, 0
        while self._tally or (num_open and responses.num_whole < self._wanted):
            num_in_engine = num_open - (self._calls.num_open if self._calls else 0)
            if self._stops(num_steps, num_in_engine):
                return Ending(self._is_aborted, taken_s, last - self._start)
            num_steps += 1
            # Without requests: every open episode waits for its environment, or there is none, and
            # the other engines go on.
            completions = engine.poll() if num_in_engine else ()
            if self._timing is not None:
                for one in completions:
                    self._timing.end_turn(one.name, len(one.token_ids))
            # Occupancy of this step: requests that have just ended still count.
            num_running, num_waiting = engine.num_requests()
            if num_in_engine and not completions and num_running + num_waiting == 0:
                raise RolloutError(f"the engine has lost {num_in_engine} of its requests")
            share = self._occupancy.share_taken(num_running + len(completions), num_waiting)
            ended = self._advance(map(responses.take, completions))
            if self._calls and num_open and (not num_in_engine or self._calls.is_due(num_steps)):
                # The other engines may wait for this one's next report to the tally.
                longest_s = _SHORT_WAIT_S if self._tally else _WAIT_S
                replies = self._calls.replies(wait_s=0.0 if num_in_engine else longest_s)
                ended += self._advance(map(responses.answer, replies))
            num_open -= len(ended)
            self._hooks.on_ended(ended)
            now = time.monotonic()
            taken_s, last = taken_s + share * (now - last), now
            if completions:
                num_tokens = sum(len(one.token_ids) for one in completions)
                self.num_tokens += num_tokens
                advance_bar(len(ended), num_tokens)
        return Ending(False, taken_s, last - self._start)

    def _await_calls(self, calls: Calls) -> bool:
        """Wait for the answers of calls that run; returns whether to abort. Begins nothing more."""
        self._tally = None  # its group is now the heartbeat's
        calls.hold()
        while calls.any_running():
            for reply in calls.replies(wait_s=_WAIT_S):
                episode = self._responses.answer(reply)
                if isinstance(episode, Episode):  # otherwise its next turn is sampled later
                    calls.close([episode])
                    self._hooks.on_ended([episode])
            self._hooks.on_ended(())
            if self._must_abort():
                return True
        return False

    def _advance(self, items: Iterable[Episode | Request]) -> list[Episode]:
        """Send requests to the engine, ask the environment; returns the episodes that ended."""
        ended = []
        for one in items:
            if isinstance(one, Request):
                self._engine.add(one)
                if self._timing is not None:
                    self._timing.begin_turn(one.name)
            elif one.finished:
                ended.append(one)
                if self._calls:
                    self._calls.close([one])
            elif self._calls:
                self._calls.ask(one)
        return ended

    def _stops(self, num_steps: int, num_in_engine: int) -> bool:
        """Whether to stop before the next decoding step: aborted, or together with all engines."""
        is_question = num_steps % _STEPS_PER_QUESTION == 0
        if self._tally is None:
            self._is_aborted = (is_question or not num_in_engine) and self._must_abort()
            return self._is_aborted
        if not is_question:
            return False
        counts_here = self._engine.replicas.is_first_of_replica
        is_over = self._tally.is_over(
            self._responses.num_whole if counts_here else 0,
            must_abort=self._must_abort(),
            meanwhile=lambda: self._hooks.on_ended(()),
        )
        self._is_aborted = self._tally.is_aborted
        return is_over

    def _must_abort(self) -> bool:
        ask = self._hooks.should_abort
        if ask is None:
            return False
        if self._tally is None:  # otherwise its sums are the beats: one kind at a time in a group
            self._heart.beat(ended=False)
        return self._engine.replicas.agree(ask(time.monotonic() - self._start))
