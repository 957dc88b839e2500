"""Engines other than vLLM: the interface is sufficient for a second implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from gapo_megatron.checkpoint.open_groups import from_content, to_content
from gapo_megatron.errors import RolloutError, WeightSyncError
from gapo_megatron.rollout.engine import Completion, Request
from gapo_megatron.rollout.generate import generate
from gapo_megatron.rollout.requests import Responses, SamplingSettings
from gapo_megatron.rollout.table import to_episodes, to_rollouts
from gapo_megatron.rollout.verify import verify_weights
from gapo_megatron.types import Episode, Prompt
from tests.acting import calls_of
from tests.alternatives import check_alternatives
from tests.messages import mentions
from tests.transformers_engine import TransformersEngine, on_disk
from tests.two_turn import TwoTurn

EOS = 1
SETTINGS = SamplingSettings(num_samples=4, max_response_tokens=30, seed=7, step=3)


def tokens_of(group: Sequence[Episode]) -> list[list[int]]:
    return [one.token_ids.tolist() for one in group]


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        num_hidden_layers=1,
        vocab_size=23,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config)


def test_a_second_engine_generates_scores_and_takes_weights(model: LlamaForCausalLM) -> None:
    """In two turns: log-probs of sampled tokens equal those of the whole sequence."""
    engine = TransformersEngine(model, eos_token_id=EOS)
    prompts = [Prompt(str(i), (3, 4 + i), answer="") for i in range(4)]
    respond = TwoTurn((20, 21)).respond
    groups = generate(engine, prompts, SETTINGS, calls=calls_of(respond))
    assert groups is not None
    episodes = [one for group in groups for one in group]
    turns = {one.response_mask is not None for one in episodes}
    assert turns == {True, False} == {one.truncated for one in episodes}
    rollouts = to_rollouts(groups)
    log_probs = [one.log_probs[one.is_sampled] for one in episodes]
    check = verify_weights(engine, rollouts, log_probs)
    assert check.max_abs_diff < 1e-5
    again = generate(engine, prompts[::-1], SETTINGS, calls=calls_of(respond))
    assert again is not None
    assert [tokens_of(group) for group in again] == [tokens_of(group) for group in groups[::-1]]

    tensors = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    tensors["model.norm.weight"] *= 1.5
    engine.sleep()
    with pytest.raises(RolloutError):
        engine.score(rollouts)
    engine.wake()
    engine.update_weights(tensors.items(), policy_version=4)
    assert engine.policy_version == 4
    with pytest.raises(WeightSyncError, match=r"\bversion 4\b"):
        verify_weights(engine, rollouts, log_probs)
    del tensors["model.norm.weight"]
    with pytest.raises(WeightSyncError, match="norm"):
        engine.update_weights(tensors.items(), policy_version=5)
    assert engine.policy_version == -1


def test_a_second_engine_returns_alternatives(model: LlamaForCausalLM) -> None:
    engine = TransformersEngine(model, eos_token_id=EOS)
    check_alternatives(engine, model, top_p=0.8, bound=1e-5)


LAYERS, TOP_K = 3, 2


@pytest.fixture
def with_experts() -> Qwen3MoeForCausalLM:
    """Eight experts, two a token."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_experts=8,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=16,
        vocab_size=11,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    return Qwen3MoeForCausalLM(config)


def routes_of(model: Qwen3MoeForCausalLM, one: Episode) -> list[list[list[int]]]:
    """Sorted experts [tokens, layers, TOP_K] of the tokens that a whole sequence feeds."""
    ids = torch.tensor([[*one.prompt.token_ids, *one.token_ids.tolist()]])
    with torch.no_grad():
        scores = model(ids, output_router_logits=True).router_logits
    chosen = torch.stack([layer.topk(TOP_K).indices.sort().values for layer in scores], dim=1)
    sets: list[list[list[int]]] = chosen[:-1].tolist()
    return sets


def kept_by(one: Episode) -> list[list[list[int]]]:
    assert one.routes is not None and one.routes.dtype == np.uint8
    sets: list[list[list[int]]] = np.sort(one.routes.reshape(-1, LAYERS, TOP_K)).tolist()
    return sets


