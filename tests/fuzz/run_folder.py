"""The small files of a run's folder, by a start, a report, `status` and the postmortem.

A process group of one rank must be up; see `tests.dist.single_rank`.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from gapo_megatron.config import Config
from gapo_megatron.evaluate.counts import read_counts, write_counts
from gapo_megatron.io.metric_files import read_rows
from gapo_megatron.io.run_folder import is_finished, mark_finished
from gapo_megatron.io.sample_files import read_samples, read_timelines
from gapo_megatron.io.token_files import count_tokens, read_tokens, token_files
from gapo_megatron.io.toml_tree import to_toml
from gapo_megatron.launch.postmortem import Evidence
from gapo_megatron.run.metrics import MetricsWriter
from gapo_megatron.types import Span, Timeline
from gapo_tools.jobs.status import read_status
from gapo_tools.reporting.runs import parse_branch, read_run
from tests.attempt_setup import make_attempt
from tests.configs import config_of
from tests.fuzz.campaign import Target
from tests.fuzz.mutate import Damage, damage_bytes, damage_file, damage_json, damage_tree, json_text
from tests.io.test_sample_files import sample_of
from tests.io.test_token_files import tokens_of

_BRANCH = {"run": "other", "step": 1, "changes": {"objective.method": ["gspo", "gapo"]}}
_NUM_STEPS = 3


def _config() -> Config:
    sections = {
        "run": {"output_dir": "run", "num_steps": _NUM_STEPS},
        "model": {"precision": "fp32"},
        "metrics": {"tensorboard": False},
    }
    return config_of(sections)


def _prepare(folder: Path) -> None:
    run = folder / "run"
    (run / "evaluations").mkdir(parents=True)
    config = _config()
    (run / "config.toml").write_text(to_toml(config), encoding="utf-8")
    with MetricsWriter(run, config=config, resume_step=0, enabled=True) as writer:
        writer.log_startup(0, {"imports": 1.5}, sizes={"perf/world_size": 2})
        for step in range(_NUM_STEPS):
            values = {"reward/mean": 0.25 * step, "objective/loss": -0.5, "per_c/groups/c8": 1}
            spans = (Span(False, 0.0, 0.5, 3), Span(True, 0.5, 1.5, 0, failed=True))
            writer.log_samples(
                step,
                [sample_of(step, number) for number in range(2)],
                [Timeline(step, f"p{number}", number, spans) for number in range(2)],
            )
            writer.log_tokens(step, [tokens_of(step, number) for number in range(2)])
            writer.log(step, values, {"time/step_s": 2.0, "time/rollout_s": 1.0})
    counts = [{"id": f"p{i}", "level": "1", "num_samples": 8, "num_correct": i} for i in range(3)]
    write_counts(counts, run / "evaluations/step_00000000.json")
    (run / "branch.json").write_text(json.dumps(_BRANCH))
    mark_finished(run, num_steps=_NUM_STEPS)
    make_attempt(run).keep_stage_seconds({"rollout": [1.0, 2.0], "update": [3.0]})
    attempt = run / "attempts/7.0"
    attempt.mkdir(parents=True)
    failure = {
        "rank": 0,
        "host": "n1",
        "unix_s": 1e9,
        "exit_code": 1,
        "error": "CheckpointError",
        "message": "no space",
        "traceback": "Traceback\n",
    }
    (attempt / "failure_0.json").write_text(json.dumps(failure))
    (attempt / "launch.log").write_text("started\n")
    (run / "attempts/latest").symlink_to("7.0")


def _read_start(folder: Path) -> dict[str, Any]:
    """What a start of the same run reads."""
    run = folder / "run"
    finished = is_finished(run, num_steps=_NUM_STEPS)
    seconds = make_attempt(run).stage_seconds()
    with MetricsWriter(run, config=_config(), resume_step=_NUM_STEPS, enabled=True) as writer:
        timeline = Timeline(_NUM_STEPS, "p0", 0, (Span(False, 0.0, 0.5, 3),))
        writer.log_samples(_NUM_STEPS, [sample_of(_NUM_STEPS)], [timeline])
    return {
        "finished.json": finished,
        "stage_seconds.json": seconds,
        "metrics.jsonl": read_rows(run / "metrics.jsonl"),
        "timings.jsonl": read_rows(run / "timings.jsonl"),
        "samples.jsonl": read_samples(run),
        "timelines.jsonl": read_timelines(run),
    }


def _read_report(folder: Path) -> dict[str, Any]:
    """What those read who look at a run."""
    run = folder / "run"
    status = read_status(run)
    for path in token_files(run).values():
        count_tokens(path)
    read = read_run(run)
    text = (run / "branch.json").read_text("utf-8") if read.branch else None
    return {
        "config.toml": read.config.model_dump(mode="json"),
        "status": repr(status),
        "metrics.jsonl": read_rows(run / "metrics.jsonl"),
        "timings.jsonl": read.timings,
        "samples.jsonl": read_samples(run),
        "timelines.jsonl": read_timelines(run),
        "step_00000001.parquet": [read_tokens(one) for one in token_files(run).values()],
        "step_00000000.json": read_counts(run / "evaluations/step_00000000.json"),
        "branch.json": text and parse_branch(text, where="branch.json"),
        "failure_0.json": repr(Evidence(run / "attempts/7.0").diagnose()),
    }


def _damage(rng: Random, folder: Path, names: list[str]) -> Damage:
    file = rng.choice(names)
    path = folder / file
    if rng.random() < 0.25:
        return damage_file(rng, folder, file)
    if file.endswith(".parquet"):
        content, what = damage_bytes(rng, path.read_bytes())
        path.write_bytes(content)
        return Damage(file, what)
    if file.endswith(".json"):
        return damage_json(rng, folder, file)
    lines = path.read_bytes().splitlines(keepends=True)
    at = rng.randrange(len(lines))
    if rng.random() < 0.5 or file.endswith(".toml"):
        lines[at], what = damage_bytes(rng, lines[at])
    else:
        tree, what = damage_tree(rng, json.loads(lines[at]))
        lines[at] = json_text(tree).encode("utf-8", "surrogatepass") + b"\n"
    path.write_bytes(b"".join(lines))
    return Damage(file, f"line {at + 1}: {what}")


def _explains(folder: Path, damage: Damage, state: Any, whole: Any) -> str:
    """Nothing but the damaged file is read as another one, and that as what it says."""
    path = folder / damage.file
    for part, value in state.items():
        if value != whole[part] and part not in (path.name, "status"):
            return f"{part} is {value!r}, and only {path.name} was damaged"
    if path.name not in ("finished.json", "branch.json"):
        return ""  # advice and metrics, of which a part may be gone
    stated = json.loads(path.read_text()) if path.exists() else None
    if path.name == "finished.json":
        stated = stated is not None and stated["num_steps"] >= _NUM_STEPS
    return "" if state[path.name] == stated else f"read as {state[path.name]!r}"


def targets() -> list[Target]:
    """All of this file."""
    start = ["finished.json", "stage_seconds.json", "metrics.jsonl", "timings.jsonl"]
    start += ["samples.jsonl", "timelines.jsonl"]
    report = ["config.toml", "metrics.jsonl", "timings.jsonl", "evaluations/step_00000000.json"]
    report += ["samples.jsonl", "timelines.jsonl", "branch.json", "attempts/7.0/failure_0.json"]
    report += ["tokens/step_00000001.parquet"]
    return [
        Target(
            name,
            _prepare,
            lambda rng, folder, names=names: _damage(rng, folder, [f"run/{n}" for n in names]),
            read,
            _explains,
            lambda message, damage: Path(damage.file).name in message,
            share=2,
        )
        for name, names, read in (("start", start, _read_start), ("report", report, _read_report))
    ]
