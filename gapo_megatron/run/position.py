"""Position of a run: together with weights, optimizer and open groups, all that it resumes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gapo_megatron.checkpoint import OpenStep
from gapo_megatron.objective.diagnostics import CorrelationWindow
from gapo_megatron.types import Batch


@dataclass
class Position:
    """Position of a run between two steps, or within one.

    A step is open from the moment its batch is made until it is logged. Until then a stop gives its
    rollouts up; from then on it keeps them, and the updates that are done.
    """

    step: int = 0
    """Steps finished: the index of the one under way, or of the next."""
    open_step: OpenStep | None = None
    """Results so far of the step under way; None between steps and while it samples."""
    evaluated: dict[str, float] = field(default_factory=dict)
    """Metrics of the evaluation before the step under way; empty without one."""
    source_state: Mapping[str, Any] = field(default_factory=dict)
    """Place in the data to resume from: after the prompts of an open step, else before them."""
    source_before: Mapping[str, Any] = field(default_factory=dict)
    """Place in the data before the prompts of the open step, or of the last one that was open."""
    num_given_back: int = 0
    """Tokens that were sampled ahead and given back, while no step was open to count them."""
    window: CorrelationWindow = field(default_factory=CorrelationWindow)
    """Steps that windowed metrics look back on."""

    @property
    def num_open_updates(self) -> int | None:
        """Updates that the open step has done; None where none is open."""
        return None if self.open_step is None else self.open_step.progress.num_updates

    def take_batch(self, source_state: Mapping[str, Any]) -> None:
        """Take note of the place in the data after the batch of the step under way."""
        self.source_before, self.source_state = self.source_state, source_state

    def open(self, batch: Batch, metrics: dict[str, float]) -> None:
        """Open the step under way: its batch, and metrics of rollouts and groups."""
        self.open_step = OpenStep(batch, metrics, self.evaluated)
        num_tokens, self.num_given_back = self.num_given_back, 0
        self.give_back(num_tokens)

    def give_back(self, num_tokens: int) -> None:
        """Count tokens that were sampled ahead in vain: with the open step, or the next one."""
        if self.open_step is None:
            self.num_given_back += num_tokens
        elif num_tokens:
            metrics, name = self.open_step.metrics, "rollout/given_back_tokens"
            metrics[name] = metrics.get(name, 0.0) + num_tokens

    def finish_step(self) -> None:
        """Go on to the next step."""
        self.step, self.open_step, self.evaluated = self.step + 1, None, {}
