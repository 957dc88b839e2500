"""A scaling study's rows are its runs' files, worked out by hand; its figure shows them."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gapo_tools import plan as tool
from gapo_tools.planner.hardware import CPU, GPUS
from gapo_tools.reporting.measured import read_measured
from gapo_tools.reporting.scaling import (
    layout_items,
    lines,
    scaling_rows,
    scaling_tables,
    throughput,
)
from gapo_tools.reporting.style import style
from tests.formats.test_convert_models import CONFIGS
from tests.messages import mentions
from tests.scaling_setup import config, write_model
from tests.tools.reporting.test_measured import SMALL, a_step, write_run

H200 = GPUS["h200"]
# Seconds of a step beside generation, as `a_step` has them: reward, old, update, sync, and others.
OTHERS_S = 0.5 + 1.0 + 5.0 + 0.25 + 0.125 + 0.25
TP2 = {"tensor_model_parallel_size": 2}


def batch(prompts):
    return {"rollout_prompts": prompts, "minibatch_prompts": prompts // 4}


def runs(folder, *, model=SMALL):
    """Ranks, seconds of generation and settings of each: strong, weak and another layout."""
    name = "Qwen2.5-1.5B" if model is SMALL else "Qwen2.5-7B"
    write_model(folder / name, model)
    for run, (ranks, generation_s, sections) in {
        "one": (8, 8.0, {}),
        "strong": (16, 5.0, {}),
        "strong_tp": (16, 6.0, {"parallel": TP2}),
        "weak": (16, 9.0, {"batch": batch(512)}),
        "longer": (8, 20.0, {"rollout": {"max_response_tokens": 6000}}),
    }.items():
        sections = {"model": {"precision": "bf16"}} | sections
        prompts = sections.get("batch", {}).get("rollout_prompts", 256)
        rows = [a_step(generation_s / 8, prompts=prompts)] * 4
        write_run(folder / run, rows=rows, hf_dir=folder / name, ranks=ranks, **sections)
    return ["one", "strong", "strong_tp", "weak", "longer"]


def read(folder):
    return read_measured(folder, mean_prompt_tokens=100.0, name=folder.name)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    return [read(folder / name) for name in runs(folder)]


def and_run(study, folder, *, rows=None, ranks=8, **sections):
    """The study and one more run of the same model, in `folder`."""
    sections["model"] = {"precision": "bf16"} | sections.get("model", {})
    hf_dir = study[0].config.model.hf_dir
    write_run(folder, rows=rows or [a_step()] * 4, hf_dir=hf_dir, ranks=ranks, **sections)
    return [*study, read(folder)]


def rows_of(study):
    return {row["run"]: row for row in scaling_rows(study, gpu=H200)}


def test_rows_are_the_runs(study):
    rows = rows_of(study)
    one = rows["one"]
    step_s = 8.0 + OTHERS_S
    assert (one["gpus"], one["layout"], one["model"]) == (8, "DP 8", "Qwen2.5-1.5B")
    assert rows["strong_tp"]["layout"] == "TP 2 DP 8"
    assert one["step_s"] == step_s
    assert one["tokens_per_gpu_s"] == pytest.approx(256 * 8 * 600 / step_s / 8)
    # By the model's sizes and 4 million drawn lengths: 4.061e15, 2.549e15 and 10.02e15 operations
    # of generation, old log-probs and update.
    assert one["mfu"] == pytest.approx(0.1390, rel=2e-3)
    assert one["update_mfu"] == pytest.approx(0.2534, rel=2e-3)
    # Six operations a weight and trained token; a fifth of the head's are clipped.
    tokens = 256 * 8 * 0.75 * 700
    assert one["update_mfu"] == pytest.approx(6 * 1.54e9 * tokens / (5.0 * 8 * 989e12), rel=0.1)
    stages = [one[f"{stage}_s"] for stage in ("generation", "reward", "old_log_probs", "update")]
    assert stages == [8.0, 0.5, 1.0, 5.0]
    assert one["other_s"] == pytest.approx(0.375)


def test_replaced_groups_count_as_they_were_drawn(study, tmp_path):
    """A third of 384 groups; a KL term needs the rest, those with A = 0 too."""
    metrics, timings = a_step()
    metrics |= {"rollout/replaced_group_share": 1 / 3, "groups/zero_advantage_share": 0.2}
    metrics |= {"skip/forward_token_share": 0.0, "skip/head_backward_token_share": 0.0}
    sections = {"objective": {"kl_coef": 0.01}, "batch": {"dynamic_sampling_rounds": 1}}
    rows = rows_of(and_run(study, tmp_path / "kl", rows=[(metrics, timings)] * 4, **sections))
    # From test_rows_are_the_runs, where 3/4 of the sequences are trained on.
    forward = 2.549e15 / 0.75 / 0.75
    operations = 1.5 * 4.061e15 + 1.75 * forward + 3 * forward
    assert rows["kl"]["mfu"] == pytest.approx(operations / (15.125 * 8 * 989e12), rel=2e-3)


def test_efficiencies_are_relative_to_the_fewest_gpus(study):
    rows = rows_of(study)
    strong = {name: row["strong_efficiency"] for name, row in rows.items()}
    weak = {name: row["weak_efficiency"] for name, row in rows.items()}
    base = 8.0 + OTHERS_S
    assert strong == {
        "one": 1.0,
        "strong": pytest.approx(base / (2 * (5.0 + OTHERS_S))),
        "strong_tp": pytest.approx(base / (2 * (6.0 + OTHERS_S))),
        "weak": None,  # of twice the batch there is no other run
        "longer": None,
    }
    assert weak == {
        "one": 1.0,
        "strong": None,
        "strong_tp": None,
        "weak": pytest.approx(base / (9.0 + OTHERS_S)),
        "longer": None,
    }


def test_the_quickest_of_the_fewest_is_what_others_are_measured_by(study, tmp_path):
    """Two layouts on eight GPUs; of two seeds the median counts; a method is another study."""
    runs = study
    for name, generation_s, sections in (
        ("slow", 12.0, {"parallel": TP2}),
        ("seed", 6.0, {"run": {"output_dir": "unused", "num_steps": 10, "seed": 3}}),
        ("method", 1.0, {"objective": {"method": "gspo"}}),
    ):
        runs = and_run(runs, tmp_path / name, rows=[a_step(generation_s / 8)] * 4, **sections)
    rows = rows_of(runs)
    best = 7.0 + OTHERS_S
    assert rows["seed"]["strong_efficiency"] == pytest.approx(best / (6.0 + OTHERS_S))
    assert rows["one"]["strong_efficiency"] == pytest.approx(best / (8.0 + OTHERS_S))
    assert rows["slow"]["strong_efficiency"] == pytest.approx(best / (12.0 + OTHERS_S))
    assert rows["strong"]["strong_efficiency"] == pytest.approx(best / (2 * (5.0 + OTHERS_S)))
    assert rows["method"]["strong_efficiency"] is None


def test_there_is_no_mfu_on_a_cpu_nor_without_the_length_of_prompts(study):
    unknown = [replace(one, workload=None) for one in study]
    for runs, gpu, unit in ((study, CPU, "process"), (unknown, H200, "GPU")):
        rows = scaling_rows(runs, gpu=gpu)
        assert {row["mfu"] for row in rows} == {row["update_mfu"] for row in rows} == {None}
        table, split = scaling_tables(rows, gpu=gpu)
        assert [str(column.header) for column in split.columns][-2:] == ["other", "step"]
        headings = [str(column.header) for column in table.columns]
        assert "MFU" not in headings and f"tokens/s/{unit}" in headings


def lines_of(study):
    """Runs of each line, by its label."""
    found = lines(study, scaling_rows(study, gpu=H200), unit="GPU")
    return {line["label"]: [row["run"] for row in line["rows"]] for line in found}


def test_lines_are_batches_and_layouts(study):
    """Seeds, checkpoints and timeouts make no line; what computes in another way does."""
    ours = [one for one in study if one.name != "longer"]
    assert lines_of(ours) == {
        "256 prompts, uncut": ["one", "strong"],
        "32 prompts a GPU, uncut": ["one", "weak"],
        "256 prompts, TP 2": ["strong_tp"],
    }
    with style():
        figure = throughput(study, scaling_rows(study, gpu=H200), H200).figure
    panels = {" ".join(axis.get_title().split()): axis for axis in figure.axes}
    assert panels.keys() == {"Qwen2.5-1.5B, 3,092 tokens", "Qwen2.5-1.5B, 6,000 tokens"}
    drawn = panels["Qwen2.5-1.5B, 3,092 tokens"].get_lines()[0]
    assert list(drawn.get_xdata()) == [8, 16]
    best = 256 * 8 * 600 / (8.0 + OTHERS_S) / 8
    assert drawn.get_ydata()[0] == pytest.approx(best)


@pytest.mark.parametrize(
    ("sections", "label"),
    [
        ({"model": {"recompute": "full"}}, "256 prompts, recompute full"),
        ({"rollout": {"memory_fraction": 0.7}}, "256 prompts, uncut (on_8)"),
        ({"optimizer": {"offload": "all"}}, "256 prompts, uncut (on_8)"),
        ({"batch": {"max_tokens_per_microbatch": 8192}}, "256 prompts, uncut (on_8)"),
        ({"objective": {"method": "gspo"}}, "256 prompts, uncut (on_8)"),
    ],
)
def test_lines_join_what_computes_in_the_same_way_alone(study, tmp_path, sections, label):
    study = [one for one in study if one.name != "longer"]  # whose line has a label of theirs
    for ranks in (8, 16):
        more = sections | {
            "parallel": {"timeout_s": 1800 + ranks},
            "checkpoint": {"every_steps": ranks},
            "run": {"output_dir": f"runs/on_{ranks}", "num_steps": ranks, "seed": ranks},
        }
        study = and_run(study, tmp_path / f"on_{ranks}", ranks=ranks, **more)
    found = lines_of(study)
    assert found[label] == ["on_8", "on_16"]
    assert ["one", "strong"] in found.values()


def test_layouts_are_told_apart():
    def shown(sections, **ranks):
        ranks = {"num_generation": 0} | ranks
        return " ".join(layout_items(SimpleNamespace(config=config(**sections), **ranks)))

    assert shown({}, num_training=1) == "uncut"
    tensor = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    assert shown({"parallel": tensor}, num_training=4) == "TP 2 SP DP 2"
    pipeline = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}
    assert shown({"parallel": pipeline}, num_training=8) == "PP 4 x 2 DP 2"
    more = {"parallel": {"context_parallel_size": 2}, "model": {"recompute": "full"}}
    more |= {"rollout": {"tensor_parallel_size": 4, "generation_ranks": 4, "max_staleness": 1}}
    more |= {"objective": {"importance_weight_max": 2.0}}
    found = shown(more, num_training=2, num_generation=4)
    assert found == "CP 2 vLLM TP 4 4 generate recompute full"


def measure(*words: object) -> int:
    command = ["measure", "--gpu", "h200", "--mean-prompt-tokens", "100"]
    return tool.main([*command, *map(str, words)])


def data_of(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "throughput.csv").open() as file:
        return {row["run"]: row for row in csv.DictReader(file)}


def test_the_tool_prints_tables_and_writes_figure_and_data(tmp_path, capsys):
    """Of the runs that it can read; the others are named."""
    runs(tmp_path / "study")
    (tmp_path / "study" / "waiting" / "code").mkdir(parents=True)
    assert measure(tmp_path / "study") == 0
    said = capsys.readouterr().out
    assert re.search(r"\bMeasured\b.*\bh200\b", said)
    assert re.search(r"\bnot measured\b.*\bwaiting\b.*\bno step", said)
    for kind in ("csv", "pdf", "png"):
        assert (tmp_path / "study" / "scaling" / f"throughput.{kind}").stat().st_size > 0
    rows = data_of(tmp_path / "study" / "scaling")
    assert rows.keys() == {"one", "strong", "strong_tp", "weak", "longer"}
    assert rows["weak"]["strong_efficiency"] == "" and float(rows["one"]["generation_s"]) == 8.0
    with (tmp_path / "study" / "one" / "timings.jsonl").open("a") as file:
        file.write("damaged\n")
    assert measure(tmp_path / "study") == 0  # what was written is no run, and is replaced
    assert re.search(r"\bone: \S+/one/timings\.jsonl:6\b", capsys.readouterr().out)
    assert data_of(tmp_path / "study" / "scaling").keys() == rows.keys() - {"one"}


def test_runs_of_one_name_in_several_folders(tmp_path):
    runs(tmp_path / "a")
    runs(tmp_path / "b", model=CONFIGS["Qwen2.5-7B"])
    output = tmp_path / "both" / "data"
    assert measure("--output", output, tmp_path / "a", tmp_path / "b" / "one") == 0
    models = {run: row["model"] for run, row in data_of(output).items()}
    assert models[str(tmp_path / "a" / "one")] == models["strong"] == "Qwen2.5-1.5B"
    assert not (tmp_path / "a" / "scaling").exists()


def test_folders_without_runs_are_refused(tmp_path, capsys):
    assert measure(tmp_path) == 1
    assert re.search(mentions(tmp_path, "config.toml", "no run"), capsys.readouterr().err)
    write_model(tmp_path / "model", SMALL)
    write_run(tmp_path / "early", rows=[a_step()], hf_dir=tmp_path / "model")
    (tmp_path / "early" / "timings.jsonl").write_text(json.dumps({"step": 0}) + "\n")
    assert measure(tmp_path / "early") == 1
    assert re.search(r"/early\b.*\btimed\b", capsys.readouterr().err)
    assert not (tmp_path / "early" / "scaling").exists()
