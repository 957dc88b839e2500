"""A whole run of a model with experts, on ranks that share them: its metrics, and a stop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.programs import Program
from tests.train_setup import (
    CONFIG,
    assert_same_run,
    finish,
    run,
    steps_of,
    stop_and_resume,
    write_inputs,
)

pytestmark = pytest.mark.system
SHARED = "parallel.expert_model_parallel_size=2"
ENGINE = """
from gapo_megatron.rollout.vllm import RolloutEngine
from tests.cpu_routes import routes_on_a_cpu

routes = routes_on_a_cpu()
routes.__enter__()


def build(config, hf_config, *, device, gloo_group):
    return RolloutEngine(config, hf_config, device=device, gloo_group=gloo_group)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task of `test_train`, and a warm start of two of four experts for each token."""
    root: Path = tmp_path_factory.mktemp("experts")
    config = CONFIG.replace("num_steps = 6", "num_steps = 3")
    write_inputs(root, config.replace("rollouts_per_prompt = 4", "rollouts_per_prompt = 8"))
    dense = AutoConfig.from_pretrained(root / "init")
    sizes = {
        name: getattr(dense, name)
        for name in (
            *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "max_position_embeddings", "eos_token_id", "pad_token_id"),
        )
    }
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**sizes, **experts, head_dim=32, norm_topk_prob=True)
    )
    model.save_pretrained(root / "init")
    finish(Program("gapo_megatron.sft", root / "config.toml"))
    return root


@pytest.fixture(scope="module")
def whole_run(root: Path) -> Path:
    run(root, "whole", SHARED, ranks=2)
    return root / "whole"


def test_routes_are_replayed_and_reported(whole_run: Path) -> None:
    steps = steps_of(whole_run)
    for line in steps:
        assert 1 <= line["experts/max_load"] <= 2 and line["experts/dead_share"] < 1
        assert line["sync/max_abs_log_prob_diff"] < 1e-4
    # A mini-batch without signal makes no update, and routes are compared after the first one.
    compared = [line for line in steps if line["skip/updates"] == 0]
    assert compared
    for line in compared:
        assert 0.5 < line["experts/same_routes_share_min"] <= line["experts/same_routes_share"] <= 1
        assert line["experts/ratio_by_routes"] > 0  # the steps are large: 0.3 measured


def test_a_stop_between_updates_changes_no_bit(root: Path, whole_run: Path) -> None:
    """The checkpoint holds the routes of the updates to come."""
    stop_and_resume(root, "stopped", SHARED, stage="step 1: update", ranks=2)
    assert_same_run(root / "stopped", whole_run)


def test_routes_of_the_engine_go_on_over_partial_rollouts_and_a_stop(root: Path) -> None:
    """They travel with the tokens, and are in a checkpoint of open groups and of an open step."""
    (root / "my_engine.py").write_text(ENGINE)
    settings = (
        *(SHARED, f"rollout.engine={root}/my_engine.py:build", "objective.routing_replay=rollout"),
        *("batch.oversampling=1.5", "batch.partial_rollouts=true", "evaluation.every_steps=0"),
        "checkpoint.every_steps=1",
    )
    run(root, "engine", *settings, ranks=2)
    lines = steps_of(root / "engine")
    assert sum("experts/engine_same_routes_share" in line for line in lines) > 1
    for line in lines:
        # Without signal nothing is learned.
        same = line.get("experts/engine_same_routes_share", 1.0)
        is_fresh = line["rollout/carried_token_share"] == 0
        # But for tokens whose experts score the same; older weights chose for carried tokens.
        assert (0.99 if is_fresh else 0.5) < same <= 1
        assert line["sync/max_abs_log_prob_diff"] < 1e-4
    assert any(line["rollout/carried_token_share"] > 0 for line in lines)
    (opened,) = (root / "engine/checkpoints").glob("step_*3/open_groups.pt")
    episodes = [one for group in torch.load(opened)["groups"] for one in group["rollouts"]]
    assert any(one["routes"] is not None for one in episodes)
    # From ranks that only generate, in messages to the trainers.
    apart = [one for one in settings if one != SHARED]
    run(root, "apart", *apart, "rollout.generation_ranks=1", ranks=2)
    (line, *_) = steps_of(root / "apart")
    assert line["experts/engine_same_routes_share"] > 0.99
    stop_and_resume(root, "engine_stopped", *settings, stage="step 1: update", ranks=2)
    same = str(opened.relative_to(root / "engine"))
    assert_same_run(root / "engine_stopped", root / "engine", same)
