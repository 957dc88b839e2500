"""The fit finds what made the timings; files and runs come back as they were written."""

import dataclasses
import json
import math
import os
import random
import re

import pytest
from transformers import AutoConfig

from gapo_megatron.config import load_config
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.io.toml_tree import to_toml
from gapo_megatron.ops.plan.calibration import (
    Calibration,
    fit,
    read_calibration,
    worst_misses,
    write_calibration,
)
from gapo_megatron.ops.plan.flops import Shape
from gapo_megatron.ops.plan.hardware import GPUS, Efficiency, Gpu
from gapo_megatron.ops.plan.layout import Layout
from gapo_megatron.ops.plan.observation import STAGES, Observation, read_observation, seconds
from gapo_megatron.ops.plan.times import SidesTime, StepTime
from gapo_megatron.ops.plan.trial import (
    default_sizes,
    mean_prompt_tokens,
    run_trials,
    trial_command,
)
from gapo_megatron.ops.plan.workload import Workload, default_workload
from tests.hf.test_convert_models import CONFIGS
from tests.messages import mentions
from tests.scaling_setup import config, hf, layout, write_model

SMALL = CONFIGS["Qwen2.5-1.5B"]

TRUE = Efficiency(
    matmul=0.61,
    bandwidth=0.55,
    layer_s=3e-4,
    update_s=0.02,
    decode_step_s=0.011,
    decode_sequence_s=6e-5,
    verdict_s=0.02,
    tensor_s=2e-3,
)
# What this package's one CPU device looked like, in round numbers.
CPU = Gpu(
    name="cpu",
    memory_bytes=24 * 2**30,
    bf16_flops=4e11,
    fp8_flops=4e11,
    fp32_flops=1.5e11,
    bandwidth=1.2e10,
    link_bandwidth=6e9,
    network_bandwidth=6e9,
    host_bandwidth=6e9,
    compute_capability=0.0,
    gpus_per_node=1,
)


