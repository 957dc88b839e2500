"""Undocumented parts of vLLM in use: an engine in the trainer's own process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence

import torch
from vllm import EngineArgs, SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.device_communicators import cpu_communicator
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
from vllm.model_executor.models import ModelRegistry
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.engine import FinishReason
from vllm.v1.engine.llm_engine import LLMEngine

from gapo_megatron.compat.vllm_cpu import repair_on_cpu
from gapo_megatron.compat.vllm_drafts import repair_drafts_on_cpu

# Garbage collection of an engine destroys the trainer's process group: they live until `close`.
_alive: list[LLMEngine] = []


# --- an engine and its requests ------------------------------------------------------------------


def create(args: EngineArgs, *, architectures: Sequence[str]) -> LLMEngine:
    """Build an engine that the caller steps, and that leaves the default process group alone.

    On a CPU, its KV cache has `args.kv_cache_memory_bytes`, whatever the environment says.

    Args:
        args: vLLM's arguments.
        architectures: of the model's config.

    Raises:
        ValueError: vLLM rejects the arguments.
    """
    # Uses: v1.engine.llm_engine.LLMEngine, usage.usage_lib.UsageContext; that weakref.finalize
    #     shuts an engine down when it is garbage collected (v1/engine/core.py); on a CPU that
    #     VLLM_CPU_KVCACHE_SPACE would replace the argument (platforms/cpu.py)
    # Versions: vllm 0.32.0
    # Upstream: none found for a group of others (close to it vllm-project/vllm#38231, open;
    #     huggingface/trl#6353)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    _inspect_here(architectures)
    if current_platform.is_cpu():
        repair_on_cpu()
        if args.speculative_config:
            repair_drafts_on_cpu()
    llm = LLMEngine.from_engine_args(args, usage_context=UsageContext.LLM_CLASS)
    _alive.append(llm)
    return llm


def _inspect_here(architectures: Sequence[str]) -> None:
    """Import the model's class now, so that vLLM inspects it in this process.

    It would inspect a class that its cache (VLLM_CACHE_ROOT) does not know in a process of its own,
    which imports all of vLLM again: at the first start with a cache, on every rank at once. It does
    so for processes that it forks, which must find CUDA as yet unused; here it forks none. Draft
    models are inspected as before.
    """
    # Uses: model_executor.models.ModelRegistry.models, and their load_model_cls
    # Versions: vllm 0.32.0
    # Upstream: vllm-project/vllm#19317 (open)
    for name in architectures:
        known = ModelRegistry.models.get(name)
        with contextlib.suppress(Exception):  # vLLM tries again, and says why it cannot
            if known is not None:
                ModelRegistry.register_model(name, known.load_model_cls())


def close(llm: LLMEngine) -> None:
    """Shut an engine down; vLLM also destroys the default process group."""
    # Uses: LLMEngine.engine_core.shutdown
    # Versions: vllm 0.32.0
    # Upstream: as of `create`
    _alive.remove(llm)
    llm.engine_core.shutdown()


def add_tokens(
    llm: LLMEngine,
    name: str,
    tokens: Sequence[int],
    params: SamplingParams,
    adapter: LoRARequest | None,
) -> None:
    """Queue a prompt of token ids, to be computed with the adapter if there is one."""
    # Uses: inputs.engine.tokens_input
    # Versions: vllm 0.32.0
    # Upstream: none found
    llm.add_request(name, tokens_input(list(tokens)), params, lora_request=adapter)


def queue_lengths(llm: LLMEngine) -> tuple[int, int]:
    """Numbers of running and waiting requests of an engine in this process."""
    # Uses: LLMEngine.engine_core.engine_core.scheduler.get_request_counts
    # Versions: vllm 0.32.0
    # Upstream: vllm-project/vllm#50900 (closed), #17382 (open)
    running, waiting = llm.engine_core.engine_core.scheduler.get_request_counts()
    return running, waiting


def unfinished(llm: LLMEngine) -> dict[str, RequestOutput]:
    """Outputs so far of all unfinished requests, by name.

    vLLM returns such outputs when an asynchronous caller aborts a request, but not from an engine
    in this process. Asking for outputs in every step would cost time for all generated tokens
    instead of only the aborted ones.
    """
    # Uses: LLMEngine.output_processor.request_states; their external_req_id, make_request_output
    # Versions: vllm 0.32.0
    # Upstream: vllm-project/vllm#22197 (closed), #28037 (merged): both for AsyncLLM alone
    return {
        state.external_req_id: state.make_request_output([], None, FinishReason.ABORT, None)
        for state in llm.output_processor.request_states.values()
    }


def request_names(llm: LLMEngine) -> list[str]:
    """Names of all unfinished requests."""
    # Uses: LLMEngine.output_processor.request_states; their external_req_id
    # Versions: vllm 0.32.0
    # Upstream: as of `unfinished`
    return [state.external_req_id for state in llm.output_processor.request_states.values()]


@contextlib.contextmanager
def launched_as_this_world() -> Iterator[None]:
    """Set RANK and WORLD_SIZE to those of the default process group while an engine is built.

    vLLM's external launcher reads them (RANK also for the engine's data parallel rank), but they
    count all ranks of the job, of which the group may be a part. LOCAL_RANK is not changed: it is
    the GPU on this node. MASTER_ADDR and MASTER_PORT are not read, because vLLM uses the existing
    default process group.
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


# --- what it leaves behind -----------------------------------------------------------------------


@contextlib.contextmanager
def shared_memory_named(name: Callable[[str, Sequence[int]], str]) -> Iterator[None]:
    """Give the shared memory of engines that start within the block another name, on a CPU.

    Under the external launcher vLLM names it only by ranks: two runs on one machine would collide,
    and leftovers of a killed run would prevent all later starts.

    Args:
        name: maps a communicator's own name and ranks to a name, the same on all its ranks.
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
    """Values of head_dim that attention on a CPU supports."""
    # Uses: v1.attention.backends.cpu_attn.CPUAttentionBackend.get_supported_head_sizes
    # Versions: vllm 0.32.0
    # Upstream: none found
    sizes: list[int] = CPUAttentionBackend.get_supported_head_sizes()
    return sizes


def why_no_cpu_fp8() -> str | None:
    """Why this CPU has no kernel for block-wise FP8, nor for MXFP4; None if it has both."""
    # Uses: kernels.linear.scaled_mm.cpu.CPUFp8BlockScaledMMKernel.is_supported
    # Versions: vllm 0.32.0
    # Upstream: none found (close to it vllm-project/vllm#39065, #39663, closed)
    has_kernel, reason = CPUFp8BlockScaledMMKernel.is_supported()
    return None if has_kernel else str(reason)


def device_type() -> str:
    """Device type that vLLM would use: `cuda`, `cpu`, or empty if there is neither."""
    # Uses: platforms.current_platform.device_type
    # Versions: vllm 0.32.0
    # Upstream: none found
    return str(current_platform.device_type)


def attention_backend(head_dim: int, dtype: torch.dtype) -> str:
    """The attention backend that vLLM would choose here."""
    # Uses: config.VllmConfig, set_current_vllm_config; v1.attention.selector.get_attn_backend
    # Versions: vllm 0.32.0
    # Upstream: none found
    with set_current_vllm_config(VllmConfig()):
        return str(get_attn_backend(head_dim, dtype, "auto").get_name())
