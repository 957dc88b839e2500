"""Valid layouts in the order of their time, and reasons for the others."""

import copy
import dataclasses
import re

import pytest

from gapo_megatron.config import load_config
from gapo_megatron.config.counts import check_world_size
from gapo_megatron.errors import ConfigError
from gapo_megatron.io.toml_tree import to_toml
from gapo_megatron.models.checks import check_shapes
from gapo_megatron.rollout.transfer import TRANSFER_BYTES
from gapo_tools.planner.layout import Layout
from gapo_tools.planner.memory import BUCKET_BYTES, memory
from gapo_tools.planner.plans import Plan, plan
from gapo_tools.planner.tables import pipeline_ranks
from gapo_tools.planner.times import SidesTime, step_time
from tests.messages import mentions
from tests.scaling_setup import H200, WORKLOAD, config, hf, layout, parallel_of


def planned(model="Qwen2.5-7B", *, nodes=1, gpu=H200, run=None, **sections) -> Plan:
    """The plan of a published model, or of another one, and of a config `run`, or of sections."""
    model = hf(model) if isinstance(model, str) else model
    return plan(model, run or config(**sections), num_nodes=nodes, gpu=gpu, workload=WORKLOAD)


@pytest.mark.parametrize(
    ("model", "nodes", "sections"),
    [
        ("Qwen2.5-7B", 1, {}),
        ("Qwen2.5-72B", 4, {"parallel": {"context_parallel_size": 2}}),
        ("Qwen3-30B-A3B", 2, {"batch": {"max_tokens_per_microbatch": 8192}}),
        ("Qwen2.5-7B", 3, {"rollout": {"generation_nodes": 1, "memory_fraction": 0.9}}),
        ("Qwen2.5-7B", 1, {"parallel": parallel_of(1, 4, vpp=7)}),
    ],
)
def test_what_is_listed_runs_and_fits_and_can_be_given_to_a_run(tmp_path, model, nodes, sections):
    """Its settings, as overrides of the config, are its layout, and its figures are of no other."""
    found, facts = planned(model, nodes=nodes, **sections), hf(model)
    apart = 8 * sections.get("rollout", {}).get("generation_nodes", 0)
    seconds = [one.times.total_s for one in found.ranked]
    assert seconds == sorted(seconds) and len({one.layout for one in found.ranked}) > 10
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config(**sections)))
    for one in found.ranked[:: len(found.ranked) // 7]:
        given = one.layout.settings.items()
        run = load_config(
            file, [f"{key}={value}".lower() for key, value in given if value is not None]
        )
        layout = Layout.of(run, world_size=8 * nodes - apart, num_generation=apart)
        assert layout == one.layout
        check_shapes(facts, run.parallel)
        check_world_size(run.parallel, layout.world_size)
        assert one.memory == memory(facts, run, one.layout, H200)
        assert one.times == step_time(facts, run, one.layout, WORKLOAD, H200)
        assert max(one.memory.training, one.memory.generating) <= H200.memory_bytes
        assert isinstance(one.times, SidesTime) == (apart > 0)


def test_a_model_that_fits_uncut_is_quickest_uncut():
    short = {"batch": {"max_tokens_per_microbatch": 8192}}
    best = planned(**short).ranked[0].layout
    assert (best.tp_size, best.pp_size, best.dp_size) == (1, 1, 8)
    # Of 72 billion weights and gradients alone, 6 bytes each, need a cut into four.
    cut = planned("Qwen2.5-72B", nodes=4, **short)
    assert cut.ranked and all(one.layout.tp_size * one.layout.pp_size >= 4 for one in cut.ranked)
    assert "out of memory while training" in cut.current_refusal
    assert sum("out of memory" in reason for reason in cut.refusals) > 1


def test_fp8_takes_no_layout_whose_matrices_it_cannot_multiply():
    """An eighth of 18,880 is no multiple of 16, a quarter is."""
    model = copy.deepcopy(hf("Qwen2.5-7B"))
    model.intermediate_size, model.num_attention_heads, model.num_key_value_heads = 18880, 32, 8
    found = {}
    for precision in ("bf16", "fp8"):
        plans = planned(model, run=config(model={"precision": precision}))
        sizes = {candidate.layout.tp_size for candidate in plans.ranked}
        found[precision] = sizes, [reason for reason in plans.refusals if "fp8" in reason]
    assert found["bf16"] == ({1, 2, 4, 8}, [])
    sizes, (reason,) = found["fp8"]
    assert sizes == {1, 2, 4}
    assert re.search(mentions("linear_fc2.weight", 3584, 2360), reason)


@pytest.mark.parametrize(
    ("recipe", "runs_on"),
    [("mxfp8", {10.0}), ("blockwise", {9.0, 10.0, 12.0}), ("tensorwise", {8.9, 9.0, 10.0, 12.0})],
)
def test_an_fp8_recipe_is_planned_where_it_runs_alone(recipe, runs_on):
    for capability in (0.0, 8.0, 8.9, 9.0, 10.0, 12.0):
        gpu = dataclasses.replace(H200, compute_capability=capability, gpus_per_node=1)
        run = config(model={"precision": "fp8", "fp8_recipe": recipe})
        if capability in runs_on:
            assert planned("Qwen2.5-1.5B", gpu=gpu, run=run).ranked
            continue
        named = mentions("model.fp8_recipe", recipe, "h200", capability or "none")
        with pytest.raises(ConfigError, match=named):
            planned("Qwen2.5-1.5B", gpu=gpu, run=run)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"parallel": parallel_of(8, 1, sp=True)}, ("tensor_model_parallel_size (8)", 28)),
        ({"parallel": parallel_of(1, 2, last=13, vpp=2)}, ("virtual_pipeline", 2, 15)),
        ({"rollout": {"tensor_parallel_size": 8}}, ("rollout.tensor_parallel_size (8)", 28)),
        ({"rollout": {"tensor_parallel_size": 4}}, ("rollout.tensor_parallel_size (4)", "node", 2)),
    ],
)
def test_the_configs_own_layout_is_there_or_why_it_does_not_run(sections, words):
    gpu = dataclasses.replace(H200, gpus_per_node=2 if "node" in words else 8)
    found = planned(nodes=4, gpu=gpu, **sections)
    assert found.current is None
    assert re.search(mentions(*words), found.current_refusal)


