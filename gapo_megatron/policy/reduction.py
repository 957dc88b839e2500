"""Overlap the reduction of gradients over data parallel ranks with the last backward pass.

Each bucket of gradients has its own reduce-scatter. Megatron-core starts it when autograd has
produced the bucket's last gradient, which requires that every parameter gets a gradient through
autograd on every rank. That does not hold here: a rank skips backward passes that cannot change the
weights, perhaps its last one, and the output layer adds its gradient to the buffer itself. So a
bucket also waits for all buckets before it, in an order that is fixed when the model is built. All
ranks of a pipeline stage have the same buckets and so the same order, over data parallel and expert
groups together. A rank without a last backward pass starts its buckets at the end of the pass.
Whatever a rank skips, all ranks call the same collectives in the same order, so none hangs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from torch.nn import Parameter

from gapo_megatron.compat.megatron import ListeningModel
from gapo_megatron.compat.megatron import buckets as buckets_of


class OverlappingModel(ListeningModel):
    """A virtual stage that notifies `reduction` when autograd has finished a parameter."""

    reduction: GradientReduction | None = None

    def gradient_came(self, parameter: Parameter) -> None:
        """Notify `reduction` that autograd has added a parameter's gradient to its buffer."""
        if self.reduction is not None:
            self.reduction.gradient_came(parameter)


class GradientReduction:
    """Starts the reduce-scatters of one rank's buckets in order, over all its virtual stages.

    The order is roughly that of the backward pass: from the model's end to its beginning.

    Per update: `reset`; then the schedule enters and leaves `not_last` while gradients arrive; then
    `begin_rest`. The buckets' own `finish_grad_sync` waits for completion.
    """

    def __init__(self, model: Sequence[OverlappingModel]) -> None:
        places = {
            parameter: (stage, number)
            for stage, wrapped in enumerate(model)
            for number, parameter in enumerate(wrapped.module.parameters())
        }
        buckets = [
            (min(places[parameter] for parameter in bucket.params), bucket)
            for wrapped in model
            for bucket in buckets_of(wrapped)
        ]
        buckets.sort(key=lambda pair: pair[0], reverse=True)
        self._buckets = [bucket for _, bucket in buckets]
        self._stages = [stage for (stage, _), _ in buckets]
        self._positions = {
            parameter: position
            for position, bucket in enumerate(self._buckets)
            for parameter in bucket.params
        }
        self._num_stages = len(model)
        self.reset()
        for wrapped in model:
            wrapped.reduction = self

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    def reset(self) -> None:
        """Forget all gradients seen; call before the first micro-batch."""
        self.num_begun = 0
        self._missing = [set(bucket.params) for bucket in self._buckets]
        self._is_last = False
        self._stages_to_go = self._num_stages

    @contextlib.contextmanager
    def not_last(self) -> Iterator[None]:
        """Megatron-core's `no_sync_func`: gradients within the context are not of the last pass.

        The schedules leave it for the last backward pass of each virtual stage, the model's last
        stage first, and enter it again before the gradient is sent on. So on all ranks the buckets
        of a stage start before the previous stage gets its gradients, even if this rank skipped the
        backward pass.
        """
        if self._is_last:
            self._stages_to_go -= 1
            self._begin(until=lambda place: self._stages[place] < self._stages_to_go)
        self._is_last = False
        yield
        # Not in a `finally`: after an error nothing may start.
        self._is_last = True

    def gradient_came(self, parameter: Parameter) -> None:
        """Note that a parameter's gradient of one micro-batch is in its buffer.

        Called by autograd, once in each backward pass; collective in the last one.
        """
        position = self._positions[parameter]
        if position < self.num_begun:  # it would be lost
            raise RuntimeError(
                f"a gradient of {tuple(parameter.shape)} arrived after the reduction of its bucket "
                f"{position} had started ({self.num_begun} of {self.num_buckets} have)"
            )
        if self._is_last:
            self._missing[position].discard(parameter)
            self._begin(until=lambda place: bool(self._missing[place]))

    def begin_rest(self) -> None:
        """Start the remaining reductions, after the last micro-batch. Collective."""
        self._begin(until=lambda _: False)

    def _begin(self, *, until: Callable[[int], bool]) -> None:
        while self.num_begun < self.num_buckets and not until(self.num_begun):
            bucket = self._buckets[self.num_begun]
            # A reduction left over from a failed update would be mistaken for this one.
            if bucket.is_on_its_way:
                raise RuntimeError(f"the reduction of bucket {self.num_begun} is still in progress")
            self.num_begun += 1
            bucket.start()
