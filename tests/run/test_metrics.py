from __future__ import annotations

import json
import logging
import math
import re
import sys
import threading
import types

import pytest
import torch

from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import Config, MetricsConfig
from gapo_megatron.errors import ConfigError, DataError, MachineError
from gapo_megatron.io.metric_files import check_metrics
from gapo_megatron.run import metrics
from gapo_megatron.run.metrics import MetricsWriter, check_sinks
from tests.configs import config_of
from tests.full_disk import full_disk
from tests.messages import mentions
from tests.train_setup import documented_names
from tests.waiting import HANG_S


def make_config(**sinks) -> Config:
    metrics = {"tensorboard": False, **sinks}
    return config_of({"run": {"num_steps": 10}, "metrics": metrics})


def write_steps(run_dir, steps, *, resume_step=0) -> None:
    with MetricsWriter(run_dir, config=make_config(), resume_step=resume_step) as writer:
        for step in steps:
            writer.log(step, {"reward/mean": step / 3}, {"time/step_s": 0.5})


def write_nothing(run_dir, *, resume_step) -> None:
    write_steps(run_dir, [], resume_step=resume_step)


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_line_is_on_disk_when_log_returns(tmp_path):
    writer = MetricsWriter(tmp_path, config=make_config())
    writer.log(0, {"reward/mean": 0.1 + 0.2, "n": 3}, {"time/step_s": 1.5})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 0, "reward/mean": 0.1 + 0.2, "n": 3}]
    (timing,) = lines(tmp_path / "timings.jsonl")
    assert timing["time/step_s"] == 1.5 and timing["step"] == 0
    writer.close()


def test_killed_and_resumed_metrics_equal_the_uninterrupted_ones_byte_by_byte(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    write_steps(whole, range(8))
    write_steps(killed, range(6))  # the newest checkpoint is after step 3
    with open(killed / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "reward/me')  # cut by the kill
    write_steps(killed, range(4, 8), resume_step=4)
    assert (killed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert [line["step"] for line in lines(killed / "timings.jsonl")] == list(range(8))


def test_torn_last_line_is_dropped_even_if_its_step_is_kept(tmp_path, caplog):
    write_steps(tmp_path, range(3))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-1])  # whole JSON, but the newline never reached the disk
    with caplog.at_level(logging.WARNING):
        write_steps(tmp_path, [], resume_step=9)
    assert [line["step"] for line in lines(path)] == [0, 1]
    assert re.search(rf"{re.escape(str(path))}\b.*\b3\b", caplog.text)


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"step": "1"}', b"\0\0", b'{"a": 1}'])
def test_a_damaged_line_that_does_not_come_again_is_refused(tmp_path, damage):
    write_steps(tmp_path, range(3))
    path = tmp_path / "metrics.jsonl"
    first, _, third = path.read_bytes().splitlines()
    damaged = b"\n".join([first, damage, third]) + b"\n"
    path.write_bytes(damaged)
    for refuse in (write_nothing, check_metrics):
        with pytest.raises(DataError, match=re.escape(f"{path}:2")):
            refuse(tmp_path, resume_step=3)
    assert path.read_bytes() == damaged, "nothing is lost"
    # Where no kept line follows, those steps come again.
    check_metrics(tmp_path, resume_step=1)
    assert path.read_bytes() == damaged, "nothing is lost"
    write_steps(tmp_path, [1, 2], resume_step=1)
    assert [line["step"] for line in lines(path)] == [0, 1, 2]


def test_a_damaged_line_of_timings_is_dropped(tmp_path):
    write_steps(tmp_path, range(3))
    path = tmp_path / "timings.jsonl"
    path.write_bytes(path.read_bytes().replace(b'{"step": 1,', b'{"step" 1,'))
    write_steps(tmp_path, [], resume_step=3)
    assert [line["step"] for line in lines(path)] == [0, 2]


