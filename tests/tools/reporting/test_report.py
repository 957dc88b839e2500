"""What a report reads, which runs it takes together, and the numbers it makes of them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from gapo_megatron.errors import DataError
from gapo_tools.reporting.arms import Comparison
from gapo_tools.reporting.runs import find_trained, read_run
from gapo_tools.reporting.series import (
    NoData,
    curve_rows,
    final,
    interval,
    pass_keys,
    per_c,
    window_of,
    windowed,
)
from tests.messages import mentions
from tests.report_setup import NUM_STEPS, compare, pass_at, write_run


def labels(comparison):
    return [arm.label for arm in comparison.arms]


def test_a_run_is_read_from_its_folder(tmp_path):
    run = read_run(write_run(tmp_path / "run", seed=2))
    assert (run.method.name, run.k, run.seed, run.num_steps) == ("gapo", 8, 2, NUM_STEPS)
    expected = {step: pass_at("gapo", 2, step)[0] for step in (0, 20, 40)}
    assert run.series("eval/pass@1") == pytest.approx(expected)
    # 40 steps of 0.75 s and a start of 36 s.
    assert run.hours == pytest.approx(66 / 3600)
    assert run.series("loss/policy") == {}  # null
    assert run.keys(r"per_c/groups/c\d+")[-1] == "per_c/groups/c8"


def test_runs_under_way_are_read_as_far_as_they_are(tmp_path):
    """One with no more than its first evaluation waits, or no step would be common to all seeds."""
    folder = write_run(tmp_path / "a", num_steps=7)
    waiting = write_run(tmp_path / "b", seed=1, num_steps=0)
    for run, step in ((folder, 7), (waiting, 0)):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {step}, "reward/mean": 0.5')  # being written
    assert find_trained([tmp_path]) == ([folder], [waiting])
    run = read_run(folder)
    assert run.num_steps == 7 and max(run.series("reward/mean")) == 6


def test_what_is_no_run_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=mentions(tmp_path / "empty", "config.toml", "no run")):
        find_trained([tmp_path / "empty"])
    with pytest.raises(DataError, match=mentions(tmp_path / "gone", "no such")):
        find_trained([tmp_path / "gone"])
    queued = tmp_path / "queued"
    (queued / "code").mkdir(parents=True)
    with pytest.raises(DataError, match=mentions(queued, "metrics.jsonl", "step")):
        find_trained([queued])
    run = write_run(tmp_path / "run")
    (run / "config.toml").unlink()
    with pytest.raises(DataError, match=mentions(run, "config.toml", "seed")):
        read_run(run)


def test_a_study_is_the_runs_in_its_folder_and_none_counts_twice(tmp_path):
    first, second = (write_run(tmp_path / f"run_{seed}", seed=seed) for seed in (0, 1))
    (tmp_path / "waiting" / "code").mkdir(parents=True)
    (tmp_path / "report").mkdir()
    found = find_trained([second, tmp_path, first])
    assert found == ([second, first], [tmp_path / "waiting"])


BRANCH = ("run", "step", "changes")
"""What a branch's file must hold."""


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "metrics.jsonl",
            '{"step": 0, "reward/mean": "x"}\n',
            ("metrics.jsonl:1", "reward/mean", "'x'"),
        ),
        ("metrics.jsonl", '{"step": 0}\n{"reward/mean": 1}\n', ("metrics.jsonl:2",)),
        ("branch.json", "{", ("JSON",)),
        ("branch.json", "[]", BRANCH),
        ("branch.json", '{"run": "/a", "step": "6", "changes": {}}', BRANCH),
        ("branch.json", '{"run": "/a", "step": 6, "changes": {"k": 1}}', BRANCH),
    ],
)
def test_damage_is_named(tmp_path, name, text, words):
    folder = write_run(tmp_path / "run")
    (folder / name).write_text(text)
    with pytest.raises(DataError, match=mentions(folder / name, *words)):
        read_run(folder)


def test_a_run_has_one_k(tmp_path):
    folder = write_run(tmp_path / "run")
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace("prompt = 8\n", "prompt = 16\n"))
    named = mentions(folder, "metrics.jsonl", "batch.rollouts_per_prompt", 8, 16)
    with pytest.raises(DataError, match=named):
        read_run(folder)


def test_runs_that_differ_in_the_seed_alone_are_one_arm(tmp_path):
    """Also where the model and the data lie inside the run folder, as the demo's do."""
    folders = []
    for seed in (1, 0):
        folder = tmp_path / f"seed_{seed}"
        inside = (f"model.hf_dir={folder}/base", f"data.train_path={folder}/train.jsonl")
        folders.append(write_run(folder, *inside, "parallel.timeout_s=2000", seed=seed))
    comparison = compare(*folders)
    assert [arm.seeds for arm in comparison.arms] == [[0, 1]]
    other = write_run(tmp_path / "other", "model.hf_dir=/models/large", seed=2)
    assert len(compare(*folders, other).arms) == 2


