"""Check before an fp16 run that the model's activations lie within fp16's range."""

from __future__ import annotations

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


def check_range(policy: Policy, probe: Rollouts, *, of: str = "training prompts") -> None:
    """Score a few sequences, and refuse a model whose activations exceed fp16's range.

    Whether outputs are finite is kept on the device while the layers run, and read once.

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
    is_finite: dict[tuple[int, str], Tensor] = {}

    def note(layer: int, name: str, _: nn.Module, __: Any, output: Any) -> None:
        for part in output if isinstance(output, tuple | list) else (output,):
            if isinstance(part, Tensor) and part.dtype == torch.float16:
                new = part.detach().isfinite().all()
                is_finite[layer, name] = new & is_finite.get((layer, name), new)

    hooks, num_layers, error = [], policy.hf_config.num_hidden_layers, ""
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
        score(policy, probe, [(i,) for i in range(len(probe))], temperature=1.0)
    except DivergenceError as found_there:  # raised only on ranks of the last stage
        error = str(found_there)
    finally:
        for hook in hooks:
            hook.remove()
    # Layer, number of the module in the order in which outputs are complete, and its name: sorts in
    # the order of execution, over all ranks.
    read = torch.stack([*is_finite.values()]).tolist() if is_finite else []  # waits for the device
    places = [(layer, i, name) for i, (layer, name) in enumerate(is_finite) if not read[i]]
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, (min(places, default=None), error))
    overflows, errors = ([one for one in part if one] for part in zip(*by_rank, strict=True))
    if overflows:
        layer_number, _, name = min(overflows)
        raise ConfigError(
            f"model.precision ('fp16'): layer {layer_number}, {name}: its output exceeds the range "
            f"of fp16 ({torch.finfo(torch.float16).max:.0f}) for {of}; set it to 'bf16' or 'fp32'"
        )
    if errors:
        raise DivergenceError(errors[0])
