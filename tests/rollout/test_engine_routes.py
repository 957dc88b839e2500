"""Routes that vLLM returns are those of the model's routers, for every token and layer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from vllm.distributed.aux_output_connector import worker
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from gapo_megatron.config import Config
from gapo_megatron.errors import RolloutError, WeightSyncError
from gapo_megatron.formats.weights import read_hf
from gapo_megatron.models.tables import geometry_of
from gapo_megatron.rollout.engine import Completion, Request
from gapo_megatron.rollout.vllm import RolloutEngine
from gapo_megatron.rollout.vllm.requests import to_completion
from gapo_megatron.rollouts import Rollouts
from tests.configs import config_of
from tests.cpu_routes import routes_on_a_cpu
from tests.dist import run_distributed
from tests.distributed.conversion_setup import hf_config, save_model
from tests.messages import mentions
from tests.rollout_setup import (
    EOS,
    build_engine,
    make_prompts,
    process_group,
    vllm_environment,
)

BLOCKS = 128
"""Tokens of several blocks of vLLM's cache on a CPU."""
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "max_position_embeddings": 512,
    "eos_token_id": EOS,
}
NONE = np.empty(0, np.int32)
stored_routes = worker.materialize_routed_experts
PROMPT = make_prompts(1, length=BLOCKS + 2)[0].token_ids


def make_config(folder: Path, **rollout: Any) -> Config:
    usual: dict[str, Any] = {
        "model": {"hf_dir": str(folder), "precision": "fp32"},
        "data": {"max_prompt_tokens": 200},
        "batch": {"max_tokens_per_microbatch": 512},
        "rollout": {"max_response_tokens": 240, "enforce_eager": True},
        "objective": {"routing_replay": "rollout"},
    }
    return config_of(usual, {"rollout": rollout})


def request(name: str, seed: int, max_tokens: int, stop_ids: tuple[int, ...] = ()) -> Request:
    return Request(name, PROMPT, NONE, max_tokens, seed, 1.0, 1.0, stop_ids=stop_ids)


def endless(name: str, tensor: Tensor) -> Tensor:
    """EOS is next to impossible: requests end by their own settings."""
    if name == "lm_head.weight":
        tensor = 3 * tensor
        tensor[EOS] = 0.0
    return tensor


def against(name: str, tensor: Tensor) -> Tensor:
    """Every token goes to the experts that it scored lowest."""
    return -tensor if name.endswith(".gate.weight") else endless(name, tensor)


def changed(folder: Path, change: Any) -> Iterator[tuple[str, Tensor]]:
    return ((name, change(name, tensor)) for name, tensor in read_hf(folder))


