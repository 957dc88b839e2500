"""Undocumented parts of Megatron-core's distributed optimizer in use."""

from __future__ import annotations

import bisect
import contextlib
import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from gapo_megatron.compat.megatron_version import version
from gapo_megatron.compat.optimizer_implementation import implementation_of, in_use
from gapo_megatron.errors import ConfigError
from gapo_megatron.io.huge_pages import empty

CHECKPOINT_METADATA = {
    # The one optimizer format that may be loaded onto another layout.
    "distrib_optim_sharding_type": "fully_reshardable",
    # A parameter's key is the same whichever part of the optimizer it belongs to.
    "chained_optim_avoid_prefix": True,
}
"""Options of `sharded_state_dict`: the format in which Megatron-core writes model and optimizer."""
# Uses: `metadata` of sharded_state_dict
# Versions: megatron-core 0.19.2
# Upstream: none found (close to it NVIDIA/Megatron-LM#1517, closed: other parallelism in a load)

_STATE = ("param", "exp_avg", "exp_avg_sq")
"""Megatron-core's names of master weights and moments."""

_GATHERED_AT_ONCE = 2**26
"""Numbers of the optimizer's state on the device: 256 MiB."""


def parts(optimizer: MegatronOptimizer) -> list[Any]:
    """The chained optimizers (dense, experts), or the single one."""
    # Uses: ChainedOptimizer.chained_optimizers
    # Versions: megatron-core 0.19.2
    # Upstream: none found
    return getattr(optimizer, "chained_optimizers", [optimizer])


def leave_out_empty(optimizer: MegatronOptimizer) -> None:
    """Take out the part for dense parameters where nothing but experts is trained.

    Megatron-core makes it in any case, then without AdamW and buffers, and most of what a chain
    of parts does needs both.
    """
    # Uses: ChainedOptimizer.chained_optimizers, MegatronOptimizer.optimizer
    # Versions: megatron-core 0.19.2
    # Upstream: none found
    optimizer.chained_optimizers = [part for part in parts(optimizer) if part.optimizer is not None]


def inner_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """AdamW of every part."""
    # Uses: MegatronOptimizer.optimizer
    # Versions: megatron-core 0.19.2
    # Upstream: none found
    return [part.optimizer for part in parts(optimizer)]


def create_state(optimizer: MegatronOptimizer) -> None:
    """Make the moments now, not in the first update: they can be saved, and their room is taken.

    Raises:
        ConfigError: they are not what a checkpoint has, which all implementations share.
    """
    # Uses: DistributedOptimizer.init_state_fn, .optimizer, .config
    # Versions: megatron-core 0.19.2
    # Upstream: none found
    for part in parts(optimizer):
        part.init_state_fn(part.optimizer, part.config)
        for state in part.optimizer.state.values():
            kept = {name: value.dtype for name, value in state.items() if name != "step"}
            if kept != dict.fromkeys(_STATE[1:], torch.float32):
                raise ConfigError(
                    f"optimizer.implementation ({implementation_of(optimizer)!r}) keeps {kept}; a "
                    f"checkpoint has {' and '.join(_STATE[1:])} in float32, whichever library's"
                )
        if isinstance(part.optimizer, torch.optim.AdamW):  # the others count steps by group
            for state in part.optimizer.state.values():
                state["step"] = torch.zeros(())


def set_weight_decay(optimizer: MegatronOptimizer, value: float) -> None:
    """Set the weight decay of parameters marked as decaying, like Megatron-core's scheduler."""
    # Uses: param_groups: wd_mult
    # Versions: megatron-core 0.19.2
    # Upstream: none found
    for group in optimizer.param_groups:
        group["weight_decay"] = value * group["wd_mult"]


def clip_and_step(optimizer: MegatronOptimizer, *, grad_norm: float, max_norm: float) -> None:
    """Clip prepared gradients of this norm, and move the weights."""
    # Uses: optimizer.clip_grads.clip_grad_by_total_norm_fp32, step_with_ready_grads
    # Versions: megatron-core 0.19.2
    # Upstream: none found
    with in_use(implementation_of(optimizer)):
        for part in parts(optimizer):
            if parameters := part.get_parameters():
                clip_grad_by_total_norm_fp32(parameters, max_norm=max_norm, total_norm=grad_norm)
    optimizer.step_with_ready_grads()