SLOWER = (
    *("batch.max_tokens_per_microbatch=8192", "checkpoint.every_steps=7", "reward.num_workers=1"),
    *("evaluation.every_steps=10", "metrics.tensorboard=false", "model.recompute=full"),
    *("model.head=torch", "parallel.timeout_s=2000", "reward.sandbox=unsafe", "reward.python=py"),
    *("rollout.cpu_kv_cache_gib=2", "rollout.enforce_eager=false", "rollout.verify_bound=0.1"),
    *("rollout.memory_fraction=0.4", "rollout.tensor_parallel_size=2", "run.stop_margin_s=60"),
    "optimizer.offload=optimizer",
)
"""Where and how fast a run computes, and how often it reports."""


@pytest.mark.parametrize(
    ("usual", "unusual", "label"),
    [
        ([], ["batch.rollouts_per_prompt=4"], "gapo k=4"),
        ([], ["objective.eps_high_max=0.03"], "gapo eps_high_max=0.03"),
        ([], ["optimizer.learning_rate=1e-6"], "gapo learning_rate=1e-06"),
        ([], ["objective.kl_coef=0.1"], "gapo kl_coef=0.1"),
        ([], ["rollout.temperature=0.6"], "gapo temperature=0.6"),
        ([], ["data.train_path=other.jsonl"], "gapo train_path=other.jsonl"),
        (["reward.timeout_s=5"], [], "gapo timeout_s=None"),  # what a run goes without
        (["objective.aggregation=token_mean"], [], ""),  # a default that is spelled out
        (["objective.routing_replay=trainer"], [], ""),
        ([], ["objective.old_log_probs=rollout"], "gapo old_log_probs=rollout"),
        ([], SLOWER, ""),
    ],
)
def test_an_arm_is_called_by_what_is_unusual_about_it(tmp_path, usual, unusual, label):
    """Where nothing is, the runs are one arm."""
    folders = [write_run(tmp_path / "a", *usual), write_run(tmp_path / "b", *unusual, seed=1)]
    assert labels(compare(*folders)) == ["gapo", label][: 1 + bool(label)]


def test_labels_are_short_and_differ(tmp_path):
    long = "x" * 100
    changed = [
        [f"data.train_path=data/{first}/{long}/{last}.jsonl", f"data.eval_path=data/{long}.jsonl"]
        for first, last in (("a", "a"), ("a", "b"), (f"{long}/y", "a"), (f"{long}/z", "a"))
    ]
    folders = [write_run(tmp_path / str(n), *given) for n, given in enumerate(changed)]
    found = labels(compare(*folders))
    assert len(set(found)) == 4 and max(map(len, found)) < 90


def test_methods_that_differ_in_more_than_their_objective_say_so(tmp_path):
    """Alone of its method, and yet not as the others: a gain may be that of its learning rate."""
    folders = [
        write_run(tmp_path / "a", "optimizer.learning_rate=1e-6"),
        write_run(
            tmp_path / "b",
            "optimizer.learning_rate=1e-3",
            "batch.rollouts_per_prompt=4",
            method="gspo_asym",
        ),
    ]
    assert labels(compare(*folders)) == ["gapo", "gspo_asym k=4 learning_rate=0.001"]
    widths = write_run(tmp_path / "c", "optimizer.learning_rate=1e-6", method="dr_grpo")
    assert labels(compare(folders[0], widths)) == ["gapo", "dr_grpo"]  # clips are a method's own


def test_prompts_that_go_with_k_are_not_named(tmp_path):
    usual = [write_run(tmp_path / f"a_{seed}", seed=seed) for seed in (0, 1)]
    sizes = ("batch.rollout_prompts=16", "batch.minibatch_prompts=4")
    with_k = write_run(tmp_path / "b", "batch.rollouts_per_prompt=4", *sizes)
    assert labels(compare(*usual, with_k)) == ["gapo", "gapo k=4"]
    same_k = write_run(tmp_path / "c", "batch.rollouts_per_prompt=4")
    assert labels(compare(*usual, with_k, same_k)) == [
        "gapo",
        "gapo k=4",
        "gapo k=4 minibatch_prompts=4 rollout_prompts=16",
    ]
    alone = write_run(tmp_path / "d", *sizes)
    assert labels(compare(*usual, alone))[1] == "gapo minibatch_prompts=4 rollout_prompts=16"


def test_a_seed_counts_once(tmp_path):
    folders = [write_run(tmp_path / name, seed=3) for name in ("a", "b")]
    with pytest.raises(DataError, match=mentions(*folders, "gapo", "run.seed", 3)):
        compare(*folders)


def _star(tmp_path):
    """Two methods; around the first k and the clip vary. The unusual is named first."""
    small = "batch.rollouts_per_prompt=4"
    return [
        write_run(tmp_path / "1", "objective.eps_high_max=0.03"),
        write_run(tmp_path / "2", small),
        write_run(tmp_path / "3"),
        write_run(tmp_path / "4", method="gspo_asym"),
        write_run(tmp_path / "5", small, method="gspo_asym"),
        write_run(tmp_path / "6", small, "objective.eps_high_max=0.03"),
        write_run(tmp_path / "7", seed=1),
        write_run(tmp_path / "8", method="gspo_asym", seed=1),
    ]


