"""Gradients are summed over data parallel ranks during the last micro-batch's backward pass.

Gradients lie in buckets, some parameters' each, and a bucket has a reduce-scatter of its own.
Megatron-core begins it when autograd has brought the bucket's last gradient, provided that every
parameter gets one, through autograd, on every rank. That does not hold here: a rank leaves out
backward passes that cannot change the weights, its last one too, and the head adds its gradient to
the buffer itself. So buckets wait for more than their gradients: for all buckets before them, in an
order that is fixed when the model is built. All ranks of a pipeline stage have the same buckets and
therefore the same order, over data parallel and expert groups together. A rank without a last
backward pass begins its buckets where the others end theirs. Whatever is left out, every rank calls
the same collectives, in the same order: none can wait for one that does not come.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from torch.nn import Parameter

from gapo_megatron.compat.megatron import ListeningModel
from gapo_megatron.compat.megatron import buckets as buckets_of


class OverlappingModel(ListeningModel):
    """A virtual stage that tells `reduction` when autograd is done with a parameter."""

    reduction: GradientReduction | None = None

    def gradient_came(self, parameter: Parameter) -> None:
        """Tell `reduction` that autograd has added a parameter's gradient to its buffer."""
        if self.reduction is not None:
            self.reduction.gradient_came(parameter)


class GradientReduction:
    """The reduce-scatters of one rank's buckets, in their order; one object for all virtual stages.

    The order is roughly that in which gradients come: from the model's end to its beginning.

    Per update: `reset`; then the schedule enters and leaves `not_last`, and gradients come; then
    `begin_rest`. The buckets' own `finish_grad_sync` waits.
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
        """Megatron-core's `no_sync_func`: gradients that come within are not their buckets' last.

        Its schedules leave it for the last backward pass of each virtual stage, the model's last
        stage first, and enter it again before the gradient is sent on. So on all ranks the buckets
        of a stage begin before the stage ahead of it gets its gradients, whether or not this
        rank had a backward pass.
        """
        if self._is_last:
            self._stages_to_go -= 1
            self._begin(until=lambda place: self._stages[place] < self._stages_to_go)
        self._is_last = False
        yield
        # Not where an error, or a forgotten context's end, leads out of it.
        self._is_last = True

    def gradient_came(self, parameter: Parameter) -> None:
        """A parameter's gradient of one micro-batch is in its buffer. Collective, in the last one.

        Called by autograd, once in each backward pass.
        """
        position = self._positions[parameter]
        if position < self.num_begun:  # it would be lost
            raise RuntimeError(
                f"a gradient of {tuple(parameter.shape)} came when bucket {position} of "
                f"{self.num_buckets} was on its way already ({self.num_begun} are)"
            )
        if self._is_last:
            self._missing[position].discard(parameter)
            self._begin(until=lambda place: bool(self._missing[place]))

    def begin_rest(self) -> None:
        """Begin the remaining reductions, after the last micro-batch. Collective."""
        self._begin(until=lambda _: False)

    def _begin(self, *, until: Callable[[int], bool]) -> None:
        while self.num_begun < self.num_buckets and not until(self.num_begun):
            bucket = self._buckets[self.num_begun]
            # One that an update broken off by an error has left behind would be taken for this.
            if bucket.is_on_its_way:
                raise RuntimeError(f"bucket {self.num_begun} is still on its way")
            self.num_begun += 1
            bucket.start()
