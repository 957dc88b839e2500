"""When the model sampled and the environment's calls ran, in each episode of a generation.

Seconds are those of this process: they differ between runs that are otherwise the same, and decide
nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from gapo_megatron.rollout.journal import Reply
from gapo_megatron.types import Span


@dataclass(slots=True)
class CallCounts:
    """What an episode's calls have cost."""

    num_calls: int = 0
    num_errors: int = 0
    num_cut: int = 0
    """Answers that left no room in the response: it ended there, as truncated."""
    num_shortened: int = 0
    """Answers in which an output was cut (`environment.max_call_tokens`)."""
    seconds: float = 0.0


class Timing:
    """Notes the spans of every episode while it is generated.

    Attributes:
        start_s: when the generation began, on the clock of `time.monotonic`.
    """

    def __init__(self) -> None:
        self.start_s = time.monotonic()
        self._turns: dict[str, float] = {}
        """Start of each request that the engine has, by name."""
        self._spans: dict[str, list[Span]] = {}

    def begin_turn(self, name: str) -> None:
        """The engine gets a request. `name`: `Request.name`."""
        self._turns[name] = self._now_s()

    def end_turn(self, name: str, num_tokens: int) -> None:
        """A request has ended; requests without a call between them are a single turn."""
        spans, start_s = self._spans.setdefault(name, []), self._turns.pop(name)
        if spans and not spans[-1].is_call:
            turn = spans.pop()
            start_s, num_tokens = turn.start_s, turn.num_tokens + num_tokens
        spans.append(Span(False, start_s, self._now_s(), num_tokens))

    def add_call(self, reply: Reply) -> None:
        """An environment has answered, or its call has failed."""
        start_s = reply.began_s
        if start_s is None:  # an earlier attempt made it
            start_s = end_s = self._now_s()
        else:
            start_s, end_s = round(start_s, 3), round(start_s + reply.seconds, 3)
        num_tokens, failed = len(reply.tokens or ()), bool(reply.failure)
        self._spans.setdefault(f"{reply.prompt}/{reply.sample}", []).append(
            Span(True, start_s, end_s, num_tokens, failed)
        )

    def spans(self, problem: str, sample: int) -> tuple[Span, ...]:
        """The spans of an episode, in order."""
        return tuple(self._spans.get(f"{problem}/{sample}", ()))

    def _now_s(self) -> float:
        return round(time.monotonic() - self.start_s, 3)
