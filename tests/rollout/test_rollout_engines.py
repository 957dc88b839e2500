"""Engines other than vLLM: the interface is sufficient for a second implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import gapo_megatron
from gapo_megatron.errors import RolloutError, WeightSyncError
from gapo_megatron.rollout.engine import Engine
from gapo_megatron.rollout.generate import generate
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.rollout.table import to_rollouts
from gapo_megatron.rollout.verify import verify_weights
from gapo_megatron.types import Episode, Prompt
from tests.acting import calls_of
from tests.scripted_engine import ScriptedEngine
from tests.transformers_engine import TransformersEngine
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


def test_both_are_engines(model: LlamaForCausalLM) -> None:
    """For mypy, which checks this file, and as an example."""
    engines: list[Engine] = [
        ScriptedEngine(lambda request: [5, EOS]),
        TransformersEngine(model, eos_token_id=EOS),
    ]
    for engine in engines:
        groups = generate(engine, [Prompt("0", (3,), "")], replace(SETTINGS, num_samples=1))
        assert groups is not None and len(groups[0]) == 1


def test_what_drives_an_engine_knows_none_by_name() -> None:
    """A second engine needs changes only in its own folder and where it is built."""
    package = Path(gapo_megatron.__file__).parent
    files = [
        path
        for room in ("rollout", "evaluate", "learn", "rewards", "checkpoint")
        for path in (package / room).rglob("*.py")
        if "vllm" not in path.parts
    ]
    assert len(files) > 30
    knows = [path for path in files if "rollout.vllm" in path.read_text(encoding="utf-8")]
    assert knows == []
