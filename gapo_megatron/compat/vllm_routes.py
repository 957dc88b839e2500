"""Undocumented parts of vLLM in use: routes, the experts that it chooses for each token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

from vllm.distributed.aux_output_connector import worker
from vllm.v1.engine.llm_engine import LLMEngine


@contextlib.contextmanager
def routes_on_every_rank() -> Iterator[None]:
    """Let every rank of a replica have the routes, in engines that are built within the block.

    vLLM gives them to a replica's first rank, whose scheduler is usually the only one. Under the
    external launcher each rank has a scheduler, which fails without them. All ranks choose the same
    experts, as they sample the same tokens.
    """
    # Uses: distributed.aux_output_connector.worker.get_tp_group, replaced; that a worker's
    #     connector, built with its KV cache, asks the group for is_first_rank and nothing else
    # Versions: vllm 0.32.0
    # Upstream: none found (the connector: vllm-project/vllm#45635, merged)
    original = worker.get_tp_group
    worker.get_tp_group = lambda: SimpleNamespace(is_first_rank=True)
    try:
        yield
    finally:
        worker.get_tp_group = original


def finish_steps(llm: LLMEngine) -> None:
    """Wait for the steps under way, once all requests of an engine have ended; before, do nothing.

    On a GPU vLLM mostly begins a step before it has read the former one's tokens, so one is still
    under way when the last request ends at EOS or is aborted. If the prefix cache is then emptied,
    also by a sleep, an engine that returns routes fails at its next step ("auxiliary output
    generation changed with output in flight").
    """
    # Uses: LLMEngine.engine_core.engine_core.batch_queue; that steps without requests empty it
    # Versions: vllm 0.32.0
    # Upstream: none found (the assertion: vllm-project/vllm#45635, merged)
    while llm.engine_core.engine_core.batch_queue and not llm.has_unfinished_requests():
        llm.step()
