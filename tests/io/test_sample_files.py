from __future__ import annotations

import json
from pathlib import Path

import pytest

from gapo_megatron.errors import DataError, MachineError
from gapo_megatron.io import sample_files
from gapo_megatron.io.sample_files import SampleLog, read_samples, read_timelines
from gapo_megatron.run.metrics import MetricsWriter
from gapo_megatron.types import Sample, Span, Timeline
from tests.configs import config_of
from tests.full_disk import full_disk
from tests.messages import mentions

FILES = ("samples.1.jsonl", "samples.jsonl")


def sample_of(step: int, number: int = 0, *, response: str = "x") -> Sample:
    return Sample(
        step=step,
        problem=f"p{number}",
        sample=number,
        source="",
        c=1,
        k=2,
        verdict="wrong",
        reason="",
        grade=None,
        num_tokens=3,
        truncated=False,
        prompt='line\n"startup/',
        response=response,
        answer="7 \u2028 µ",
        metrics={"length</p>": -0.5} if number else {},
    )


def write(run_dir: Path, steps: range) -> list[Sample]:
    """By a process that samples these steps."""
    log = SampleLog(run_dir)
    written = [[sample_of(step, number) for number in range(3)] for step in steps]
    for samples in written:
        log.append(samples)
    return [one for samples in written for one in samples]


def test_timelines_are_files_of_their_own(tmp_path: Path) -> None:
    """They are dropped, and written again, with the samples of their step."""
    samples = write(tmp_path, range(3))
    spans = (Span(False, 0.0, 0.25, 3), Span(True, 0.25, 1.5, 0, failed=True))
    for steps in (range(3), range(1, 4)):
        log = SampleLog(tmp_path, name="timelines.jsonl")
        for step in steps:
            log.append([Timeline(step, f"p{number}", number, spans) for number in range(2)])
    found = read_timelines(tmp_path)
    assert [(one.step, one.sample) for one in found] == [(s, n) for s in range(4) for n in range(2)]
    assert {one.spans for one in found} == {spans}
    assert read_samples(tmp_path) == samples
    (tmp_path / "timelines.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(DataError, match=mentions("timelines.jsonl:1", "problem")):
        read_timelines(tmp_path)


def test_a_resume_without_environment_drops_later_timelines(tmp_path: Path) -> None:
    """They belong to samples that the resumed run draws again, without calls."""

    def run(steps: range, *, num_samples: int, has_timelines: bool) -> None:
        config = config_of({"metrics": {"samples_per_step": num_samples}})
        with MetricsWriter(tmp_path, config=config, resume_step=steps[0]) as writer:
            for step in steps:
                timelines = [Timeline(step, "p", 0, (Span(False, 0.0, 1.0, 3),))]
                samples = [sample_of(step)][:num_samples]
                writer.log_samples(step, samples, timelines if has_timelines else [])

    run(range(4), num_samples=1, has_timelines=True)
    run(range(2, 3), num_samples=1, has_timelines=False)
    assert [one.step for one in read_timelines(tmp_path)] == [0, 1]
    assert [one.step for one in read_samples(tmp_path)] == [0, 1, 2]
    run(range(1, 2), num_samples=0, has_timelines=False)
    assert [one.step for one in read_timelines(tmp_path)] == [0]
    assert [one.step for one in read_samples(tmp_path)] == [0]


def contents(run_dir: Path) -> list[bytes]:
    return [path.read_bytes() for name in FILES if (path := run_dir / name).exists()]


def test_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_samples(tmp_path) == []
    assert read_samples(tmp_path) == write(tmp_path, range(0))
    assert contents(tmp_path) == []
    samples = write(tmp_path, range(3))
    assert read_samples(tmp_path) == samples
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 3, "prob')  # being written
    assert read_samples(tmp_path) == samples


@pytest.mark.parametrize("torn", ["", '{"step": 4, "problem": "p', '{"step": 1, "pro'])
@pytest.mark.parametrize("resume_step", [0, 2, 4])
@pytest.mark.parametrize("max_bytes", [1000, 10**6])
def test_a_resumed_run_replaces_the_lines_of_the_steps_it_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: str, resume_step: int, max_bytes: int
) -> None:
    """Also lines that have been moved to the other file since."""
    monkeypatch.setattr(sample_files, "MAX_BYTES", max_bytes)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        write(folder, range(4))
    with (killed / "samples.jsonl").open("a") as file:
        file.write(torn)
    assert len(contents(killed)) == (2 if max_bytes == 1000 else 1)
    write(killed, range(resume_step, 6))
    write(whole, range(4, 6))
    found = read_samples(killed)
    assert {one.step for one in found} <= {*range(6)}
    expected = [sample_of(step, i) for step in range(resume_step, 6) for i in range(3)]
    assert [one for one in found if one.step >= resume_step][-3:] == expected[-3:]
    assert len({(one.step, one.sample) for one in found}) == len(found)
    if resume_step in (0, 4) or max_bytes > 1000:
        assert contents(killed) == contents(whole)


def test_the_files_stay_small_and_hold_the_latest_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_files, "MAX_BYTES", 1000)
    log = SampleLog(tmp_path)
    for step in range(40):
        log.append([sample_of(step, response="y" * 100)])
        size = len(json.dumps(step)) + 400
        assert sum(map(len, contents(tmp_path))) <= 2 * (1000 + size)
    steps = [one.step for one in read_samples(tmp_path)]
    assert steps == [*range(steps[0], 40)] and 2 < len(steps) < 20


def test_what_is_no_sample_is_named_with_its_line(tmp_path: Path) -> None:
    write(tmp_path, range(1))
    path = tmp_path / "samples.jsonl"
    for line in (b'{"step": 0}\n', b"[]\n", b"\xff\n", b'{"step": \n'):
        path.write_bytes(path.read_bytes().split(b"\n")[0] + b"\n" + line)
        with pytest.raises(DataError, match=mentions(f"{path}:2")):
            read_samples(tmp_path)


def test_a_full_disk_is_named_and_a_resume_drops_the_incomplete_line(tmp_path: Path) -> None:
    samples = write(tmp_path, range(2))
    log = SampleLog(tmp_path)
    path = tmp_path / "samples.jsonl"
    with full_disk(path.stat().st_size + 100), pytest.raises(MachineError, match=mentions(path)):
        log.append([sample_of(2)])
    assert read_samples(tmp_path) == samples
    assert write(tmp_path, range(2, 3)) == read_samples(tmp_path)[6:]
