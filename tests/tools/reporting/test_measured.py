"""A run's measured steps are read as its files say; of restarts, the newest start's."""

import json

import pytest

from gapo_megatron.errors import ConfigError
from gapo_megatron.io.toml_tree import to_toml
from gapo_tools.planner.flops import Shape
from gapo_tools.planner.workload import survival
from gapo_tools.reporting.measured import STAGES, read_measured
from tests.formats.test_convert_models import CONFIGS
from tests.messages import mentions
from tests.scaling_setup import config, hf, write_model

SMALL = CONFIGS["Qwen2.5-1.5B"]


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


def measured(folder, rows, **options):
    """The measured steps of such a run of a small model."""
    write_model(folder / "model", SMALL)
    write_run(folder / "run", rows=rows, hf_dir=folder / "model", **options)
    return read_measured(folder / "run", mean_prompt_tokens=80.0, name="run")


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
    one = measured(tmp_path, rows, ranks=4)
    assert one.stages == dict(zip(STAGES, (8.0, 0.5, 1.0, 5.0, 0.25), strict=True))
    assert one.step_s == sum(one.stages.values()) + 0.125 + 0.25
    assert one.other_s == 0.125 + 0.25
    assert one.num_prompts == 256
    assert one.tokens_per_s == pytest.approx(256 * 8 * 600 / one.step_s)
    assert (one.num_training, one.num_generation) == (4, 0)
    assert one.shape == Shape.of(hf("Qwen2.5-1.5B"))
    workload = one.workload
    assert (workload.mean_prompt_tokens, workload.mean_response_tokens) == (80.0, 600.0)
    assert workload.longest_response_tokens == 3092
    assert workload.active_share == 0.75
    assert workload.clipped_share == pytest.approx(0.2)  # 0.6 of 0.75 went back
    assert survival(workload)[1][-1] == pytest.approx(0.05, abs=0.003)


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
    one = measured(tmp_path, rows, ranks=6, rollout=rollout, objective=objective)
    assert (one.num_training, one.num_generation) == (4, 2)
    assert one.stages == dict(zip(STAGES, (8.0, 0.5, 1.0, 5.0, 0.5), strict=True))
    assert one.step_s == 126.0 - 100.0 - 15.5 == 10.5
    assert one.other_s == 0.0  # both sides work at the same time


def test_a_run_with_dynamic_sampling_is_read_as_its_rounds(tmp_path):
    """Half of the groups are informative; one further round: 1.5 times as many, 3/4 of them."""
    metrics, timings = a_step()
    metrics |= {"rollout/replaced_group_share": 1 - 1 / 1.5}
    one = measured(tmp_path, [(metrics, timings)] * 3)
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
    one = measured(tmp_path, [(metrics, timings)] * 3, **sections)
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
    one = measured(tmp_path, steps)
    assert (one.step_s, one.stages["generation"], one.other_s) == (5.25, 5, 0.5)
    assert one.tokens_per_s == pytest.approx(1000 / 1.5)  # of 667, 2286 and 167


def test_steps_and_ranks_are_those_of_the_newest_start(tmp_path):
    """A start begins cold: of more than two steps the first two do not count."""
    run = tmp_path / "run"
    # Two steps on 8 ranks, then five on 4: two to warm up, three of twice the time.
    measured(tmp_path, [a_step(1)] * 2 + [a_step(30)] * 2 + [a_step(2)] * 3, ranks=8)
    first, *steps = (run / "timings.jsonl").read_text().splitlines(keepends=True)

    def generation_of(*parts):
        (run / "timings.jsonl").write_text("".join([first, *steps[:2], *parts]))
        one = read_measured(run, mean_prompt_tokens=80.0, name="run")
        return one.num_training, one.stages["generation"]

    moved = json.dumps({"step": 2, "startup/vllm_s": 9.0, "perf/world_size": 4}) + "\n"
    assert generation_of() == (8, 8)
    assert generation_of(moved) == (8, 8)  # under way, but no step yet
    assert generation_of(moved, *steps[2:3]) == (4, 240)
    assert generation_of(moved, *steps[2:], '{"step": 7, "time/rol') == (4, 16)
    # Nothing else in a folder tells the ranks.
    (run / "timings.jsonl").write_text("".join([first.replace("world_size", "size"), *steps]))
    with pytest.raises(ConfigError, match=mentions(run, "timings.jsonl", "perf/world_size")):
        read_measured(run, mean_prompt_tokens=80.0, name="run")


def test_what_cannot_be_measured_is_named(tmp_path):
    parallel = {"tensor_model_parallel_size": 2}
    with pytest.raises(ConfigError, match=mentions("/run", "world size", 1, *parallel)):
        measured(tmp_path, [a_step()], parallel=parallel)
    with pytest.raises(ConfigError, match=mentions(tmp_path, "config.toml")):
        read_measured(tmp_path, mean_prompt_tokens=1.0, name="run")
    with pytest.raises(ConfigError, match=mentions(tmp_path / "run", "timed")):
        measured(tmp_path, [])
