"""Layouts that fit, in the order of their time; reasons for the others; simulated scale."""

import copy
import dataclasses
import re
import tracemalloc

import pytest

from gapo_megatron.config import load_config
from gapo_megatron.config.counts import check_world_size
from gapo_megatron.errors import ConfigError
from gapo_megatron.io.toml_tree import to_toml
from gapo_megatron.models.checks import check_shapes
from gapo_megatron.ops.plan.fit import LARGER_FRACTION, OUT_OF_HOST, SMALLER_FRACTION
from gapo_megatron.ops.plan.flops import Shape
from gapo_megatron.ops.plan.hardware import Efficiency
from gapo_megatron.ops.plan.layout import Layout
from gapo_megatron.ops.plan.memory import memory
from gapo_megatron.ops.plan.planner import Plan, leave_out, overrides, plan
from gapo_megatron.ops.plan.search import Candidate, Refusals, Search
from gapo_megatron.ops.plan.tables import memory_table, nothing_fits, to_json
from gapo_megatron.ops.plan.times import step_time
from tests.hf.test_convert_models import NUM_PARAMETERS
from tests.messages import mentions
from tests.scaling_setup import H200, WORKLOAD, config, hf, layout, parallel_of


def planned(model="Qwen2.5-7B", *, nodes=1, gpu=H200, run=None, **sections) -> Plan:
    """The plan of a published model, or of another one, and of a config `run`, or of sections."""
    return plan(
        hf(model) if isinstance(model, str) else model,
        run or config(**sections),
        num_nodes=nodes,
        gpu=gpu,
        workload=WORKLOAD,
        efficiency=Efficiency(),
    )


@pytest.fixture(scope="module")
def on_one_node() -> Plan:
    return planned()


def test_what_is_ranked_fits_and_runs(on_one_node):
    model = hf("Qwen2.5-7B")
    assert on_one_node.ranked
    for candidate in on_one_node.ranked:
        assert candidate.memory.training <= H200.memory_bytes
        assert candidate.memory.generating <= H200.memory_bytes
        assert candidate.layout.world_size == 8
        run = candidate.layout.apply(config())
        check_shapes(model, run.parallel)
        assert Layout.of(run, world_size=8) == candidate.layout
        assert candidate.max_tokens_per_microbatch >= run.max_sequence_tokens


def test_fp8_takes_no_layout_whose_matrices_it_cannot_multiply():
    """An eighth of 18,880 is no multiple of 16, a quarter is."""
    model = copy.deepcopy(hf("Qwen2.5-7B"))
    model.intermediate_size, model.num_attention_heads, model.num_key_value_heads = 18880, 32, 8
    found = {}
    for precision in ("bf16", "fp8"):
        plans = planned(model, run=config(model={"precision": precision}))
        sizes = {candidate.layout.tp_size for candidate in plans.ranked}
        found[precision] = sizes, [reason for reason in plans.refusals if "fp8" in reason]
        headings = [column.header for column in memory_table(plans, top=1).columns]
        assert ("fp8 copies" in headings) == (precision == "fp8")
    assert found["bf16"] == ({1, 2, 4, 8}, [])
    sizes, (reason,) = found["fp8"]
    assert sizes == {1, 2, 4}
    assert re.search(mentions("linear_fc2.weight", 3584, 2360), reason)


@pytest.mark.parametrize(
    ("recipe", "runs_on", "bounds"),
    [
        ("mxfp8", (10.0, 10.3), r"10\.0\b.*\b12\.0"),
        ("blockwise", (9.0, 10.0, 10.3, 12.0), r"9\.0"),
        ("tensorwise", (8.9, 9.0, 10.0, 10.3, 12.0), r"8\.9"),
        ("delayed", (8.9, 9.0, 10.0, 10.3, 12.0), r"8\.9"),
    ],
)
def test_an_fp8_recipe_is_planned_where_it_runs_alone(recipe, runs_on, bounds):
    def on(capability, **model):
        gpu = dataclasses.replace(H200, compute_capability=capability, gpus_per_node=1)
        return planned("Qwen2.5-1.5B", gpu=gpu, run=config(model=model))

    for capability in (0.0, 8.0, 8.9, 9.0, 10.0, 10.3, 12.0):
        if capability in runs_on:
            assert on(capability, precision="fp8", fp8_recipe=recipe).ranked
            continue
        shown = capability or "none"
        named = rf"(?=.*\bmodel\.fp8_recipe\W+{recipe}\b)(?=.*\b{bounds}\b).*\bh200\b.*\b{shown}\b"
        with pytest.raises(ConfigError, match=named):
            on(capability, precision="fp8", fp8_recipe=recipe)
    assert on(0.0, precision="bf16").ranked