# --- saves ---------------------------------------------------------------------------------------


def gather_in_pieces(optimizer: MegatronOptimizer) -> None:
    """Let saves bring to host memory what this rank writes and no more, a piece at a time.

    From now on the tensors of `sharded_state_dict` have no content, nor memory as long as nobody
    writes to them; `gather_state` brings the content of those that are wanted.

    Megatron-core's own way brings all state of a stage to every rank, and gathers a buffer on the
    device in one piece, when vLLM has that memory already. And it leaves out the padding between
    buckets, though parameters are looked up where they are with it.

    Raises:
        ConfigError: this Megatron-core looks them up elsewhere; see `check_look_up`.
    """
    # Uses: DistributedOptimizer.get_parameter_state_dp_zero, replaced
    # Versions: megatron-core 0.19.2; not those with NVIDIA/Megatron-LM#5077
    # Upstream: NVIDIA/Megatron-LM#5077 (merged), #6342 (open): the look-up subtracts the padding;
    #     #5255 (closed: cost of this way). The public flag
    #     `distrib_optim_fully_reshardable_mem_efficient` needs gloo, and gathers at one rank
    for part in parts(optimizer):
        check_look_up(part)
        part.get_parameter_state_dp_zero = _Outline(part)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Let a save begin without collecting garbage, which takes half a second each time.

    Megatron-core asks for it in `sharded_state_dict`, and Python's own collector runs because a
    plan has many objects; what is garbage is collected later.
    """
    # Uses: optimizer.distrib_optimizer: gc
    # Versions: megatron-core 0.19.2
    # Upstream: none found
    with contextlib.ExitStack() as undo:
        undo.callback(setattr, distrib_optimizer, "gc", distrib_optimizer.gc)
        distrib_optimizer.gc = SimpleNamespace(collect=lambda: 0)
        if gc.isenabled():
            undo.callback(gc.enable)
            gc.disable()
        yield


def gather_state(optimizer: MegatronOptimizer, wanted: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy master weights and moments, as they are now, to tensors in host memory.

    Args:
        optimizer: the optimizer after `gather_in_pieces`.
        wanted: tensors of its last `sharded_state_dict` for a save, which must not overlap, each
            with the one that gets its content: float32, contiguous, as large. Other ranks may want
            others, or none.

    Collectives: all-gathers over the ranks that shard the state.
    """
    # Uses: DistributedOptimizer.buffers, .gbuf_ranges; buffers: buckets, params; grad_data
    # Versions: megatron-core 0.19.2
    # Upstream: as of `gather_in_pieces`
    targets: dict[int, list[_Span]] = {}
    for source, target in wanted:
        assert source.is_contiguous(), "its numbers do not lie together"
        start, address = int(source.storage_offset()), source.untyped_storage().data_ptr()
        span = _Span(start, start + source.numel(), target.view(-1))
        targets.setdefault(address, []).append(span)
    for part in parts(optimizer):
        of_buffers = part.get_parameter_state_dp_zero.take()
        for i, (buffer, ranges) in enumerate(zip(part.buffers, part.gbuf_ranges, strict=True)):
            ((dtype, ranges_of_buckets),) = ranges.items()
            spans = {
                key: sorted(targets.pop(outline.data_ptr(), []), key=lambda span: span.start)
                for key, outline in of_buffers[i][dtype].items()
            }
            start, device = 0, buffer.params[0].device
            for bucket, ranges_of_bucket in zip(buffer.buckets, ranges_of_buckets, strict=True):
                num_values = bucket.grad_data.numel()
                for key in _STATE:
                    mine = _shards(part, ranges_of_bucket["param_map"], key)
                    group = part.data_parallel_group
                    for at, values in _pieces(mine, num_values, group, device):
                        _copy_to(spans[key], start + at, values)
                start += num_values
    assert not targets, "tensors that are not the optimizer's"


