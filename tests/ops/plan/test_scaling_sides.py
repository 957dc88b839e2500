"""Splits of a cluster into nodes that train and nodes that only generate."""

import dataclasses
import json
import re

import pytest

from gapo_megatron.config import load_config
from gapo_megatron.config.roles import flat
from gapo_megatron.errors import ConfigError
from gapo_megatron.ops.plan.flops import Shape
from gapo_megatron.ops.plan.hardware import Efficiency
from gapo_megatron.ops.plan.memory import BUCKET_BYTES, memory
from gapo_megatron.ops.plan.planner import (
    Plan,
    memory_fraction,
    overrides,
    plan,
    sides_of,
)
from gapo_megatron.ops.plan.search import Search
from gapo_megatron.ops.plan.times import SidesTime
from gapo_megatron.rollout.transfer import TRANSFER_BYTES
from tests.messages import mentions
from tests.scaling_setup import H200, WORKLOAD, config, hf, layout
from tools import plan as tool

SEVEN = "Qwen2.5-7B"


def planned(*, nodes=3, staleness=None, gpu=H200, model=SEVEN, **sections) -> Plan:
    return plan(
        hf(model),
        config(**sections),
        num_nodes=nodes,
        gpu=gpu,
        workload=WORKLOAD,
        efficiency=Efficiency(),
        max_staleness=staleness,
    )


def apart(num_generation=8, **cut):
    return dataclasses.replace(layout(**cut), num_generation=num_generation)


# --- time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("generation_s", [5.0, 50.0])
def test_what_a_side_does_and_waits_for_is_the_step(staleness, generation_s):
    one = SidesTime(generation_s, 1.0, 3.0, 7.0, 8.0 / max(1, staleness), staleness)
    sides = generation_s + 1, 3 + 7
    if staleness:
        assert one.total_s == max(sides) + 8 / staleness
        assert min(one.training_waits_s, one.generation_waits_s) == 0
    else:
        assert one.total_s == sum(sides) + 8
        assert (one.training_waits_s, one.generation_waits_s) == sides
    assert one.generating_s + one.generation_waits_s + one.sync_s == one.total_s
    assert one.learning_s + one.training_waits_s + one.sync_s == one.total_s
    for other in (0, 1, 3):
        assert one.at(other).at(staleness) == one
        assert one.at(other).sync_s == pytest.approx(8 / max(1, other))


# --- memory --------------------------------------------------------------------------------------


def test_the_share_of_vllm_leaves_room_for_buckets():
    def share(model, gpu):
        parts = Shape.of(hf(model)), config(), gpu, WORKLOAD, Efficiency()
        return memory_fraction(Search(hf(model), *parts))

    assert share(SEVEN, H200) == 0.9
    # The largest tensor of 72B, 2.3 GiB, is more than two buckets.
    for model, gib in (("Qwen2.5-1.5B", 10), ("Qwen2.5-72B", 70)):
        small = dataclasses.replace(H200, memory_bytes=gib * 2**30)
        fraction = share(model, small)
        assert 0.5 < fraction < 0.9
        run = config(rollout={"memory_fraction": fraction})
        found = memory(hf(model), run, apart(8, dp=8, rollout_tp=8), small)
        assert 0.93 * small.memory_bytes < found.generating <= 0.95 * small.memory_bytes


# --- the search ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_policy() -> Plan:
    return planned()