@pytest.mark.parametrize(("name", "num_metrics"), [("metrics.jsonl", 20), ("timings.jsonl", 1)])
def test_a_full_disk_is_named_and_the_resumed_run_equals_the_uninterrupted_one(
    tmp_path, capsys, name, num_metrics
):
    whole, full = tmp_path / "whole", tmp_path / "full"

    def write(run_dir, first):
        run_dir.mkdir(exist_ok=True)
        writer = MetricsWriter(run_dir, config=make_config(), resume_step=first)
        for step in range(first, 8):
            metrics = {f"metric/{index}": step / 3 for index in range(num_metrics)}
            writer.log(step, metrics, {"time/step_s": 0.5})
        writer.close()

    write(whole, 0)
    num_bytes = (whole / name).stat().st_size // 2 + 1  # within a line
    with full_disk(num_bytes), pytest.raises(MachineError, match=mentions(full / name)):
        write(full, 0)
    write(full, 2)
    assert (full / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert [line["step"] for line in lines(full / "timings.jsonl")] == list(range(8))


def test_a_full_disk_below_tensorboard_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # of its own thread
    writer = MetricsWriter(tmp_path, config=make_config(tensorboard=True))
    with full_disk(100), pytest.raises(MachineError, match=mentions(tmp_path / "tensorboard")):
        for step in range(2):
            writer.log(step, {"x": 1.0})
    writer._tensorboard.file_writer.event_writer._async_writer._worker.join(HANG_S)


def fake_wandb(monkeypatch) -> list:
    """Stand in for the package; returns what its runs log and that they finish."""
    logged = []

    class Run:
        def log(self, values, *, step):
            logged.append((step, values))

        def finish(self):
            logged.append("finish")

    fake = types.ModuleType("wandb")
    fake.__spec__ = types.SimpleNamespace(name="wandb")
    fake.opened = []
    fake.init = lambda **arguments: fake.opened.append(arguments) or Run()
    fake.Table = lambda columns, data: (columns, data)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return logged


@pytest.mark.parametrize("content", ["", "a b", "../x"])
def test_a_damaged_wandb_id_is_named(tmp_path, monkeypatch, content):
    fake_wandb(monkeypatch)
    path = tmp_path / "wandb_run_id.txt"
    path.write_text(content)
    with pytest.raises(ConfigError, match=mentions(path, content)):
        MetricsWriter(tmp_path, config=make_config(wandb_project="gapo"))


def test_a_new_run_starts_with_empty_files(tmp_path):
    write_steps(tmp_path, range(3))
    write_steps(tmp_path, [0])
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0]


def test_not_finite_is_null_with_its_key_and_a_warning(tmp_path, caplog):
    with (
        caplog.at_level(logging.WARNING),
        MetricsWriter(tmp_path, config=make_config()) as writer,
    ):
        writer.log(0, {"loss": math.nan, "norm": math.inf, "x": 1.0})
        writer.log(1, {"loss": math.nan})
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 0, "loss": None, "norm": None, "x": 1.0},
        {"step": 1, "loss": None},
    ]
    for key, value in (("loss", "nan"), ("norm", "inf")):
        assert sum(bool(re.search(mentions(key, value), text)) for text in caplog.messages) == 1


def test_tensors_are_written_as_numbers(tmp_path):
    with MetricsWriter(tmp_path, config=make_config()) as writer:
        writer.log(0, {"loss": torch.tensor(0.5, dtype=torch.float64)})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 0, "loss": 0.5}]


def test_other_ranks_write_nothing(tmp_path, capsys):
    with MetricsWriter(tmp_path, config=make_config(), enabled=False) as writer:
        writer.log(0, {"loss": 1.0}, {"time/step_s": 1.0})
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


STEP_METRICS = {
    "reward/mean": 0.25,
    "reward/unknown_share": 0.02,
    "clip/fraction_sequences": 0.125,
    "loss/policy": -1e-3,
    "optim/grad_norm": 0.75,
    "rollout/response_length/mean": 1234.5,
    "ratio/abs_deviation": 4e-3,
    "groups/zero_advantage_share": 0.06,
    "mismatch/mean_abs_log_prob_diff": 2e-3,
}
STEP_TIMINGS = {
    "time/rollout_s": 6.0,
    "time/update_s": 3.0,
    "time/step_s": 10.0,
    "perf/tokens_per_s": 1234.0,
}
EVALUATED = {"eval/pass@1": 0.45, "eval/pass@8": 1.0, "eval/level_1/pass@1": 0.5}