class _Outline:
    """In place of `get_parameter_state_dp_zero`: tensors in the layout of a part's buffers.

    Master weights and moments of this rank's stages by buffer and dtype: new float32 tensors in
    host memory, on every rank, without content. A load fills them.
    """

    # Uses: DistributedOptimizer.buffers, .gbuf_ranges; buffers: numel
    # Versions: megatron-core 0.19.2
    # Upstream: as of `gather_in_pieces`

    def __init__(self, part: Any) -> None:
        self._part = part
        self._saved: dict[Any, Any] = {}

    def __call__(self, *, empty_data: bool, **_: bool) -> dict[Any, Any]:
        """New tensors; `empty_data` is set for a load."""
        state = {
            i: {dtype: {key: empty((buffer.numel,), torch.float32) for key in _STATE}}
            for i, (buffer, ranges) in enumerate(
                zip(self._part.buffers, self._part.gbuf_ranges, strict=True)
            )
            for dtype in ranges
        }
        if not empty_data:
            self._saved = state
        return state

    def take(self) -> dict[Any, Any]:
        """The tensors of the last save, which are not kept any longer."""
        saved, self._saved = self._saved, {}
        return saved


class _Span(NamedTuple):
    """Numbers in a row, and where they lie in a buffer or a shard."""

    start: int
    end: int
    values: Tensor
    """Flat."""


def _overlaps(spans: Sequence[_Span], start: int, end: int) -> Iterator[tuple[int, int, Tensor]]:
    """Parts of a range that spans have: beginning and end in the range, the span's values there.

    Args:
        spans: sorted, without overlap.
        start: where the range begins.
        end: where it ends.
    """
    for i in range(bisect.bisect_right(spans, start, key=lambda span: span.end), len(spans)):
        span = spans[i]
        if span.start >= end:
            return
        first, last = max(start, span.start), min(end, span.end)
        yield first - start, last - start, span.values[first - span.start : last - span.start]


def _shards(part: Any, ranges: dict[Tensor, Any], key: str) -> list[_Span]:
    """What this rank has of a bucket's state, by place in its shard of the bucket."""
    # Uses: DistributedOptimizer._get_main_param_and_optimizer_states; param_map: gbuf_local
    # Versions: megatron-core 0.19.2
    # Upstream: as of `gather_in_pieces`
    found = [
        _Span(
            where["gbuf_local"].start,
            where["gbuf_local"].end,
            part._get_main_param_and_optimizer_states(parameter)[key].detach(),
        )
        for parameter, where in ranges.items()
    ]
    return sorted(found, key=lambda span: span.start)