def test_a_token_keeps_the_routes_with_which_it_was_first_read(
    with_experts: Qwen3MoeForCausalLM,
) -> None:
    """Over turns, and when newer weights continue a response: they read its tokens again."""
    engine = TransformersEngine(with_experts, eos_token_id=EOS, returns_routes=True)
    prompts = [Prompt(str(i), (3, 4 + i), answer="") for i in range(6)]
    settings = replace(SETTINGS, keeps_routes=True)
    respond = TwoTurn((5, 6)).respond
    groups = generate(engine, prompts, settings, calls=calls_of(respond), num_groups=2)
    assert groups is not None
    begun = [one for group in groups for one in group]
    for one in begun:
        if len(one.token_ids):
            assert kept_by(one) == routes_of(with_experts, one)
    assert any(one.response_mask is not None for one in begun)

    tensors = {
        name: tensor + 0.1 * torch.randn(tensor.shape) for name, tensor in on_disk(with_experts)
    }
    engine.update_weights(tensors.items(), policy_version=4)
    opened = {one[0].prompt.id: one for one in groups}
    again = generate(engine, prompts, settings, calls=calls_of(respond), begun=opened)
    assert again is not None
    num_continued = 0
    for before, one in zip(begun, (one for group in again for one in group), strict=True):
        num_known = 0 if before.routes is None else len(before.routes)
        assert kept_by(one)[:num_known] == (kept_by(before) if num_known else [])
        assert kept_by(one)[num_known:] == routes_of(with_experts, one)[num_known:]
        is_changed = kept_by(one) != routes_of(with_experts, one)
        num_continued += num_known > 0 and not before.finished and is_changed
    assert num_continued > 2
    # The table carries them, and gives them back.
    rollouts = to_rollouts(again)
    assert rollouts.table["num_routed_tokens"].tolist() == rollouts.num_fed_tokens.tolist()
    (first, *_) = to_episodes(rollouts.carried(), [group[0].prompt for group in again])
    assert [kept_by(one) for one in first] == [kept_by(one) for one in again[0]]
    # So does a checkpoint of open groups.
    ((*read,),) = from_content(to_content([first]))
    assert [kept_by(one) for one in read] == [kept_by(one) for one in first]


def test_routes_are_kept_only_if_they_are_asked_for_and_then_all(
    with_experts: Qwen3MoeForCausalLM,
) -> None:
    engine = TransformersEngine(with_experts, eos_token_id=EOS, returns_routes=True)
    prompts = [Prompt("a", (3, 4), answer="")]
    (group,) = generate(engine, prompts, SETTINGS) or [()]
    assert [one.routes for one in group] == [None] * 4
    settings = replace(SETTINGS, keeps_routes=True)
    keep_all = engine.poll
    for cut, found in ((lambda _: None, "no routes"), (lambda rows: rows[1:], "routes of")):

        def poll(cut: Callable[[np.ndarray], np.ndarray | None] = cut) -> list[Completion]:
            ended = keep_all()
            return [replace(one, routes=cut(cast(np.ndarray, one.routes))) for one in ended]

        with (
            patch.object(engine, "poll", poll),
            pytest.raises(RolloutError, match=mentions("'a'", found, "routing_replay")),
        ):
            generate(engine, prompts, settings)


def test_an_aborted_request_may_bring_no_routes() -> None:
    """Those of earlier requests are kept, and the next one says how many there are."""
    settings = replace(SETTINGS, num_samples=1, keeps_routes=True)
    known = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    token, log_prob = np.array([7], np.int32), np.zeros(1, np.float32)
    none, empty = np.empty(0, np.int32), np.empty(0, np.float32)
    begun: dict[str, tuple[Episode, ...]] = {}
    for routes, num_routed in ((known, 0), (None, 3), (known[:0], 3), (known[:1] + 1, 3)):
        responses = Responses([Prompt("a", (3, 4, 5), answer="")], begun, settings)
        (request,) = responses.begin()
        assert isinstance(request, Request) and request.num_routed == num_routed
        is_read = routes is not None and len(routes)
        new = (token, log_prob) if is_read else (none, empty)
        episode = responses.take(Completion("a/0", *new, "abort", routes=routes))
        begun = {"a": (cast(Episode, episode),)}
    (episode,) = begun["a"]
    assert kept_rows(episode) == [*range(12), 1, 2, 3, 4]
    other = replace(SETTINGS, num_samples=1)  # another setting, in a run that goes on
    (episode,) = Responses([Prompt("a", (3, 4, 5), answer="")], begun, other).groups[0]
    assert episode.for_user().routes is None


def kept_rows(episode: Episode) -> list[int]:
    assert episode.routes is not None
    numbers: list[int] = episode.routes.flatten().tolist()
    return numbers