def test_a_methods_usual_settings_come_first_unless_others_are_named(tmp_path):
    runs = [read_run(folder) for folder in _star(tmp_path)]
    assert labels(Comparison.of(runs)) == [
        "gapo",
        "gapo eps_high_max=0.03",
        "gapo k=4",
        "gapo k=4 eps_high_max=0.03",
        "gspo_asym",
        "gspo_asym k=4",
    ]
    led = Comparison.of(runs, first="gspo_asym")
    assert (led.first.label, labels(led)[:3]) == (
        "gspo_asym",
        ["gspo_asym", "gapo", "gapo eps_high_max=0.03"],
    )
    with pytest.raises(DataError, match=mentions("'grpo'", "gapo", "gspo_asym")):
        Comparison.of(runs, first="grpo")


def test_branches_and_resumes_with_other_settings_are_arms_of_their_own(tmp_path):
    """Named after all of their parts, and apart from runs that began with the last settings."""
    folders = [write_run(tmp_path / "whole")]
    for seed in (0, 1):
        for method in ("gapo", "gspo_asym"):
            folder = write_run(tmp_path / f"{method}_{seed}", method=method, seed=seed)
            changed = {"objective.method": ["gspo_asym", method]} if method == "gapo" else {}
            branch = {"run": f"/runs/{seed}", "step": 6}
            branch |= {"changes": changed | {"run.num_steps": [6, 40]}}
            (folder / "branch.json").write_text(json.dumps(branch))
            folders.append(folder)
    resumed = write_run(tmp_path / "resumed")
    changes = {"objective.method": ["gspo", "gapo"], "optimizer.learning_rate": [1e-6, 1e-5]}
    (resumed / "changes.json").write_text(json.dumps([{"step": 3, "changes": changes}]))
    comparison = compare(*folders, resumed)
    assert [(arm.label, len(arm.runs)) for arm in comparison.arms] == [
        ("gapo", 1),
        ("gspo_asym to 6, gapo", 2),
        ("gspo_asym to 6, gspo_asym", 2),
        ("gspo learning_rate=1e-06 to 3, gapo", 1),
    ]


def test_windowed_means_weigh_and_skip_gaps():
    values, weights = {0: 1.0, 2: 5.0, 3: 1.0}, {0: 1.0, 2: 3.0, 3: 1.0}
    found = windowed(values, [0, 1, 2, 3, 6], 3, weights=weights)
    # From the first full one on, windows hold steps {0, 2}, {2, 3} and none: 16 / 4, 16 / 4.
    assert found == {2: 4.0, 3: 4.0}
    assert windowed(values, [0, 3], 4) == {3: pytest.approx(7 / 3)}
    assert windowed({0: 1.0}, [0], 1, weights={0: 0.0}) == {}


def test_seeds_are_averaged_where_all_have_a_value():
    runs = [{0: 1.0, 1: 2.0, 2: 3.0}, {1: 4.0, 2: 7.0, 3: 9.0}]
    rows = curve_rows([SimpleNamespace(label="gapo", runs=runs)], lambda run: run)
    assert [(row["step"], row["mean"]) for row in rows] == [(1, 3.0), (2, 5.0)]
    assert interval([0.2]) == {"mean": 0.2, "low": None, "high": None, "seeds": 1}


def test_the_window_is_a_tenth_of_the_longest_run(tmp_path):
    runs = [read_run(write_run(tmp_path / str(n), num_steps=n)) for n in (5, 40)]
    assert (window_of(runs), window_of(runs[:1])) == (4, 1)


def test_means_without_weights_are_refused(tmp_path):
    folder = write_run(tmp_path / "run")
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text.replace("/sequences/c", "/rollouts/c"))
    with pytest.raises(NoData, match="per_c/correct/sequences"):
        per_c(read_run(folder), "correct/ratio_deviation")


def test_final_values_stand_at_one_step(tmp_path):
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1, num_steps=30)]
    (arm,) = compare(*folders).arms
    expected = [pass_at("gapo", seed, 20)[0] for seed in (0, 1)]
    assert final(arm, "eval/pass@1") == (20, pytest.approx(expected))
    assert final(arm, "eval/pass@64") is None


def test_the_k_of_pass_at_k_is_one_that_all_have(tmp_path):
    whole, other = write_run(tmp_path / "a"), write_run(tmp_path / "b", method="gspo")
    assert pass_keys(compare(whole, other).arms) == ["eval/pass@1", "eval/pass@8"]
    text = (other / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(text.replace("pass@8", "pass@64"))
    assert pass_keys(compare(whole, other).arms) == ["eval/pass@1"]
    (other / "metrics.jsonl").write_text(text.replace("eval/", "train/"))
    assert pass_keys(compare(whole, other).arms) == ["eval/pass@1", "eval/pass@8"]