def _pieces(
    mine: Sequence[_Span], num_values: int, group: dist.ProcessGroup, device: torch.device
) -> Iterator[tuple[int, Tensor]]:
    """Yield a bucket's state: where a piece begins, and its numbers.

    Args:
        mine: this rank's shard.
        num_values: length of the bucket, padding included.
        group: ranks with a shard each, equally long.
        device: where pieces are gathered.
    """
    num_ranks = group.size()
    if num_ranks == 1:
        yield from ((span.start, span.values) for span in mine)
        return
    length = num_values // num_ranks
    at_once = max(1, _GATHERED_AT_ONCE // num_ranks)
    for start in range(0, length, at_once):
        end = min(start + at_once, length)
        # Where no parameter is, they hold anything.
        piece = torch.empty(end - start, device=device)
        for first, last, values in _overlaps(mine, start, end):
            piece[first:last] = values
        gathered = torch.empty(num_ranks * len(piece), device=device)
        dist.all_gather_into_tensor(gathered, piece, group=group)
        for rank, values in enumerate(gathered.view(num_ranks, -1)):
            yield rank * length + start, values


def _copy_to(targets: Sequence[_Span], start: int, values: Tensor) -> None:
    """Copy numbers that begin at `start` of a buffer to where they are wanted, if they are."""
    for first, last, target in _overlaps(targets, start, start + len(values)):
        target.copy_(values[first:last])


def check_look_up(part: Any) -> None:
    """Refuse a Megatron-core that reads state at other offsets than `gather_state` has it.

    It would silently read wrong numbers. So it is tested with buffers without memory: the offsets
    that it computes must be those of the parameters' gradients in their buffers.

    Args:
        part: one of `parts(optimizer)`, as built.

    Raises:
        ConfigError: names the version, and the two offsets of a parameter.
    """
    # Uses: DistributedOptimizer.sharded_param_state_fully_reshardable, .buffers, .gbuf_ranges;
    #     Parameter.main_grad
    # Versions: megatron-core 0.19.2
    # Upstream: NVIDIA/Megatron-LM#5077 (merged, not in 0.19.2), #6342 (open)
    # Buffers without memory, as large as the real ones, and the offset of every parameter in them.
    layout = {
        i: {dtype: {"param": torch.empty(buffer.numel, dtype=torch.float32, device="meta")}}
        for i, (buffer, ranges) in enumerate(zip(part.buffers, part.gbuf_ranges, strict=True))
        for dtype in ranges
    }
    names: dict[str, Any] = {}
    places: dict[str, int] = {}
    for i, buffer in enumerate(part.buffers):
        for number, parameter in enumerate(buffer.params):
            name = f"buffer {i}, parameter {number} of shape {tuple(parameter.shape)}"
            names[name] = ShardedTensor.from_rank_offsets(name, parameter)
            start = buffer.grad_data.storage_offset()
            places[f"optimizer.state.param.{name}"] = parameter.main_grad.storage_offset() - start
    # What Megatron-core makes of them.
    with contextlib.ExitStack() as undo:
        undo.callback(delattr, part, "get_parameter_state_dp_zero")
        part.get_parameter_state_dp_zero = lambda **_: layout
        found = part.sharded_param_state_fully_reshardable(
            names, is_loading=True, metadata=dict(CHECKPOINT_METADATA)
        )
    for tensors in found.values():
        tensor = tensors["param"]
        if tensor.data.storage_offset() != places[tensor.key]:
            raise ConfigError(
                f"megatron-core {version()} reads the optimizer's state at offset "
                f"{tensor.data.storage_offset()}, but this package writes it at "
                f"{places[tensor.key]} ({tensor.key}): a checkpoint would mix up parameters, "
                "because of padding between buckets. Use version 0.19.2"
            )


# --- loads ---------------------------------------------------------------------------------------


def load_state(optimizer: MegatronOptimizer, state: dict[Any, Any]) -> None:
    """Load the optimizer's part of a checkpoint, working around two bugs of Megatron-core.

    It ties a checkpoint to its layout: with expert parallelism the optimizer has a second part,
    and a load needs as many parts as the save had. Apart from tensors, all parts store the same,
    and only the step counter matters.

    With torch's AdamW (without Transformer Engine) it expects every parameter's step counter among
    the loaded tensors, where it is missing, and then gives all parameters one shared counter, which
    each of them would advance.

    Args:
        optimizer: the optimizer as built.
        state: loaded result of its `sharded_state_dict`.
    """
    # Uses: DistributedOptimizer._set_main_param_and_optimizer_states, replaced; keys "optimizer",
    #     "param_state", "param_state_sharding_type" of load_state_dict
    # Versions: megatron-core 0.19.2
    # Upstream: none found (close to it NVIDIA/Megatron-LM#5976, merged: Megatron-FSDP alone)
    of_parts = parts(optimizer)
    saved = state if "optimizer" in state else state[0]
    step = saved["optimizer"]["param_groups"][0].get("step")
    for i, part in enumerate(of_parts):
        groups = part.state_dict()["optimizer"]
        if step is not None:  # Transformer Engine's has none before its first step
            for group in groups["param_groups"]:
                group["step"] = int(step)  # torch's is a float, which the others' kernels refuse
        given = state if len(of_parts) == 1 else state[i]
        with contextlib.ExitStack() as undo:
            undo.callback(delattr, part, "_set_main_param_and_optimizer_states")
            part._set_main_param_and_optimizer_states = functools.partial(
                _set_all_but_step, part, part._set_main_param_and_optimizer_states
            )
            part.load_state_dict(
                {
                    "optimizer": groups,
                    "param_state": given["param_state"],
                    "param_state_sharding_type": CHECKPOINT_METADATA["distrib_optim_sharding_type"],
                }
            )


def _set_all_but_step(
    part: Any, set_tensors: Callable[..., None], model_param: Tensor, tensors: dict[str, Tensor]
) -> None:
    # Uses: DistributedOptimizer.model_param_group_index_map
    # Versions: megatron-core 0.19.2
    # Upstream: as of `load_state`
    group, position = part.model_param_group_index_map[model_param]
    state = part.optimizer.state[part.optimizer.param_groups[group]["params"][position]]
    step = state.pop("step", None)
    set_tensors(model_param, tensors)
    if step is not None:
        state["step"] = step.clone()