def log_a_step(run_dir) -> None:
    with MetricsWriter(run_dir, config=make_config(), resume_step=4) as writer:
        writer.log(4, EVALUATED)
        writer.log(4, STEP_METRICS, STEP_TIMINGS)


def test_log_file_gets_one_line_per_step(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    log_a_step(tmp_path)
    evaluated, line = capsys.readouterr().out.splitlines()
    assert evaluated.split() == ["step=4/10", "pass@1=45.0%", "pass@8=100.0%"]
    assert "step=5/10" in line and "reward=0.250" in line
    assert "grad=7.5e-01" in line and "unknown=2%" in line
    assert "left=<0:00:50" in line  # five more steps of ten seconds, or less


def test_what_a_start_does_once_is_not_in_the_time_left(tmp_path, capsys):
    with MetricsWriter(tmp_path, config=make_config()) as writer:
        for step, seconds in enumerate((100.0, 10.0, 20.0)):
            writer.log(step, STEP_METRICS, STEP_TIMINGS | {"time/step_s": seconds})
    left = [line.partition("left=")[2].split()[0] for line in capsys.readouterr().out.splitlines()]
    assert left == ["<0:15:00", "0:01:20", "0:01:45"]


@pytest.mark.parametrize("size", [1.0, 100.0])
def test_a_line_has_at_most_120_columns_and_ends_with_the_least_important(tmp_path, capsys, size):
    values = STEP_METRICS | STEP_TIMINGS | {"reward/unknown_share": 0.0}
    large = {key: value * size for key, value in values.items()}
    with MetricsWriter(tmp_path, config=make_config()) as writer:
        writer.log(4, large, large)
    (line,) = capsys.readouterr().out.splitlines()
    assert 100 < len(line) <= 120 and ("tokens/s=" in line) == (size == 1)
    assert "left=" in line and "unknown" not in line


def test_a_step_without_verdicts_shows_no_reward(tmp_path, capsys):
    config = make_config()
    values = {k: v for k, v in STEP_METRICS.items() if k != "reward/mean"}
    with MetricsWriter(tmp_path, config=config) as writer:
        writer.log(0, values | {"reward/unknown_share": 1.0}, STEP_TIMINGS)
    assert {"reward=-", "unknown=100%"} <= set(capsys.readouterr().out.split())


@pytest.mark.parametrize(("width", "last"), [(200, "mismatch"), (31, "clipped"), (30, "unknown")])
def test_terminal_gets_a_header_and_a_row_per_step(tmp_path, monkeypatch, capsys, width, last):
    monkeypatch.setenv("COLUMNS", f"{width}")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    write_steps(tmp_path, range(3))
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "step" and header.endswith(last)
    assert {len(line) for line in (header, *rows)} == {len(header)} and len(header) <= width
    assert len(rows) == 3 and rows[-1].split()[:2] == ["3/10", "0.667"]


def test_tensorboard_s_first_page_shows_names_that_runs_write(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    with MetricsWriter(tmp_path, config=make_config(tensorboard=True)) as writer:
        writer.log(0, STEP_METRICS, STEP_TIMINGS)
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (event,) = found.Tensors("custom_scalars__config__")
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    patterns = [
        tag for part in layout.category for chart in part.chart for tag in chart.multiline.tag
    ]
    written = {
        name.format(side=side, c=1, k=8)
        for name in documented_names()
        for side in ("correct", "wrong")
        if not set(re.findall("{(.*?)}", name)) - {"side", "c", "k"}
    }
    assert len(patterns) > 10
    for pattern in patterns:
        assert any(re.fullmatch(pattern, name) for name in written), pattern


@pytest.mark.parametrize("resume_step", [0, 2])
def test_tensorboard_hides_what_the_resumed_run_writes_again(tmp_path, capsys, resume_step):
    """Also where the first attempt was killed before its first checkpoint."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for value, first in ((1.0, 0), (2.0, resume_step)):
        config = make_config(tensorboard=True)
        with MetricsWriter(tmp_path, config=config, resume_step=first) as writer:
            for step in range(first, 4):
                writer.log(step, {"loss": value, "per_c/groups/c1": 4.0}, {"time/step_s": 0.5})
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    events = found.Scalars("loss")
    shown = [(event.step, event.value) for event in events]
    assert shown == [(step, 1 + (step >= resume_step)) for step in range(4)]
    # The names of the files, metrics and timings alike.
    assert set(found.Tags()["scalars"]) == {"loss", "per_c/groups/c1", "time/step_s"}
    assert [event.value for event in found.Scalars("per_c/groups/c1")] == [4, 4, 4, 4]


@pytest.mark.parametrize(
    ("sinks", "module", "setting"),
    [
        ({"wandb_project": "gapo"}, "wandb", ("metrics.wandb_project", "gapo")),
        ({"tensorboard": True}, "tensorboard", ("metrics.tensorboard", "true")),
    ],
)
def test_missing_library_names_the_key_and_the_package(monkeypatch, sinks, module, setting):
    real = metrics.importlib.util.find_spec
    monkeypatch.setattr(
        metrics.importlib.util, "find_spec", lambda name: None if name == module else real(name)
    )
    with pytest.raises(ConfigError, match=mentions(*setting, f"pip install {module}")):
        check_sinks(MetricsConfig(**sinks))


def test_wandb_continues_the_run_of_the_folder(tmp_path, monkeypatch):
    logged = fake_wandb(monkeypatch)
    opened = sys.modules["wandb"].opened
    config = make_config(wandb_project="gapo")
    for step in range(2):
        with MetricsWriter(tmp_path, config=config, resume_step=step) as writer:
            writer.log(step, {"loss": 1.0})
    assert opened[0]["id"] == opened[1]["id"]
    assert {run["resume"] for run in opened} == {"allow"}
    assert logged == [(0, {"loss": 1.0}), "finish", (1, {"loss": 1.0}), "finish"]
    (other := tmp_path / "other").mkdir()
    MetricsWriter(other, config=config).close()
    assert opened[2]["id"] != opened[0]["id"]


def test_stopwatch_adds_stages_and_starts_anew(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 4.0, 9.0, 10.0, 12.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    stopwatch = Stopwatch()  # 0
    with stopwatch("rollout"):  # 1 to 3
        pass
    with pytest.raises(ValueError), stopwatch("rollout"):  # 4 to 9
        raise ValueError
    assert stopwatch.lap(num_tokens=50) == {  # 10
        "time/rollout_s": 7.0,
        "time/step_s": 10.0,
        "perf/tokens_per_s": 5.0,
    }
    assert stopwatch.lap(num_tokens=4) == {"time/step_s": 2.0, "perf/tokens_per_s": 2.0}


def test_stages_are_expected_to_take_what_they_took_lately():
    stopwatch = Stopwatch()
    assert stopwatch.expect("rollout") == (0, 0)
    stopwatch.recent = {"rollout": [9.0, 1.0, 4.0], "save": [2.0]}
    assert stopwatch.expect("rollout", "save", "unseen") == (3.0, 11.0)
    entered = []
    stopwatch.on_enter = entered.append
    for _ in range(5):  # the outlier is forgotten
        with stopwatch("rollout"):
            pass
    assert stopwatch.expect("rollout").longest_s < 1
    assert entered == ["rollout"] * 5 and set(stopwatch.seconds) == {"rollout"}


def test_the_startup_of_every_attempt_is_kept(tmp_path):
    for _ in range(2):  # both from step 0: the first one did not get far
        with MetricsWriter(tmp_path, config=make_config(), resume_step=0) as writer:
            writer.log_startup(0, {"imports": 1.5}, sizes={"perf/world_size": 2})
    records = lines(tmp_path / "timings.jsonl")
    assert [record["startup/imports_s"] for record in records] == [1.5, 1.5]
    assert [record["perf/world_size"] for record in records] == [2, 2]