def test_unequal_and_virtual_stages_of_the_config_are_shown():
    found = planned(nodes=2, parallel=parallel_of(4, 4, sp=True, vpp=2, first=6, last=6))
    assert not found.current_refusal
    assert pipeline_ranks(found.current.layout) == "4 x 2, unequal"
    assert all(one.layout.vpp_size == 1 for one in found.ranked)


def test_layouts_that_the_trainer_refuses_are_not_listed():
    """160 experts on 320 GPUs: five ranks of experts and two of tensors do not nest."""
    model = copy.copy(hf("Qwen3-30B-A3B"))
    model.num_experts = 160
    found = planned(model, nodes=160, gpu=dataclasses.replace(H200, gpus_per_node=2))
    for candidate in found.ranked:
        check_world_size(candidate.layout.apply(config()).parallel, 320)
    sizes = ("parallel.expert_model_parallel_size", "parallel.tensor_model_parallel_size")
    assert any(re.search(mentions(*sizes), reason) for reason in found.refusals)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_sides_take_turns_or_work_at_the_same_time(staleness):
    one = SidesTime(5.0, 1.0, 3.0, 7.0, sync_s=2.0, max_staleness=staleness)
    assert one.total_s == (12.0 if staleness else 18.0)
    objective = {"importance_weights": "token"} if staleness else {}
    rollout = {"generation_nodes": 1, "memory_fraction": 0.9, "max_staleness": staleness}
    run, cut = config(rollout=rollout, objective=objective), layout(dp=8)
    cut = dataclasses.replace(cut, num_generation=8)
    alone = config(rollout=rollout | {"max_staleness": 0})
    times, on_policy = (
        step_time(hf("Qwen2.5-7B"), one, cut, WORKLOAD, H200) for one in (run, alone)
    )
    assert times.sync_s == on_policy.sync_s / max(1, staleness)


def test_wrong_numbers_of_nodes_are_refused():
    with pytest.raises(ConfigError, match=r"\bnodes\W+0\b"):
        planned(nodes=0)
    with pytest.raises(ConfigError, match=mentions("rollout.generation_nodes (1)", 1)):
        planned(rollout={"generation_nodes": 1})


def test_the_buckets_counted_are_those_that_weights_travel_in() -> None:
    assert TRANSFER_BYTES["cuda"] == BUCKET_BYTES