def load(folder: Path, change: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(change(name, parameter))
    return model


def scores_of(model: PreTrainedModel, tokens: Sequence[int]) -> np.ndarray:
    """[n - 1, layers, experts] scores of the routers for all tokens but the last."""
    with torch.no_grad():
        scores = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    return torch.stack(scores, dim=1)[:-1].numpy()


def check(
    model: PreTrainedModel, request: Request, done: Completion, kept: np.ndarray | None = None
) -> None:
    """Rows of all input and output tokens but the last, which the model has not read."""
    assert done.routes is not None and done.routes.dtype == np.uint8
    routes = done.routes if kept is None else np.concatenate([kept, done.routes])
    tokens = [*request.prompt_ids, *request.response_ids.tolist(), *done.token_ids.tolist()]
    scores = scores_of(model, tokens)
    k = SIZES["num_experts_per_tok"]
    assert routes.shape == (*scores.shape[:2], k)
    assert np.diff(np.sort(routes, -1)).min() > 0  # each expert once
    chosen, least = np.take_along_axis(scores, routes, -1), np.sort(scores, -1)[..., -k]
    # Of two experts whose scores differ by rounding (1e-6), either may be chosen.
    assert (chosen.min(-1) - least).min() > -1e-4


def rest_of(request: Request, done: Completion, *answer: int, max_tokens: int = 20) -> Request:
    """The request that continues a response, all of whose routes are kept."""
    response = np.array([*done.token_ids.tolist(), *answer], np.int32)
    assert done.routes is not None
    return replace(
        request,
        response_ids=response,
        num_routed=len(done.routes),
        max_tokens=max_tokens,
        seed=request.seed + 100,
    )


def poll_until(engine: RolloutEngine, *names: str) -> dict[str, Completion]:
    """What ends until all these requests have ended."""
    ended: dict[str, Completion] = {}
    while not ended.keys() >= set(names):
        ended |= {one.name: one for one in engine.poll()}
    return ended


def run(engine: RolloutEngine, *requests: Request) -> dict[str, Completion]:
    for one in requests:
        engine.add(one)
    return poll_until(engine, *(one.name for one in requests))


@pytest.mark.system
def test_routes_are_those_of_the_routers(tmp_path: Path) -> None:
    """With steps that begin before the former one is read, as on a GPU."""
    save_model(tmp_path, "qwen3_moe", **SIZES)
    model = load(tmp_path, endless)
    with process_group(), routes_on_a_cpu(num_steps_begun=2):
        engine = build_engine(make_config(tmp_path), load_weights=False)
        engine.wake()
        engine.update_weights(changed(tmp_path, endless), policy_version=0)

        # Responses to one prompt: to the end, and until they are aborted.
        long = [request("is long", 1, BLOCKS + 5), request("aborted", 2, 240)]
        stops = request("stops", 3, 200, stop_ids=(2, 3, 4, 5))
        full = request("is full", 4, 9)
        for one in long:
            engine.add(one)
        assert not engine.poll()  # the other two take turns with these, step by step
        ended = run(engine, stops, full)
        for one in (stops, full):
            check(model, one, ended[one.name])

        # The environment's answer to one; to another, whose routes are not kept.
        turn = rest_of(stops, ended["stops"], 7, 8)
        again = replace(rest_of(full, ended["is full"], 9), name="again", num_routed=0)
        with patch.object(worker, "materialize_routed_experts", wraps=stored_routes) as asked:
            turned = run(engine, turn, again)
        assert asked.call_count == 1  # of tokens that are cached, and so are not computed
        check(model, turn, turned["stops"], kept=ended["stops"].routes)
        check(model, again, turned["again"])

        ended |= poll_until(engine, "is long")
        check(model, long[0], ended["is long"])
        reasons = {name: one.reason for name, one in ended.items()}
        assert reasons == {"stops": "stop", "is full": "length", "is long": "length"}
        while not is_under_way(engine):
            assert not engine.poll()
        engine.add(request("late", 5, 9))
        part, late = engine.abort()
        assert (part.reason, late.reason, late.routes) == ("abort", "abort", None)
        assert len(part.token_ids) > BLOCKS
        check(model, long[1], part)

        # It is continued in the next generation, by requests that keep less than the most.
        assert part.routes is not None
        for num_lost in (0, 1, BLOCKS):
            kept = part.routes[: len(part.routes) - num_lost]
            rest = replace(rest_of(long[1], part), num_routed=len(kept))
            check(model, rest, run(engine, rest)["aborted"], kept)
        score(engine)

        # Nothing of earlier weights is left; vLLM's cache is emptied by a sleep, as on a GPU, or by
        # the sync of an engine that stays awake.
        engine.schedule._releases_memory = True
        for version, change in ((1, against), (2, endless)):
            engine.add(long[1])
            while not is_under_way(engine):
                engine.poll()
            engine.abort()
            if version == 1:
                engine.sleep()
                engine.wake()
            engine.update_weights(changed(tmp_path, change), policy_version=version)
            check(load(tmp_path, change), full, run(engine, full)["is full"])

        # Requests that have not ended are not run to their end at other weights.
        engine.add(long[1])
        while not is_under_way(engine):
            engine.poll()
        with pytest.raises(WeightSyncError, match="in flight"):
            engine.update_weights(changed(tmp_path, endless), policy_version=3)
        assert sum(engine.num_requests()) == 1
        engine.abort()
        engine.close()


def is_under_way(engine: RolloutEngine) -> bool:
    """Whether tokens are being sampled that the engine has not read."""
    steps = engine.llm.engine_core.engine_core.batch_queue
    return any(scheduled.total_num_scheduled_tokens for _, scheduled, _ in steps)


def score(engine: RolloutEngine) -> None:
    """Log-probs of given tokens: routes that nobody asks for."""
    ids = np.array(PROMPT, np.int32)
    assert np.isfinite(engine.score(Rollouts.of([ids], [ids[:5]]))[0]).all()


def routes_of_this_rank(folder: str) -> list[tuple[Request, Completion]]:
    """With drafts, whose rejected tokens have routes that must not be returned."""
    os.environ.update(vllm_environment(dist.get_rank(), dist.get_world_size()))
    config = make_config(Path(folder), tensor_parallel_size=2, draft="ngram", draft_ngram=1)
    with routes_on_a_cpu():
        engine = build_engine(config, load_weights=False)
        engine.wake()
        engine.update_weights(changed(Path(folder), endless), policy_version=0)
        requests = [request(str(i), i, 40) for i in range(4)]
        ended = run(engine, *requests)
    return [(one, ended[one.name]) for one in requests]


def test_every_rank_of_a_replica_has_the_routes(tmp_path: Path) -> None:
    """In the first stage: as on a CPU without AVX-512, where the second stage runs, two ranks of
    vLLM 0.32 fail at what they sample, dense models included (`test_rollout_ranks.py`)."""
    save_model(tmp_path, "qwen3_moe", **SIZES)
    model = load(tmp_path, endless)
    ranks = run_distributed(routes_of_this_rank, 2, str(tmp_path))
    for (one, first), (_, second) in zip(*ranks, strict=True):
        np.testing.assert_array_equal(first.routes, second.routes)
        check(model, one, first)
    counts = np.array([(one.num_drafted, one.num_accepted) for _, one in ranks[0]]).sum(0)
    assert 0 < counts[1] < counts[0]


def output(routes: np.ndarray | None) -> RequestOutput:
    """vLLM's, of a request with two tokens of input and three of output."""
    tokens = FlatLogprobs()
    for token in (5, 6, 7):
        tokens.append({token: Logprob(-1.0)})
    done = CompletionOutput(
        *(0, "", tokens.token_ids, None, tokens), routed_experts=routes, finish_reason="length"
    )
    return RequestOutput("p3/0", None, [2, 3], None, [done], finished=True)


def test_routes_that_do_not_fit_their_request_are_refused() -> None:
    model = geometry_of(hf_config("qwen3_moe", **SIZES))
    whole = np.full((3, 3, 2), 7, np.uint8)
    done = to_completion(output(whole), aborted=False, routed=model, num_routed=1)
    assert done.routes is whole
    assert to_completion(output(whole), aborted=False).routes is None
    for wrong, named in [
        (None, "none"),
        (whole[1:], "[2, 3, 2]"),
        (whole[:, 1:], "[3, 2, 2]"),
        (whole.astype(np.uint16), "uint16"),
        (whole + 1, "expert 8 of 8"),
    ]:
        with pytest.raises(RolloutError, match=mentions("p3/0", named)):
            to_completion(output(wrong), aborted=False, routed=model, num_routed=1)
