"""Undocumented parts of vLLM in use: an engine in the trainer's own process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm import EngineArgs, SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.distributed.device_communicators import cpu_communicator
from vllm.inputs.engine import tokens_input
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.engine import FinishReason
from vllm.v1.engine.llm_engine import LLMEngine

# An engine that is garbage collected takes the default process group with it, which is the
# trainer's: so it stays until `close`, or as long as the process.
_alive: list[LLMEngine] = []


# --- an engine and its requests ------------------------------------------------------------------


def create(args: EngineArgs) -> LLMEngine:
    """An engine that is stepped by hand, and whose end leaves the default process group alone.

    Its KV cache on a CPU is that of `args.kv_cache_memory_bytes`, whatever the environment says.

    Raises:
        ValueError: vLLM refuses.
    """
    # Uses: v1.engine.llm_engine.LLMEngine, usage.usage_lib.UsageContext; that weakref.finalize
    #     shuts an engine down when it is garbage collected (v1/engine/core.py); that
    #     VLLM_CPU_KVCACHE_SPACE, a setting of old, would replace the argument (platforms/cpu.py)
    # Versions: vllm 0.32.0
    # Upstream: none found for a group of others (close to it vllm-project/vllm#38231, open;
    #     huggingface/trl#6353)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    llm = LLMEngine.from_engine_args(args, usage_context=UsageContext.LLM_CLASS)
    _alive.append(llm)
    return llm


def close(llm: LLMEngine) -> None:
    """Free what an engine holds and destroy the default process group: vLLM does both at once."""
    # Uses: LLMEngine.engine_core.shutdown
    # Versions: vllm 0.32.0
    # Upstream: as of `create`
    _alive.remove(llm)
    llm.engine_core.shutdown()


def add_tokens(llm: LLMEngine, name: str, tokens: Sequence[int], params: SamplingParams) -> None:
    """Queue a prompt of tokens."""
    # Uses: inputs.engine.tokens_input
    # Versions: vllm 0.32.0
    # Upstream: none found
    llm.add_request(name, tokens_input(list(tokens)), params)


def queue_lengths(llm: LLMEngine) -> tuple[int, int]:
    """Requests that run, and requests that wait, of an engine in this process."""
    # Uses: LLMEngine.engine_core.engine_core.scheduler.get_request_counts
    # Versions: vllm 0.32.0
    # Upstream: vllm-project/vllm#50900 (closed), #17382 (open)
    running, waiting = llm.engine_core.engine_core.scheduler.get_request_counts()
    return running, waiting


def unfinished(llm: LLMEngine) -> dict[str, RequestOutput]:
    """Outputs so far of all requests that the engine still has, by name.

    vLLM makes such an output where an asynchronous caller aborts a request; the engine in this
    process aborts without a word. To be told the tokens of every step instead costs what grows
    with all that is generated, not with what is broken off.
    """
    # Uses: LLMEngine.output_processor.request_states; their external_req_id, make_request_output
    # Versions: vllm 0.32.0
    # Upstream: vllm-project/vllm#22197 (closed), #28037 (merged): both for AsyncLLM alone
    return {
        state.external_req_id: state.make_request_output([], None, FinishReason.ABORT, None)
        for state in llm.output_processor.request_states.values()
    }


def request_names(llm: LLMEngine) -> list[str]:
    """Every request that the engine still has."""
    # Uses: LLMEngine.output_processor.request_states; their external_req_id
    # Versions: vllm 0.32.0
    # Upstream: as of `unfinished`
    return [state.external_req_id for state in llm.output_processor.request_states.values()]


@contextlib.contextmanager
def launched_as_this_world() -> Iterator[None]:
    """Let vLLM take the ranks of the default process group for all that were launched.

    Its external launcher reads RANK and WORLD_SIZE (and in RANK an engine's place in data
    parallelism) while an engine is built. They count all ranks of the job, of which the group may
    have a part; afterwards they do so again. LOCAL_RANK stays: it is the GPU of this node, and vLLM
    uses the default process group that is there, so MASTER_ADDR and MASTER_PORT are not looked at.
    """
    # Uses: RANK and WORLD_SIZE, read by executor.uniproc_executor.ExecutorWithExternalLauncher and
    #     config.parallel while an engine is built
    # Versions: vllm 0.32.0
    # Upstream: as of `create`
    names = ("RANK", "WORLD_SIZE")
    before = {name: os.environ.get(name) for name in names}
    world = torch.distributed
    os.environ |= {"RANK": str(world.get_rank()), "WORLD_SIZE": str(world.get_world_size())}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# --- weights -------------------------------------------------------------------------------------


def load_weights(
    llm: LLMEngine,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    note: Callable[[str, Tensor, int], None],
) -> None:
    """Replace the engine's weights, including the copies that it has packed.

    Args:
        llm: engine with memory for its weights.
        tensors: (Hugging Face name, whole tensor), those of one module next to each other.
        note: called with every parameter of the engine as it was loaded, before it is quantised or
            packed: its name, a part that this rank has of it, and how many ranks of the replica
            have that part.
    """
    # Uses: the worker's method "reload_weights", and its weights_iterator
    # Versions: vllm 0.32.0
    # Upstream: vllm-project/vllm#31848 (open), #31943 (merged): a public weight transfer
    num_ranks = get_tensor_model_parallel_world_size()
    with contextlib.ExitStack() as stack:
        llm.apply_model(lambda model: stack.enter_context(_noting(model, num_ranks, note)))
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
    llm.apply_model(repack_experts)
    llm.apply_model(repack_tied_head)


@contextlib.contextmanager
def _noting(
    model: nn.Module, num_ranks: int, note: Callable[[str, Tensor, int], None]
) -> Iterator[None]:
    """Within, the model's parameters are noted as they are loaded; see `load_weights`."""
    # Uses: that a reload calls module.quant_method.process_weights_after_loading once a module has
    #     its weights (model_loader.reload.layerwise), and copies those of other modules as they are
    # Versions: vllm 0.32.0
    # Upstream: none found
    names = {module: name for name, module in model.named_modules()}
    methods = {
        id(method): method
        for module in names
        if isinstance(method := getattr(module, "quant_method", None), QuantizeMethodBase)
    }

    def note_module(module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            for part, copies in _parts(module, name, parameter.detach(), num_ranks):
                note(f"{names[module]}.{name}", part, copies)

    def noted_before(process: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        def process_noted(module: nn.Module) -> None:
            note_module(module)
            process(module)

        return process_noted

    for method in methods.values():
        method.process_weights_after_loading = noted_before(method.process_weights_after_loading)
    try:
        yield
    finally:
        for method in methods.values():
            del method.process_weights_after_loading  # the class has it
    for module in names:
        if id(getattr(module, "quant_method", None)) not in methods:
            note_module(module)


def _parts(
    module: nn.Module, name: str, parameter: Tensor, num_ranks: int
) -> Iterator[tuple[Tensor, int]]:
    """What this rank has of a parameter, and how many of the replica's ranks have the same."""
    # Uses: QKVParallelLinear.num_heads, .head_size, .num_kv_head_replicas; LinearBase.tp_size
    # Versions: vllm 0.32.0
    # Upstream: none found
    if isinstance(module, QKVParallelLinear):
        num_query = module.num_heads * module.head_size
        yield parameter[:num_query], 1
        yield parameter[num_query:], module.num_kv_head_replicas
        return
    is_cut = isinstance(module, VocabParallelEmbedding | RoutedExperts) or (
        isinstance(module, ColumnParallelLinear | RowParallelLinear)
        and module.tp_size > 1
        and not (isinstance(module, RowParallelLinear) and name == "bias")
    )
    yield parameter, 1 if is_cut else num_ranks


def repack_experts(model: nn.Module) -> None:
    """Pack the new weights of the experts for the kernel that multiplies with them on a CPU.

    vLLM does so when the model is built, and leaves them as they come after a reload (log-probs of
    experts whose weights are shuffled).
    """
    # Uses: module.quant_method.moe_kernel.fused_experts.process_weights_after_loading
    # Versions: vllm 0.32.0
    # Upstream: vllm-project/vllm#48312, #42821, #42823 (open), #32133 (merged)
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and next(module.parameters()).device.type == "cpu":
            kernel.fused_experts.process_weights_after_loading(module)


def repack_tied_head(model: nn.Module) -> None:
    """Refresh the copy of the embedding that a tied output layer multiplies with on a CPU.

    vLLM packs it for its matrix kernel when the model is built. A reload refreshes the packed
    weights of the modules whose tensors it loads; a tied output layer has none of its own
    (log-probs of the old head with the new body).
    """
    # Uses: model.lm_head.quant_method.process_weights_after_loading
    # Versions: vllm 0.32.0
    # Upstream: vllm-project/vllm#52147 (merged: ties in ParallelLMHead), #48312 (open)
    head: Any = getattr(model, "lm_head", None)
    weight = getattr(head, "weight", None)
    if isinstance(weight, Tensor) and weight.device.type == "cpu":
        head.quant_method.process_weights_after_loading(head)


# --- what it leaves behind -----------------------------------------------------------------------


@contextlib.contextmanager
def shared_memory_named(name: Callable[[str, Sequence[int]], str]) -> Iterator[None]:
    """Let engines that start inside meet in shared memory of another name, on a CPU.

    vLLM names it by ranks alone under the external launcher: two runs on one machine would collide,
    and what a killed run leaves behind would keep all later ones from starting.

    Args:
        name: maps a communicator's own name and ranks to a name; the same on all of them.
    """
    # Uses: cpu_communicator._CPUSHMDistributed.make_group_name, replaced
    # Versions: vllm 0.32.0
    # Upstream: vllm-project/vllm#34169 (merged), #46716 (open): neither tells runs apart

    def make_group_name(communicator: cpu_communicator.CpuCommunicator) -> str:
        return name(communicator.unique_name, communicator.ranks)

    shared_memory = cpu_communicator._CPUSHMDistributed
    original = shared_memory.__dict__["make_group_name"]
    shared_memory.make_group_name = staticmethod(make_group_name)
    try:
        yield
    finally:
        shared_memory.make_group_name = original


# --- what it can do here -------------------------------------------------------------------------


def cpu_head_sizes() -> list[int]:
    """Values of head_dim that attention on a CPU can compute."""
    # Uses: v1.attention.backends.cpu_attn.CPUAttentionBackend.get_supported_head_sizes
    # Versions: vllm 0.32.0
    # Upstream: none found
    sizes: list[int] = CPUAttentionBackend.get_supported_head_sizes()
    return sizes


def why_no_cpu_fp8() -> str | None:
    """Why this CPU has no kernel for `fp8_per_block`; None: it has."""
    # Uses: kernels.linear.scaled_mm.cpu.CPUFp8BlockScaledMMKernel.is_supported
    # Versions: vllm 0.32.0
    # Upstream: none found (close to it vllm-project/vllm#39065, #39663, closed)
    has_kernel, reason = CPUFp8BlockScaledMMKernel.is_supported()
    return None if has_kernel else str(reason)


def device_type() -> str:
    """Device type that vLLM would run on: `cuda`, `cpu`, or empty if it finds neither."""
    # Uses: platforms.current_platform.device_type
    # Versions: vllm 0.32.0
    # Upstream: none found
    return str(current_platform.device_type)


def attention_backend(head_dim: int, dtype: torch.dtype) -> str:
    """The attention that it would choose here."""
    # Uses: config.VllmConfig, set_current_vllm_config; v1.attention.selector.get_attn_backend
    # Versions: vllm 0.32.0
    # Upstream: none found
    with set_current_vllm_config(VllmConfig()):
        return str(get_attn_backend(head_dim, dtype, "auto").get_name())
