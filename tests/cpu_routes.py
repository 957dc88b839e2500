"""vLLM that returns routes on a CPU: its scheduler, connectors, store and output processor.

vLLM refuses this, because only its model runner V2 hands routes on, and that one needs Triton. Here
the CPU's model runner (V1) does what V2 does in each step. Nothing else is replaced, the capture of
the routers' choices included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import PendingAuxOutput, get_aux_output_connector
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from gapo_megatron.models import cpu_engine

_initialize = CPUModelRunner.initialize_kv_cache
_execute, _sample = CPUModelRunner.execute_model, CPUModelRunner.sample_tokens


class _Output(AsyncModelRunnerOutput):
    """A step's output, with routes once it is read."""

    def __init__(self, output: ModelRunnerOutput, pending: PendingAuxOutput | None) -> None:
        self.output, self.pending = output, pending

    def get_output(self) -> ModelRunnerOutput:
        if self.pending is not None:
            self.output.aux_output_connector_output = self.pending.process_output()
        return self.output


def _initialize_kv_cache(runner: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
    _initialize(runner, kv_cache_config, *args, **kwargs)
    config = runner.vllm_config
    if config.aux_output_config.enabled:
        runner.aux_output = get_aux_output_connector(runner.model, config, kv_cache_config)


def _execute_model(runner: Any, scheduled: Any, *args: Any) -> Any:
    if hasattr(runner, "aux_output"):
        runner.aux_output.begin_step(scheduled.aux_output_connector_metadata)
    found = _execute(runner, scheduled, *args)
    batch, drafts = runner.input_batch, scheduled.scheduled_spec_decode_tokens
    runner.step = SimpleNamespace(
        req_ids=list(batch.req_ids),
        num_computed_tokens_np=batch.num_computed_tokens_cpu[: batch.num_reqs].copy(),
        query_start_loc_np=runner.query_start_loc.np[: batch.num_reqs + 1].copy(),
        num_drafted={name: len(ids) for name, ids in drafts.items()},
    )
    return found


def _sample_tokens(runner: Any, *args: Any) -> Any:
    if not hasattr(runner, "aux_output"):
        return _sample(runner, *args)
    step = runner.step
    pending = runner.aux_output.prepare_output(step)
    output = _sample(runner, *args)
    if pending is not None:
        sampled = np.array([len(ids) for ids in output.sampled_token_ids])
        drafted = np.array([step.num_drafted.get(name, 0) for name in step.req_ids])
        pending.enqueue_cpu_copy(sampled, np.where(sampled > 0, drafted + 1 - sampled, 0))
    return _Output(output, pending)


@contextlib.contextmanager
def routes_on_a_cpu(*, num_steps_begun: int = 1) -> Iterator[None]:
    """Let engines that are built and used within the block return routes.

    With `num_steps_begun` = 2 a step may begin before the former one's tokens are read, as on a
    GPU: of requests that do not wait for them.
    """
    with contextlib.ExitStack() as stack:
        for owner, name, value in [
            (cpu_engine, "RETURNS_ROUTES", True),
            (VllmConfig, "_verify_aux_output_compatibility", lambda config: None),
            (VllmConfig, "max_concurrent_batches", num_steps_begun),
            (CPUModelRunner, "initialize_kv_cache", _initialize_kv_cache),
            (CPUModelRunner, "execute_model", _execute_model),
            (CPUModelRunner, "sample_tokens", _sample_tokens),
        ]:
            stack.enter_context(patch.object(owner, name, value))
        yield
