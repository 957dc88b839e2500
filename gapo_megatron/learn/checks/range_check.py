"""Check before an fp16 run that the model's activations lie within fp16's range."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gapo_megatron.config.counts import layers_of_stages
from gapo_megatron.errors import ConfigError, DivergenceError
from gapo_megatron.learn.score import score
from gapo_megatron.policy import Policy
from gapo_megatron.rollouts import Rollouts

logger = logging.getLogger(__name__)

_LARGEST = torch.finfo(torch.float16).max
_WARNS_ABOVE = _LARGEST / 4
"""Largest output without a warning: training and other prompts change activations."""


Place = tuple[int, int, str]
"""Layer from 0 over all pipeline stages (their number for the final norm), number of the module in
the order in which outputs are complete, and its name: sorts in the order of execution."""


@contextlib.contextmanager
def _watching(policy: Policy) -> Iterator[dict[tuple[int, str], Tensor]]:
    """Largest outputs of this rank's modules, by layer and name: kept on the device, in order."""
    largest: dict[tuple[int, str], Tensor] = {}

    def note(layer: int, name: str, _: nn.Module, __: Any, output: Any) -> None:
        for part in output if isinstance(output, tuple | list) else (output,):
            if isinstance(part, Tensor) and part.dtype == torch.float16 and part.numel():
                new = part.detach().abs().amax()  # NaN if any element is NaN
                old = largest.get((layer, name))
                largest[layer, name] = new if old is None else torch.maximum(old, new)

    hooks, num_layers = [], policy.hf_config.num_hidden_layers
    layers = layers_of_stages(policy.parallel, num_layers)[policy.groups.pp_rank]
    for stage, numbers in zip(policy.stages, layers, strict=True):
        for number, layer in zip(numbers, stage.decoder.layers, strict=True):
            for name, module in layer.named_modules():
                named = partial(note, number, name or "sum of its residual connections")
                hooks.append(module.register_forward_hook(named))
        if stage.post_process:
            named = partial(note, num_layers, "final norm")
            hooks.append(stage.decoder.final_layernorm.register_forward_hook(named))
    try:
        yield largest
    finally:
        for hook in hooks:
            hook.remove()


def check_range(policy: Policy, probe: Rollouts, *, of: str = "training prompts") -> None:
    """Score a few sequences, and refuse a model whose activations exceed fp16's range.

    Largest outputs are kept on the device while the layers run, and read once.

    Args:
        policy: in fp16; unchanged.
        probe: the same on every rank; may be empty.
        of: source of the sequences, for messages.

    Collectives: those of `score`; one gather of the ranks' results over all ranks.

    Raises:
        ConfigError: an output is not finite; names the first layer and module in the order of
            execution, the same on every rank.
        DivergenceError: every output is finite, but a log-prob is not; on every rank.
    """
    error = ""
    with _watching(policy) as outputs:
        try:
            score(policy, probe, [(i,) for i in range(len(probe))], temperature=1.0)
        except DivergenceError as found_there:  # raised only on ranks of the last stage
            error = str(found_there)
    values: list[tuple[Place, float]] = []
    if outputs:
        read = torch.stack([*outputs.values()]).tolist()  # waits for the device
        places = [(layer, i, name) for i, (layer, name) in enumerate(outputs)]
        values = sorted(zip(places, read, strict=True))
    found = (
        next((place for place, value in values if not math.isfinite(value)), None),
        max(((value, place) for place, value in values), default=None),
        error,
    )
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, found)
    overflows, largest, errors = (
        [one for one in part if one] for part in zip(*by_rank, strict=True)
    )
    if overflows:
        raise ConfigError(
            f"model.precision ('fp16'): {_shown(min(overflows))}: its output exceeds the range of "
            f"fp16 ({_LARGEST:.0f}) for {of}; set it to 'bf16' or 'fp32'"
        )
    if errors:
        raise DivergenceError(errors[0])
    if largest and max(largest)[0] > _WARNS_ABOVE and policy.groups.rank == 0:
        value, place = max(largest)
        logger.warning(
            "model.precision ('fp16'): outputs of %s reach %.0f, more than a quarter of the range "
            "(%.0f); training or other prompts may exceed it ('bf16' and 'fp32' reach further)",
            _shown(place),
            value,
            _LARGEST,
        )


def _shown(place: Place) -> str:
    return f"layer {place[0]}, {place[2]}"