@pytest.fixture(scope="module")
def ahead() -> Plan:
    return planned(staleness=1)


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_best_split_is_the_quickest_of_all(on_policy, ahead, staleness):
    """By hand over splits, layouts, micro-batches and engines."""
    found = (on_policy, ahead)[staleness]
    times = [one.times.total_s for one in found.splits]
    assert times == sorted(times)
    settings = {"memory_fraction": 0.9, "max_staleness": staleness}
    every: dict[int, list[float]] = {}
    for number in (1, 2):
        rollout = settings | {"generation_nodes": number}
        run = config(rollout=rollout)
        parts = Shape.of(hf(SEVEN)), run, H200, WORKLOAD, Efficiency()
        search = Search(hf(SEVEN), *parts)
        num_gpus = 8 * (3 - number)
        for tp, pp in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2)):
            for engine in (1, 2, 4):
                cut = apart(8 * number, tp=tp, pp=pp, dp=num_gpus // (tp * pp), rollout_tp=engine)
                one = [search.candidate(cut, budget) for budget in search.budgets()]
                fitting = [each.times.total_s for each in one if not each.refusal(H200)]
                every.setdefault(number, []).extend(fitting)
    best = {one.layout.num_generation // 8: one.times.total_s for one in found.best_splits}
    assert best == {number: min(seconds) for number, seconds in every.items()}
    assert found.splits[0].times.total_s == min(map(min, every.values()))


def test_all_numbers_of_nodes_are_tried_or_those_around_the_best():
    tiny = dataclasses.replace(H200, gpus_per_node=1)
    for nodes in (2, 5, 15):
        tried = {one.layout.num_generation for one in planned(nodes=nodes, gpu=tiny).splits}
        assert tried == set(range(1, nodes))
    for staleness in (0, 1):
        found = planned(nodes=64, gpu=tiny, staleness=staleness)
        tried = {one.layout.num_generation for one in found.splits}
        best = found.splits[0].layout.num_generation
        assert {best - 1, best, best + 1} - {0, 64} <= tried
        assert {1, 8, 16, 24, 32, 40, 48, 56} <= tried
        assert len(tried) < 40


def test_what_is_planned_fits_and_is_loaded(ahead):
    for candidate in ahead.splits:
        assert candidate.refusal(H200) is None
        assert candidate.layout.num_ranks == 24
        assert candidate.layout.num_generation % candidate.layout.rollout_tp_size == 0
    best = ahead.splits[0]
    number = best.layout.num_generation // 8
    assert {
        f"rollout.generation_nodes={number}",
        "rollout.max_staleness=1",
        "rollout.memory_fraction=0.9",
    } <= set(overrides(best))
    assert sides_of(best).max_staleness == 1
    with pytest.raises(TypeError):
        sides_of(ahead.ranked[0])


def test_nothing_runs_ahead_unless_asked_for(on_policy):
    assert {sides_of(one).max_staleness for one in on_policy.splits} == {0}
    assert not any("max_staleness" in setting for setting in overrides(on_policy.splits[0]))


def test_the_best_of_all_may_be_of_either_kind(on_policy, ahead):
    """On-policy, sides that wait for each other lose here; a step ahead they win."""
    assert on_policy.best is on_policy.ranked[0]
    assert ahead.best is ahead.splits[0]
    assert ahead.ranked == on_policy.ranked
    everything = [one.times.total_s for one in ahead.everything]
    assert everything == sorted(everything)
    assert len(everything) == len(ahead.ranked) + len(ahead.splits)


def test_a_config_with_generation_nodes_is_planned_with_and_without():
    rollout = {"generation_nodes": 1, "max_staleness": 2, "memory_fraction": 0.5}
    objective = {"importance_weights": "token"}
    batch = {"max_tokens_per_microbatch": 8192}
    found = planned(rollout=rollout, objective=objective, batch=batch)
    assert found.current.layout == apart(8, dp=16)
    assert sides_of(found.current).max_staleness == 2
    assert not found.current_refusal
    # Only what differs from the config is an override.
    off = {"rollout.generation_nodes=0", "rollout.max_staleness=0"}
    assert off <= set(overrides(found.ranked[0]))
    assert {sides_of(one).max_staleness for one in found.splits} == {2}
    given = overrides(next(one for one in found.splits if one.layout.num_generation == 16))
    assert "rollout.generation_nodes=2" in given
    assert not any(re.match("objective|rollout.max_staleness", one) for one in given)
    ranks = planned(nodes=1, rollout={"generation_ranks": 2})
    assert ranks.current.layout == apart(2, dp=6)
    assert "rollout.generation_ranks=0" in overrides(ranks.ranked[0])
    none_left = planned(nodes=1, rollout={"generation_nodes": 1})
    assert none_left.current is None
    assert "rollout.generation_nodes (1)" in none_left.current_refusal


def test_what_generation_nodes_cannot_have_is_changed_or_said():
    offloading = planned(optimizer={"offload": "all"})
    assert "optimizer.offload=none" in overrides(offloading.splits[0])
    assert "optimizer.offload=none" not in overrides(offloading.ranked[0])
    partial = planned(batch={"partial_rollouts": True, "oversampling": 1.5})
    given = overrides(partial.splits[0])
    assert not any(re.search("partial_rollouts|oversampling", one) for one in given)
    # Weights are sent after every second step only.
    odd = {"checkpoint": {"every_steps": 5}}
    with pytest.raises(ConfigError, match=mentions("checkpoint.every_steps (5)", 2)):
        planned(staleness=2, **odd)
    with pytest.raises(ConfigError, match=mentions("max_staleness (1)", "2 nodes")):
        planned(nodes=1, staleness=1)


# --- what is shown -------------------------------------------------------------------------------


pytestmark = pytest.mark.usefixtures("clone")  # not the models of the checkout
BASE = "configs/qwen2_5_32b/base.toml"
TOKENS = "batch.max_tokens_per_microbatch=10240"


def test_a_split_is_written_as_a_config(tmp_path, capsys):
    path = tmp_path / "ahead.toml"
    command = [BASE, TOKENS, "--nodes", "6", "--json", "--max-staleness", "1"]
    assert tool.main([*command, "--write", str(path)]) == 0
    values = json.loads(capsys.readouterr().out)
    best = values["splits"][0]
    assert best["times"]["total_s"] < values["layouts"][0]["times"]["total_s"]
    written = load_config(path)
    wanted = [TOKENS, *best["overrides"], f"run.output_dir={written.run.output_dir}"]
    assert flat(written) == flat(load_config(BASE, wanted))
    assert written.rollout.generation_nodes == best["layout"]["num_generation"] // 8
    assert written.rollout.max_staleness == 1
    assert (written.rollout.memory_fraction, written.optimizer.offload) == (0.9, "none")
    assert re.search(rf"{written.rollout.generation_nodes} for generation", path.read_text())


def test_the_buckets_counted_are_those_that_weights_travel_in() -> None:
    assert TRANSFER_BYTES["cuda"] == BUCKET_BYTES


def test_tables_show_both_kinds(capsys):
    assert tool.main([BASE, TOKENS, "--nodes", "2", "--top", "2"]) == 0
    out = capsys.readouterr().out
    for shown in ("Work and waiting", "1 + 1", "(layout 1;"):
        assert shown in out
    assert tool.main([BASE, TOKENS, "--top", "2"]) == 0
    assert "Work and waiting" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tool.main([BASE, "--max-staleness", "-1"])