def test_the_quickest_comes_first(on_one_node):
    times = [candidate.times.total_s for candidate in on_one_node.ranked]
    assert times == sorted(times)
    # A model of 15 GB: nothing is gained by cutting it.
    best = on_one_node.ranked[0].layout
    assert (best.tp_size, best.pp_size, best.dp_size) == (1, 1, 8)


def test_times_and_memory_are_those_of_the_layout_alone(on_one_node):
    """The search takes shortcuts; a candidate's figures are what one call gives."""
    model = hf("Qwen2.5-7B")
    for candidate in on_one_node.ranked[:: max(1, len(on_one_node.ranked) // 4)]:
        batch = {"max_tokens_per_microbatch": candidate.max_tokens_per_microbatch}
        run = candidate.layout.apply(config(batch=batch))
        needed = memory(model, run, candidate.layout, H200)
        assert candidate.memory == needed
        times = step_time(model, run, candidate.layout, WORKLOAD, H200, Efficiency())
        assert candidate.times == times


def test_the_configs_own_layout_is_always_there(on_one_node):
    assert on_one_node.current.layout == Layout.of(config(), world_size=8)
    assert on_one_node.current.max_tokens_per_microbatch == 32768
    wrong = planned(parallel={"tensor_model_parallel_size": 8, "sequence_parallel": True})
    assert wrong.current is None
    named = mentions("parallel.tensor_model_parallel_size (8)", "num_attention_heads (28)")
    assert re.search(named, wrong.current_refusal)
    assert any(re.search(named, reason) for reason in wrong.refusals)


@pytest.mark.parametrize(
    ("size", "words"),
    [(8, r"\bnum_attention_heads\W+28\b"), (4, r"\bnode\W+2\b")],
)
def test_an_engine_that_vllm_refuses_does_not_run(size, words):
    small = dataclasses.replace(H200, gpus_per_node=2)
    found = planned(nodes=8, gpu=small, rollout={"tensor_parallel_size": size})
    assert found.current is None
    named = rf"\brollout\.tensor_parallel_size\W+{size}\b.*{words}"
    assert re.search(named, found.current_refusal)


def test_layouts_that_the_trainer_refuses_are_not_ranked():
    """160 experts on 320 GPUs: five ranks of experts and two of tensors do not nest."""
    model = copy.copy(hf("Qwen3-30B-A3B"))
    model.num_experts = 160
    gpu = dataclasses.replace(H200, gpus_per_node=2)
    found = planned(model, nodes=160, gpu=gpu)
    assert found.ranked
    for candidate in found.ranked:
        check_world_size(candidate.layout.apply(config()).parallel, 320)
    sizes = ("parallel.expert_model_parallel_size", "parallel.tensor_model_parallel_size")
    assert any(re.search(mentions(*sizes), reason) for reason in found.refusals)


def test_what_does_not_fit_says_which_part():
    plan_72b = planned("Qwen2.5-72B")
    reasons = [reason for reason in plan_72b.refusals if "out of memory" in reason]
    assert reasons
    assert "out of memory" in plan_72b.current_refusal  # 72 billion on every GPU
    for reason in reasons:
        refused = plan_72b.refusals[reason]
        assert refused.example.refusal(H200) == (reason, refused.num_bytes)
        memory_of = refused.example.memory
        phase = memory_of.training if "training" in reason else memory_of.generating
        assert refused.num_bytes == phase > H200.memory_bytes
    # Weights and gradients alone, 6 bytes a parameter, need at least a cut into four.
    for candidate in plan_72b.ranked:
        assert candidate.layout.tp_size * candidate.layout.pp_size >= 4


def test_what_a_nodes_own_memory_does_not_hold_is_refused():
    """What is offloaded, and what a checkpoint takes while it is loaded or saved."""
    model, cut = hf("Qwen2.5-7B"), layout(dp=8, recompute="full")

    def found(offload, gib):
        gpu = dataclasses.replace(H200, host_memory_bytes=gib * 2**30)
        one = config(optimizer={"offload": offload})
        times = step_time(model, one, cut, WORKLOAD, gpu, Efficiency())
        needed = memory(model, one, cut, gpu)
        return needed, Candidate(cut, 32768, needed, times).refusal(gpu)

    needed, refusal = found("all", 900)  # a tenth of it is the system's
    # On eight uncut ranks: 12 bytes a parameter to load, 2 and an eighth of 12 offloaded.
    parameters = NUM_PARAMETERS["Qwen2.5-7B"]
    assert needed.checkpoint * 8 == pytest.approx(96 * parameters, rel=1e-3)
    assert needed.offloaded * 8 == pytest.approx(28 * parameters, rel=1e-3)
    assert refusal == (OUT_OF_HOST, 8 * (needed.checkpoint + needed.offloaded))
    needed, refusal = found("none", 700)
    assert refusal == (OUT_OF_HOST, 8 * needed.checkpoint)
    for offload, gib in (("all", 1000), ("none", 800)):
        assert found(offload, gib)[1] is None

    # A save takes what all ranks write together, once: 12 bytes a parameter, 14 with copies.
    behind = config(checkpoint={"background": True})
    assert memory(model, behind, cut, H200).checkpoint == needed.checkpoint  # to load
    alone = layout(dp=1, recompute="full")
    for one, num_bytes in ((config(), 12), (behind, 14)):
        found = memory(model, one, alone, H200).checkpoint
        assert found == pytest.approx(num_bytes * parameters, rel=1e-3)


def test_the_hint_is_the_commonest_reasons(on_one_node):
    def hint(**counts):
        reasons = {
            "gradients": "out of memory while training; largest part: gradients",
            "activations": "out of memory while training; largest part: activations",
            "smaller": SMALLER_FRACTION,
            "larger": LARGER_FRACTION,
            "heads": "parallel.tensor_model_parallel_size (8) must divide",
        }
        refusals = {reasons[name]: Refusals(count) for name, count in counts.items()}
        nothing = dataclasses.replace(on_one_node, ranked=[], refusals=refusals)
        return set(re.findall(r"\b(nodes|smaller|larger)\b", nothing_fits(nothing, config())))

    assert hint(gradients=2, activations=2, smaller=3, heads=9) == {"nodes"}
    assert hint(gradients=1, activations=1, smaller=3, heads=9) == {"smaller"}
    assert hint(smaller=3, larger=4) == {"larger"}
    assert hint(heads=9) == set()


def test_experts_go_within_what_they_divide():
    roomy = dataclasses.replace(H200, gpus_per_node=2, memory_bytes=4 * H200.memory_bytes)
    found = planned("Qwen3-30B-A3B", gpu=roomy, nodes=2)
    assert found.ranked
    for candidate in found.ranked:
        layout = candidate.layout
        assert 128 % layout.ep_size == 0
        assert (layout.tp_size * layout.dp_size) % layout.ep_size == 0
    assert any(candidate.layout.ep_size == 4 for candidate in found.ranked)


def test_what_some_micro_batch_and_engine_fit_is_not_refused():
    """72B in four stages: stage 0 trains on most, stage 3 has most beside vLLM."""
    model = hf("Qwen2.5-72B")
    run = config(batch={"max_tokens_per_microbatch": 32768})
    search = Search(model, Shape.of(model), run, H200, WORKLOAD, Efficiency())
    engines = search.rollout_sizes(64)
    for tp, pp, recompute in ((4, 4, "none"), (8, 2, "none"), (2, 8, "full"), (1, 8, "none")):
        cut = layout(tp=tp, pp=pp, dp=64 // (tp * pp), recompute=recompute)
        every = [
            search.candidate(dataclasses.replace(cut, rollout_tp_size=size), budget)
            for size in engines
            for budget in search.budgets()
        ]
        fitting = [one for one in every if not one.refusal(H200)]
        best = search.best(cut, engines)
        assert bool(fitting) == (best.refusal(H200) is None)
        if fitting:
            assert best.times.total_s == min(one.times.total_s for one in fitting)
    fits = search.best(layout(tp=4, pp=4, dp=4), engines)
    assert fits.refusal(H200) is None and fits.max_tokens_per_microbatch < 32768


def test_an_engines_buffers_are_there_while_training():
    """Where they fit beside smaller micro-batches alone, those are taken."""
    model, run = hf("Qwen2.5-7B"), config(rollout={"memory_fraction": 0.1})

    def search_on(gpu):
        return Search(model, Shape.of(model), run, gpu, WORKLOAD, Efficiency())

    cut, budget = layout(dp=8), 16384
    needed = search_on(H200).candidate(cut, budget).memory.training
    tight = dataclasses.replace(H200, memory_bytes=needed + 100 * 2**20)
    search = search_on(tight)
    # One GPU's share is less than the weights; of two, the buffers do not fit beside this budget.
    assert "KV cache" in search.candidate(cut, budget).refusal(tight).reason
    two = search.candidate(dataclasses.replace(cut, rollout_tp_size=2), budget)
    assert "while training" in two.refusal(tight).reason
    best = search.best(cut, [1, 2, 4])
    assert best.refusal(tight) is None
    assert best.layout.rollout_tp_size > 1
    assert best.max_tokens_per_microbatch < budget


def test_sequences_are_shared_where_they_do_not_fit_otherwise():
    """131,072 tokens of 72B: two ranks at least share a sequence, and no more than need be."""
    long = {"data": {"max_prompt_tokens": 4096}, "rollout": {"max_response_tokens": 126976}}
    found = planned("Qwen2.5-72B", nodes=8, batch={"max_tokens_per_microbatch": 131072}, **long)
    assert found.ranked
    sizes = {}
    for candidate in found.ranked:
        cut = candidate.layout
        sizes.setdefault((cut.tp_size, cut.pp_size), set()).add(cut.cp_size)
        assert f"parallel.context_parallel_size={cut.cp_size}" in overrides(candidate)
    assert all(len(one) == 1 for one in sizes.values())
    assert max(max(one) for one in sizes.values()) > 1
    assert not any(one.layout.cp_size > 1 for one in planned().ranked)


def test_the_configs_own_context_parallelism_is_tried():
    found = planned(parallel={"context_parallel_size": 2})
    assert {candidate.layout.cp_size for candidate in found.ranked} == {1, 2}
    assert found.current.layout.cp_size == 2


def test_the_first_of_several_nodes_is_the_quickest_of_all():
    """72B on 64 GPUs has to be cut; by hand over layouts, micro-batches and engines."""
    model, sections = hf("Qwen2.5-72B"), {"rollout": {"memory_fraction": 0.6}}
    found = planned("Qwen2.5-72B", nodes=8, **sections)
    search = Search(model, Shape.of(model), config(**sections), H200, WORKLOAD, Efficiency())
    every = [
        search.candidate(
            layout(tp=tp, pp=pp, dp=64 // (tp * pp), recompute=recompute, rollout_tp=engine),
            budget,
        )
        for tp in (2, 4, 8)
        for pp in (2, 4, 8)
        for recompute in ("none", "full")
        for engine in (1, 2, 4, 8)
        for budget in search.budgets()
    ]
    times = [one.times.total_s for one in every if not one.refusal(H200)]
    best = found.ranked[0]
    assert best.layout.pp_size >= 2
    assert best.times.total_s == min(times)


def test_json_is_plain(on_one_node):
    values = to_json(on_one_node, config(), WORKLOAD, Efficiency(), top=2)
    assert len(values["layouts"]) == 2
    first = values["layouts"][0]
    best = on_one_node.ranked[0]
    assert first["times"]["total_s"] == best.times.total_s
    hours = best.times.total_s * config().run.num_steps * 8 / 3600
    assert first["gpu_hours"] == pytest.approx(hours)
    assert first["memory_bytes"]["training"] == best.memory.training
    assert values["current"]["layout"]["dp_size"] == 8


def test_the_configs_own_virtual_and_unequal_stages_are_shown():
    """Beside equal ones, which are ranked as if the config had none."""
    plain = planned(nodes=2, parallel=parallel_of(4, 4, sp=True))
    cut = parallel_of(4, 4, sp=True, vpp=2, first=6, last=6)
    found = planned(nodes=2, parallel=cut)
    assert found.ranked == plain.ranked and not found.current_refusal
    own = found.current.layout
    assert (own.vpp_size, own.first_layers, own.last_layers) == (2, 6, 6)
    run = config(parallel=cut)
    assert Layout.of(run, world_size=16) == own
    names = ["virtual_pipeline_model_parallel_size"]
    names += [f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last")]
    assert {f"parallel.{name}={cut[name]}" for name in names} <= set(overrides(found.current))
    values = to_json(found, run, WORKLOAD, Efficiency(), top=1)
    assert values["leave_out"] == [f"parallel.{name}" for name in names[1:]]
    given = overrides(found.ranked[0])
    assert not any(name in override for name in names[1:] for override in given)
    with_wrong = planned(parallel=parallel_of(1, 2, last=13, vpp=2))
    assert with_wrong.current is None
    named = r"\bparallel\.virtual_pipeline_model_parallel_size\W+2\b.*\b15\b"
    assert re.search(named, with_wrong.current_refusal)


def test_overrides_are_the_candidates_settings(tmp_path):
    """They take virtual stages back: what is ranked has none, whatever the config has."""
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config(parallel=parallel_of(1, 4, vpp=7))))
    found = planned(run=load_config(file))
    assert found.current.layout.vpp_size == 7
    assert leave_out(load_config(file)) == []
    for candidate in found.ranked[0], found.ranked[-1]:
        run = load_config(file, overrides(candidate))
        assert Layout.of(run, world_size=8) == candidate.layout
        assert run.batch.max_tokens_per_microbatch == candidate.max_tokens_per_microbatch


def test_nodes_must_be_positive():
    with pytest.raises(ConfigError, match=r"\bnodes\W+0\b"):
        planned(nodes=0)


# --- scale ---------------------------------------------------------------------------------------


def test_the_planner_keeps_little_memory():
    tracemalloc.start()
    try:
        planned("Qwen2.5-7B", nodes=128)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200 * 2**20