def observe(efficiency, *, noise=0.0, seed=0, prompts=256, mean=700, model="Qwen2.5-7B"):
    """An observation whose stages are the model's own, each off by a random share."""
    rng = random.Random(seed)
    empty = StepTime(*[0.0] * len(STAGES))
    one = Observation(
        name=f"{prompts} prompts",
        shape=Shape.of(hf(model)),
        config=config(batch={"rollout_prompts": prompts, "minibatch_prompts": prompts // 4}),
        layout=layout(dp=8),
        workload=Workload(100, mean, 3092, active_share=0.7),
        measured=empty,
        step_s=0.0,
        other_s=0.0,
        num_prompts=prompts,
        num_tokens=8.0 * prompts * mean,
        tokens_per_s=0.0,
    )
    exact = one.predict(GPUS["h200"], efficiency)
    noisy = StepTime(
        **{f"{stage}_s": seconds(exact, stage) * math.exp(rng.gauss(0, noise)) for stage in STAGES}
    )
    return dataclasses.replace(one, measured=noisy, step_s=noisy.total_s)


def test_the_fit_finds_what_made_the_timings():
    sizes = [
        observe(TRUE, prompts=prompts, mean=mean, model=model, noise=0.01, seed=seed)
        for seed, (prompts, mean, model) in enumerate(
            [
                (256, 700, "Qwen2.5-7B"),
                (32, 300, "Qwen2.5-7B"),
                (256, 1400, "Qwen2.5-1.5B"),
                (16, 200, "Qwen2.5-1.5B"),
            ]
        )
    ]
    found = fit(sizes, GPUS["h200"]).efficiency
    for name in ("matmul", "decode_step_s", "verdict_s", "tensor_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.15), name
    # Nothing was sent between devices by link alone in one node of data parallel ranks.
    assert found.communication == pytest.approx(Efficiency().communication, rel=0.5)


def test_two_sizes_predict_a_third():
    """With timings 3 % off at random. The assumed efficiencies would miss by half."""
    fitted = [observe(TRUE, prompts=256, noise=0.03), observe(TRUE, prompts=64, noise=0.03, seed=1)]
    third = observe(TRUE, prompts=128, mean=1000, noise=0.03, seed=2)
    found = fit(fitted, GPUS["h200"])
    assert worst_misses([third], GPUS["h200"], found.efficiency)["total"] < 0.1
    assert max(found.worst.values()) < 0.1
    assert worst_misses([third], GPUS["h200"], Efficiency())["total"] > 0.2


def test_what_nothing_measures_keeps_its_default():
    alone = observe(TRUE)
    only_reward = dataclasses.replace(alone.measured, generation_s=0.0, update_s=0.0)
    only_reward = dataclasses.replace(only_reward, old_log_probs_s=0.0, sync_s=0.0)
    calibration = fit([dataclasses.replace(alone, measured=only_reward)], GPUS["h200"])
    found = calibration.efficiency
    assert calibration.measured == ["verdict_s"]
    assert found.verdict_s == pytest.approx(TRUE.verdict_s, rel=0.01)
    default = Efficiency()
    for field in dataclasses.fields(default):
        if field.name != "verdict_s":
            name = field.name
            assert getattr(found, name) == pytest.approx(getattr(default, name), rel=1e-3), name


def test_shares_stay_below_one():
    fast = dataclasses.replace(observe(TRUE), measured=StepTime(*[1e-3] * len(STAGES)))
    found = fit([fast], GPUS["h200"]).efficiency
    assert 0 < found.matmul <= 1


# Medians of 198 steps each of the miniature study (docs/study.md), on two shared cores: generation,
# reward, old log-probs, update, sync; mean response, shares skipped of forward and head's backward.
STUDY = {
    "f_gspo-seed_0": ((0.811, 0.057, 0.234, 1.021, 0.202), (12.171, 0.091, 0.295)),
    "gapo-seed_0": ((0.505, 0.024, 0.153, 0.580, 0.131), (12.171, 0.092, 0.303)),
    "gapo-seed_1": ((0.491, 0.024, 0.145, 0.547, 0.126), (12.157, 0.084, 0.304)),
    "gapo-seed_2": ((0.562, 0.027, 0.163, 0.647, 0.147), (12.167, 0.080, 0.291)),
    "gspo-seed_0": ((0.751, 0.047, 0.229, 0.932, 0.193), (12.169, 0.087, 0.318)),
    "gspo-seed_1": ((0.702, 0.043, 0.221, 0.848, 0.177), (12.162, 0.089, 0.323)),
    "gspo-seed_2": ((0.781, 0.056, 0.202, 0.883, 0.191), (12.176, 0.086, 0.304)),
    "gspo_asym-seed_0": ((0.566, 0.028, 0.167, 0.661, 0.145), (12.150, 0.079, 0.279)),
    "gspo_asym-seed_1": ((0.572, 0.033, 0.166, 0.679, 0.156), (12.166, 0.092, 0.296)),
    "gspo_asym-seed_2": ((0.633, 0.034, 0.180, 0.707, 0.142), (12.158, 0.097, 0.299)),
}


def of_the_study(name):
    measured, (response, forward_skipped, head_skipped) = STUDY[name]
    tiny = AutoConfig.for_model(
        "qwen2",
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=16,
        tie_word_embeddings=False,
    )
    one = load_config("configs/miniature.toml")
    active = 1 - forward_skipped
    return Observation(
        name=name,
        shape=Shape.of(tiny),
        config=one,
        layout=Layout.of(one, world_size=1),
        workload=Workload(
            mean_prompt_tokens=10,
            mean_response_tokens=response,
            longest_response_tokens=24,
            active_share=active,
            clipped_share=1 - (1 - head_skipped) / active,
        ),
        measured=StepTime(*measured),
        step_s=sum(measured),
        other_s=0.0,
        num_prompts=one.batch.rollout_prompts,
        num_tokens=0.0,
        tokens_per_s=0.0,
    )


def test_real_runs_predict_each_other():
    """Ten runs of nearly equal work took 1.3 to 2.3 s a step, by what else the machine did."""
    runs = {name: of_the_study(name) for name in STUDY}
    totals = [one.measured.total_s for one in runs.values()]
    assert max(totals) / min(totals) > 1.7
    found = fit([one for name, one in runs.items() if name.endswith("seed_0")], CPU)
    others = [one for name, one in runs.items() if not name.endswith("seed_0")]
    misses = sorted(
        abs(one.predict(CPU, found.efficiency).total_s / one.measured.total_s - 1) for one in others
    )
    assert misses[len(misses) // 2] < 0.15
    # Of one and the same load the fit is the geometric mean of what was measured.
    assert found.worst["total"] < 0.5


# --- files ---------------------------------------------------------------------------------------


def test_a_calibration_comes_back(tmp_path):
    written = Calibration(
        GPUS["h20"], TRUE, {"update": 0.04, "total": 0.02}, spread=1.2, clipped_share=0.3
    )
    write_calibration(written, tmp_path / "one.toml")
    assert read_calibration(tmp_path / "one.toml") == written


@pytest.mark.parametrize(
    "text",
    ["", "[gpu", "[gpu]\nname='x'\n[efficiency]\n", "gpu = 3", "a = " + "[" * 5000],
)
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=mentions(path, "tools/plan.py")):
        read_calibration(path)
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        read_calibration(tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("gpu", "name", "3"),
        ("gpu", "gpus_per_node", "8.0"),
        ("gpu", "gpus_per_node", "0"),
        ("gpu", "bandwidth", "0"),
        ("gpu", "bandwidth", "inf"),
        ("gpu", "memory_bytes", "'x'"),
        ("gpu", "colour", "1"),
        ("efficiency", "matmul", "nan"),
        ("efficiency", "matmul", "true"),
        ("efficiency", "layer_s", "[1]"),
        ("worst", "update", "'x'"),
        ("workload", "spread", "-1"),
        ("workload", "clipped_share", "{}"),
    ],
)
def test_a_damaged_value_is_named(tmp_path, section, key, value):
    path = tmp_path / "one.toml"
    write_calibration(Calibration(GPUS["h20"], TRUE, {"update": 0.04}), path)
    text = re.sub(rf"(?m)^{key} = .*\n", "", path.read_text())
    path.write_text(text.replace(f"[{section}]\n", f"[{section}]\n{key} = {value}\n"))
    with pytest.raises(ConfigError, match=mentions(path, key)):
        read_calibration(path)


def write_run(folder, *, rows, hf_dir, ranks=1, **sections):
    """What a run leaves, of the steps in `rows`: (metrics, timings)."""
    folder.mkdir(parents=True, exist_ok=True)
    model = {"hf_dir": str(hf_dir), "precision": "fp32"} | sections.pop("model", {})
    one = config(model=model, **sections)
    (folder / "config.toml").write_text(to_toml(one))
    with open(folder / "metrics.jsonl", "w") as metrics, open(folder / "timings.jsonl", "w") as t:
        t.write(json.dumps({"step": 0, "startup/vllm_s": 9.0, "perf/world_size": ranks}) + "\n")
        metrics.write(json.dumps({"step": 0, "eval/pass@1": 0.5}) + "\n")
        for step, (values, timings) in enumerate(rows):
            metrics.write(json.dumps({"step": step, **values}) + "\n")
            t.write(json.dumps({"step": step, **timings}) + "\n")


def observed(folder, rows, **options):
    """The observation of such a run of a small model."""
    write_model(folder / "model", SMALL)
    write_run(folder / "run", rows=rows, hf_dir=folder / "model", **options)
    return read_observation(folder / "run", mean_prompt_tokens=80.0)


def a_step(scale=1.0, *, prompts=256):
    """Of so many prompts, eight responses to each, of 600 tokens."""
    step_s = 8.0 * scale + 131.125
    return (
        {
            "reward/mean": 0.5,
            "rollout/response_length/mean": 600.0,
            "rollout/truncated": 0.05,
            "skip/forward_token_share": 0.25,
            "skip/head_backward_token_share": 0.4,
        },
        {
            "time/rollout_s": 8.0 * scale,
            "time/reward_s": 0.5,
            "time/old_log_probs_s": 1.0,
            "time/update_s": 5.0,
            "time/sync_s": 0.25,
            "time/sleep_s": 0.125,
            "time/evaluate_s": 100.0,
            "time/checkpoint_s": 20.0,
            "time/rounding_s": 4.0,
            # A quarter of a second that no stage counts.
            "time/step_s": step_s,
            "perf/tokens_per_s": prompts * 8 * 600 / step_s,
        },
    )


def test_a_run_is_read_as_it_was(tmp_path):
    """Medians without the first two steps; evaluation is no part of a step."""
    rows = [a_step(50), a_step(5), a_step(1), a_step(1), a_step(9)]
    one = observed(tmp_path, rows, ranks=4)
    assert one.name == "run"
    assert one.measured == StepTime(8.0, 0.5, 1.0, 5.0, 0.25)
    assert one.step_s == one.seconds("total") == one.measured.total_s + 0.125 + 0.25
    assert one.other_s == 0.125 + 0.25
    assert one.num_prompts == 256
    assert one.num_tokens == pytest.approx(256 * 8 * 600)
    assert one.tokens_per_s == pytest.approx(256 * 8 * 600 / one.step_s)
    assert one.layout == Layout.of(one.config, world_size=4)
    assert one.shape == Shape.of(hf("Qwen2.5-1.5B"))
    workload = one.workload
    assert (workload.mean_prompt_tokens, workload.mean_response_tokens) == (80.0, 600.0)
    assert workload.longest_response_tokens == 3092
    assert workload.active_share == 0.75
    assert workload.clipped_share == pytest.approx(0.2)  # 0.6 of 0.75 went back
    assert workload.survival()[1][-1] == pytest.approx(0.05, abs=0.003)


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_run_with_generation_ranks_is_read_by_both_clocks(tmp_path, staleness):
    """Its stages are those of the side that does them; a step is as long as the longer side."""
    metrics, timings = a_step()
    both = {"time/wait_s": 3.0, "time/sync_s": 1.75, "time/step_s": 126.0, "perf/world_size": 6}
    both |= {"generation/rollout_s": 8.0, "generation/reward_s": 0.5, "generation/wait_s": 1.0}
    timings = timings | both | {"perf/generation_ranks": 2}
    for own in ("time/rollout_s", "time/reward_s", "time/sleep_s", "time/rounding_s"):
        del timings[own]
    timings |= {"time/checkpoint_s": 15.5}
    rows = [(metrics, timings | {"generation/sync_s": sync_s}) for sync_s in (0.0, 1.0, 0.0, 1.0)]
    rollout = {"generation_ranks": 2, "max_staleness": staleness}
    objective = {"importance_weight_max": 2.0}
    one = observed(tmp_path, rows, ranks=6, rollout=rollout, objective=objective)
    assert one.layout == Layout.of(one.config, world_size=4, num_generation=2)
    assert one.measured == SidesTime(8.0, 0.5, 1.0, 5.0, 0.5, staleness)
    assert one.step_s == 126.0 - 100.0 - 15.5 == 10.5
    assert one.other_s == 10.5 - one.measured.total_s
    assert isinstance(one.predict(GPUS["h200"], TRUE), SidesTime)


@pytest.mark.parametrize(
    ("of_metrics", "key", "value"),
    [
        (True, "rollout/replaced_group_share", 1.0),
        (True, "rollout/response_length/mean", 1e300),
        (False, "time/step_s", 0.0),
        (False, "time/step_s", -1),
        (False, "perf/tokens_per_s", 1e300),
    ],
)
def test_a_number_that_no_step_has_is_named(tmp_path, of_metrics, key, value):
    metrics, timings = a_step()
    (metrics if of_metrics else timings)[key] = value
    name = "metrics.jsonl" if of_metrics else "timings.jsonl"
    with pytest.raises(DataError, match=mentions(tmp_path / "run" / name, key)):
        observed(tmp_path, [(metrics, timings)] * 3)


def test_a_run_with_dynamic_sampling_is_read_as_its_rounds(tmp_path):
    """Half of the groups are informative; one further round: 1.5 times as many, 3/4 of them."""
    metrics, timings = a_step()
    metrics |= {"rollout/replaced_group_share": 1 - 1 / 1.5}
    one = observed(tmp_path, [(metrics, timings)] * 3)
    assert one.workload.active_share == pytest.approx(0.5)
    assert one.num_prompts == pytest.approx(1.5 * 256)
    batch = one.config.batch.model_copy(update={"dynamic_sampling_rounds": 1})
    assert one.workload.trained_share(batch) == pytest.approx(0.75)
    assert one.workload.clipped_share == pytest.approx(0.2)


def test_rows_that_a_kl_term_keeps_do_not_hide_what_was_replaced(tmp_path):
    """None is skipped; a quarter of those that are trained on has A = 0."""
    metrics, timings = a_step()
    metrics |= {"rollout/replaced_group_share": 1 / 3, "groups/zero_advantage_share": 0.25}
    metrics |= {"skip/forward_token_share": 0.0, "skip/head_backward_token_share": 0.0}
    sections = {"objective": {"kl_coef": 0.01}, "batch": {"dynamic_sampling_rounds": 1}}
    one = observed(tmp_path, [(metrics, timings)] * 3, **sections)
    assert one.workload.active_share == pytest.approx(0.5)
    assert one.workload.clipped_share == 0.0
    assert one.num_prompts == pytest.approx(384)


def test_medians_are_of_the_steps_themselves(tmp_path):
    """Tokens a second of each step, not mean tokens over a median step; `other` likewise."""
    steps = [a_step(), a_step()]
    # Seconds of generation, tokens, what no stage counts: each time another one is the largest.
    for generation_s, tokens, other_s in ((1, 1000, 0.5), (5, 12000, 0.25), (9, 2000, 3.0)):
        metrics, _ = a_step()
        step_s = generation_s + other_s
        timings = {"time/rollout_s": generation_s, "time/step_s": step_s}
        steps.append((metrics, timings | {"perf/tokens_per_s": tokens / step_s}))
    one = observed(tmp_path, steps)
    assert (one.step_s, one.measured.generation_s, one.other_s) == (5.25, 5, 0.5)
    assert one.tokens_per_s == pytest.approx(1000 / 1.5)  # of 667, 2286 and 167
    assert one.num_tokens == pytest.approx(5000)


def started(step, **values):
    return json.dumps({"step": step, "startup/vllm_s": 9.0, **values}) + "\n"


def test_steps_and_ranks_are_those_of_the_newest_start(tmp_path):
    """A start begins cold; one that has not got far leaves it to that before, of as many ranks."""
    run = tmp_path / "run"
    # Two on 8 ranks, then ten on 4: two to warm up, three of 2 s, and after a restart five more.
    rows = [a_step(1)] * 2 + [a_step(30)] * 2 + [a_step(2)] * 3 + [a_step(40)] * 2 + [a_step(3)] * 3
    observed(tmp_path, rows, ranks=8)
    first, *steps = (run / "timings.jsonl").read_text().splitlines(keepends=True)
    moved = started(2, **{"perf/world_size": 4})
    again = started(7, **{"perf/world_size": 4})

    def generation_of(*parts):
        (run / "timings.jsonl").write_text("".join([first, *steps[:2], *parts]))
        one = read_observation(run, mean_prompt_tokens=80.0)
        return one.layout.world_size, one.measured.generation_s

    assert generation_of() == (8, 8)
    assert generation_of(moved) == (8, 8)  # under way, but no step yet
    assert generation_of(moved, *steps[2:7]) == (4, 16)
    assert generation_of(moved, *steps[2:7], again, *steps[7:9]) == (4, 16)
    assert generation_of(moved, *steps[2:7], again, *steps[7:]) == (4, 24)
    # Of fewer ranks than before it is all that there is.
    assert generation_of(*steps[2:7], again, *steps[7:8]) == (4, 320)
    assert read_observation(run, mean_prompt_tokens=80.0, world_size=2).layout.world_size == 2


def test_ranks_that_no_start_tells_are_counted_in_the_newest_logs(tmp_path):
    run = tmp_path / "run"
    observed(tmp_path, [a_step()] * 4)
    _, *steps = (run / "timings.jsonl").read_text().splitlines(keepends=True)
    (run / "timings.jsonl").write_text("".join([started(0), *steps]))
    with pytest.raises(ConfigError, match=mentions(run, "timings.jsonl", "--processes")):
        read_observation(run, mean_prompt_tokens=80.0)
    attempts = (("7.0", 2, "x"), ("7.1", 4, "x"), ("8.0", 1, ""))
    for place, (attempt, ranks, text) in enumerate(attempts):
        folder = run / "attempts" / attempt
        folder.mkdir(parents=True)
        for rank in range(ranks):
            log = folder / f"rank_{rank}.log"
            log.write_text(text)
            os.utime(log, (place, place))
    # The last one has begun: its ranks have not been started yet.
    assert read_observation(run, mean_prompt_tokens=80.0).layout.world_size == 4


def test_a_layout_that_the_ranks_do_not_divide_names_its_run(tmp_path):
    parallel = {"tensor_model_parallel_size": 2}
    with pytest.raises(ConfigError, match=mentions("/run", "world size", 1, *parallel)):
        observed(tmp_path, [a_step()], parallel=parallel)


def test_lines_in_the_making_and_values_that_were_not_finite(tmp_path):
    run = tmp_path / "run"
    metrics, timings = a_step()
    metrics |= {"rollout/truncated": None}
    rows = [(metrics, timings)] * 4 + [(metrics, timings | {"time/step_s": None})]
    whole = observed(tmp_path, rows)
    assert whole.measured.generation_s == 8.0
    for name in ("metrics.jsonl", "timings.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 5, "time/rol')
    assert read_observation(run, mean_prompt_tokens=80.0) == whole
    with (run / "timings.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(DataError, match=r"timings\.jsonl:7\b"):
        read_observation(run, mean_prompt_tokens=80.0)


def test_a_run_that_the_device_cannot_hold_is_not_fitted():
    small = dataclasses.replace(GPUS["h200"], memory_bytes=2**30)
    with pytest.raises(ConfigError, match=mentions(256, "h200")):
        fit([observe(TRUE)], small)


def test_lengths_of_the_runs_are_kept():
    one = observe(TRUE)
    lengths = dataclasses.replace(one.workload, spread=1.1, clipped_share=0.4)
    found = fit([dataclasses.replace(one, workload=lengths)], GPUS["h200"])
    assert (found.spread, found.clipped_share) == (1.1, 0.4)


def test_the_exported_model_stands_in_for_one_that_moved(tmp_path):
    write_run(tmp_path / "run", rows=[a_step()], hf_dir=tmp_path / "gone")
    with pytest.raises(
        ConfigError, match=mentions("config.json", "model.hf_dir", tmp_path / "gone")
    ):
        read_observation(tmp_path / "run", mean_prompt_tokens=80.0)
    write_model(tmp_path / "run" / "hf", SMALL)
    assert read_observation(tmp_path / "run", mean_prompt_tokens=80.0).measured.sync_s == 0.25


@pytest.mark.parametrize(
    ("sections", "override", "words"),
    [
        (
            {"batch": {"oversampling": 1.5}},
            "batch.oversampling=1.5",
            r"batch\.oversampling\W+1\.5\b",
        ),
        ({"rollout": {"draft": "ngram"}}, "rollout.draft=ngram", r"rollout\.draft\W+ngram\b"),
    ],
)
def test_what_no_equation_knows_is_measured_but_neither_fitted_nor_planned(
    tmp_path, monkeypatch, sections, override, words
):
    """How much shorter over-sampling makes the tail, and how many draft tokens are accepted."""
    one = observed(tmp_path, [a_step()], **sections)
    assert not one.can_be_predicted
    assert one.measured.generation_s == 8.0
    for refused in (
        lambda: fit([observe(TRUE), one], GPUS["h200"]),
        lambda: worst_misses([one], GPUS["h200"], TRUE),
    ):
        with pytest.raises(ConfigError, match=rf"^run\b.*{words}"):
            refused()
    with pytest.raises(ConfigError, match=words):
        default_workload(config(**sections))
    # Before anything is trained.
    monkeypatch.setattr("gapo_megatron.ops.plan.trial.subprocess.run", None)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config()))
    options = {"scratch": tmp_path, "num_steps": 3, "world_size": 1, "prompt_tokens": 80.0}
    with pytest.raises(ConfigError, match=words):
        run_trials(str(path), [], sizes=[[], [override]], **options)


def test_folders_without_steps_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=mentions(tmp_path, "config.toml")):
        read_observation(tmp_path, mean_prompt_tokens=1.0)
    with pytest.raises(ConfigError, match=mentions(tmp_path / "run", "timed")):
        observed(tmp_path, [])


# --- trial runs ----------------------------------------------------------------------------------


def test_a_trial_run_sends_nothing(tmp_path):
    command = trial_command(
        "a.toml", ["run.seed=1"], output_dir=tmp_path, num_steps=5, world_size=1
    )
    assert command[1:5] == ["-m", "gapo_megatron.ops.plan.trial", "a.toml", "run.seed=1"]
    assert command[-2:] == ["run.num_steps=5", f"run.output_dir={tmp_path}"]
    assert "evaluation.every_steps=0" in command
    # Whatever the config says. (That nothing is kept either: tests/run/test_train.py.)
    loud = {"wandb_project": "x"}
    path = tmp_path / "loud.toml"
    path.write_text(to_toml(config(metrics=loud, checkpoint={"branch_from": "x"})))
    quiet = load_config(path, [word for word in command[4:] if "=" in word])
    assert quiet.metrics.wandb_project == quiet.checkpoint.branch_from == ""
    many = trial_command("a.toml", [], output_dir=tmp_path, num_steps=5, world_size=8)
    assert many[2:6] == ["torch.distributed.run", "--standalone", "--nproc-per-node=8", "-m"]


def test_sizes_of_a_trial_are_two_loads():
    assert default_sizes(config()) == [
        [],
        ["batch.rollout_prompts=128", "batch.minibatch_prompts=32"],
    ]
    odd = config(batch={"rollout_prompts": 9, "minibatch_prompts": 3})
    assert default_sizes(odd) == [[], ["rollout.max_response_tokens=1546"]]


def test_prompts_cannot_be_counted_without_data():
    with pytest.raises(
        ConfigError, match=mentions("data.train_path", "/nowhere.jsonl", "--mean-prompt-tokens")
    ):
        mean_prompt_tokens(config())
