"""An attempt of a run: stops, the job's time limit, ownership, hangs."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from gapo_megatron.clock import Expectation
from gapo_megatron.errors import ConfigError, FencedError
from gapo_megatron.io.run_folder import is_finished, mark_finished
from gapo_megatron.run import attempt as module
from tests.attempt_setup import make_attempt
from tests.dist import run_distributed, single_rank
from tests.messages import mentions
from tests.waiting import HANG_S, wait_until


class Clock:
    """Clock of the tested module, moved only by the test."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_stop_file_stops_and_a_fresh_attempt_starts_unasked(tmp_path: Path, clock: Clock) -> None:
    with single_rank():
        attempt = make_attempt(tmp_path, folder=tmp_path)
        assert not attempt.stop_asked() and not attempt.must_stop(Expectation(0, 0))
        (tmp_path / "stop").touch()
        clock.now += 0.99
        assert not attempt.stop_asked(), "looks at the shared disk once a second at most"
        clock.now += 0.02
        assert attempt.stop_asked() and attempt.must_stop(Expectation(0, 0))
        attempt.end("stopped")
        assert (tmp_path / "outcome").read_text() == "stopped\n"
        (tmp_path / "next").mkdir()
        assert not make_attempt(tmp_path, name="7.1", folder=tmp_path / "next").stop_asked()


@pytest.mark.parametrize(("left_s", "stops"), [(70.1, False), (69.9, True), (-5.0, True)])
def test_the_jobs_time_limit_stops_before_what_no_longer_fits(
    tmp_path: Path, clock: Clock, left_s: float, stops: bool
) -> None:
    """60 s for the next stage and a save, and 10 s of margin, counted by the job's clock."""
    with single_rank():
        attempt = make_attempt(tmp_path, job_end_unix_s=clock.now + 1000)
        assert not attempt.must_stop(Expectation(40, 60))
        attempt._job_end = clock.now + left_s
        assert attempt.must_stop(Expectation(40, 60)) is stops


def test_a_time_limit_too_short_for_any_work_is_said_at_once(tmp_path: Path, clock: Clock) -> None:
    with single_rank():
        attempt = make_attempt(tmp_path, job_end_unix_s=clock.now + 45)
        with pytest.raises(ConfigError, match=r"too short.*45 s.*40 s.*stop_margin_s.*10"):
            attempt.must_stop(Expectation(40, 60))


def test_the_first_part_is_tried_if_it_may_just_fit(tmp_path: Path, clock: Clock) -> None:
    """One slow rollout of an earlier attempt must not keep a run from ever working again."""
    with single_rank():
        attempt = make_attempt(tmp_path, job_end_unix_s=clock.now + 65)
        assert not attempt.must_stop(Expectation(40, 60))
        assert attempt.must_stop(Expectation(40, 60))


def test_stage_times_outlive_an_attempt(tmp_path: Path) -> None:
    with single_rank():
        assert make_attempt(tmp_path).stage_seconds() == {}
        make_attempt(tmp_path).keep_stage_seconds({"rollout": [1.5, 2.5]})
        assert make_attempt(tmp_path, name="7.1").stage_seconds() == {"rollout": [1.5, 2.5]}


def test_work_that_cannot_be_saved_is_broken_off_when_that_loses_less(
    tmp_path: Path, clock: Clock
) -> None:
    with single_rank():
        attempt = make_attempt(tmp_path, folder=tmp_path)
        assert not attempt.patience(Expectation(30, 30))(1)
        (tmp_path / "stop").touch()
        clock.now += 1.01
        assert attempt.patience(Expectation(30, 30))(1), "29 s to go, 1 s to repeat"
        assert not attempt.patience(Expectation(30, 30))(22), "8 s to go, 22 s to repeat"
        assert attempt.patience(Expectation(300, 300))(200), (
            "100 s to go: more than the margin of 10 s"
        )
        assert attempt.patience(Expectation(30, 30))(31), "longer than ever: no telling how long"
        assert attempt.patience(Expectation(0, 0))(5), "the first of its kind: no telling how long"


def test_ownership_is_lost_to_a_newer_attempt(tmp_path: Path) -> None:
    with single_rank():
        attempt = make_attempt(tmp_path)
        attempt.require_ownership()
        (tmp_path / "OWNER").write_text("8.0\n")
        with pytest.raises(FencedError, match=r"8\.0.*7\.0"):
            attempt.must_stop(Expectation(0, 0))
        (tmp_path / "OWNER").write_bytes(b"\xff\0")  # left by a full or damaged disk
        with pytest.raises(FencedError, match=r"7\.0"):
            attempt.require_ownership()
        (tmp_path / "OWNER").unlink()
        with pytest.raises(FencedError, match="OWNER"):
            attempt.require_ownership()


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[1]",
        b'{"rollout": 1}',
        b'{"rollout": []}',
        b'{"rollout": [-1]}',
        b'{"rollout": [true]}',
        b'{"rollout": [NaN]}',
    ],
)
def test_damaged_stage_times_are_measured_anew(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "stage_seconds.json").write_bytes(content)
    with single_rank(), caplog.at_level(logging.WARNING):
        assert make_attempt(tmp_path).stage_seconds() == {}
    assert str(tmp_path / "stage_seconds.json") in caplog.text


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b"[5]", b"{}", b'{"num_steps": null}', b'{"num_steps": "5"}', b"5"],
)
def test_a_damaged_word_that_a_run_is_finished_is_refused_by_name(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "finished.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=mentions(path, "remove")):
        is_finished(tmp_path, num_steps=5)


def test_the_launcher_hears_of_an_end_when_all_ranks_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 hosts the store: if it exits early, a rank that is still starting fails."""
    told_before = []

    def barrier(*, group: object) -> None:
        told_before.append((tmp_path / "outcome").exists())

    with single_rank():
        attempt = make_attempt(tmp_path, folder=tmp_path)
        monkeypatch.setattr(module.dist, "barrier", barrier)
        attempt.end("finished")
    assert told_before == [False]
    assert (tmp_path / "outcome").read_text() == "finished\n"


def _agree(folder: Path) -> list[bool]:
    rank = dist.get_rank()
    attempt = make_attempt(folder / str(rank))
    found = [attempt.agree(rank == 0), attempt.agree(rank == 1)]
    for asked in (1, 0):
        if rank == asked:
            attempt._on_signal(signal.SIGUSR1, None)
        found.append(attempt.must_stop(Expectation(0, 0)))
    return found


def test_ranks_agree_on_what_rank_0_sees(tmp_path: Path) -> None:
    """And a stop that another rank is asked for is none."""
    assert run_distributed(_agree, 2, tmp_path) == [[True, False, False, True]] * 2


def test_a_run_of_more_steps_is_not_finished(tmp_path: Path) -> None:
    assert not is_finished(tmp_path, num_steps=5)
    mark_finished(tmp_path, num_steps=5)
    assert is_finished(tmp_path, num_steps=5) and is_finished(tmp_path, num_steps=4)
    assert not is_finished(tmp_path, num_steps=6)


PROGRAM = """
import os, signal, sys, time
import torch.distributed as dist
from gapo_megatron.run.attempt import Attempt
from gapo_megatron.run.fail_fast import fail_fast

def somewhere_deep():
    open(sys.argv[1] + "/ready", "w").close()
    {body}

with fail_fast():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    attempt = Attempt.begin(sys.argv[1], hang_timeout_s={hang_timeout_s}, stop_margin_s=1)
    somewhere_deep()
    attempt.end("finished")
"""


def program(body: str, *, hang_timeout_s: float = 600) -> str:
    return PROGRAM.format(body=body, hang_timeout_s=hang_timeout_s)


def run(
    body: str, run_dir: Path, *, hang_timeout_s: float = 600, **env: str
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", program(body, hang_timeout_s=hang_timeout_s), str(run_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | env,
    )
    # Not by reading a line: `communicate` would lose the output buffered behind it.
    wait_until(lambda: (run_dir / "ready").exists() or process.poll() is not None, "it is ready")
    assert (run_dir / "ready").exists(), process.communicate()[1]
    return process


def test_a_hang_shows_where_and_ends_even_in_a_c_call_that_holds_the_interpreter(
    tmp_path: Path,
) -> None:
    # A regular expression with catastrophic backtracking never returns to Python. Only from here on
    # the limit is short: what comes before may take its time.
    body = "import re; attempt._hang_timeout_s = 1; attempt.alive(); re.match('(a*)*b', 'a' * 64)"
    process = run(body, tmp_path)
    _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert "Timeout (0:00:01)!" in errors and "in somewhere_deep" in errors


def test_progress_starts_the_watch_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watches: list[float] = []
    monkeypatch.setattr(module, "end_after", watches.append)
    with single_rank():
        attempt = make_attempt(tmp_path, hang_timeout_s=7)
        for progress in (
            attempt.alive,
            attempt.stop_asked,
            lambda: attempt.enter("rollout"),
            lambda: attempt.must_stop(Expectation(0, 0)),
        ):
            watches.clear()
            progress()
            assert set(watches) == {7}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_without_a_launcher_the_second_signal_ends_it(tmp_path: Path, number: int) -> None:
    body = "[os.kill(os.getpid(), NUMBER), print(attempt.stop_asked()), sys.stdout.flush()]"
    again = "os.kill(os.getpid(), NUMBER), time.sleep(3600)"
    process = run(f"{body}; {again}".replace("NUMBER", str(int(number))), tmp_path)
    output, errors = process.communicate(timeout=HANG_S)
    assert output == "True\n" and process.returncode == -number
    assert "in somewhere_deep" in errors


@contextmanager
def stuck_in_a_c_call(run_dir: Path, log: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A rank without a launcher whose main thread waits for a store that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server, log.open("wb") as file:
        server.settimeout(HANG_S)
        body = f"dist.TCPStore('127.0.0.1', {server.getsockname()[1]})"
        process = subprocess.Popen(
            [sys.executable, "-c", program(body), str(run_dir)], stderr=file, env=os.environ | env
        )
        try:
            # Who has connected is in the constructor, which waits for an answer.
            connection, _ = server.accept()
            with connection:
                yield process
        finally:
            process.kill()
            process.wait(HANG_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_two_signals_end_a_rank_that_is_in_a_c_call(tmp_path: Path, number: int) -> None:
    log = tmp_path / "log"
    with stuck_in_a_c_call(tmp_path, log) as process:
        process.send_signal(number)
        wait_until(log.read_bytes, "the first one is announced")
        assert "somewhere_deep" not in log.read_text() and process.poll() is None
        process.send_signal(number)
        assert process.wait(HANG_S) == 128 + number
    assert "in somewhere_deep" in log.read_text()


def test_the_one_sigterm_of_torchrun_shows_where_a_rank_is(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with stuck_in_a_c_call(tmp_path, log, TORCHELASTIC_RUN_ID="x") as process:
        process.terminate()
        wait_until(lambda: "in somewhere_deep" in log.read_text(), "its stacks are shown")
        assert process.poll() is None, "a request to save and end"


def test_signals_of_a_forked_child_are_its_own(tmp_path: Path) -> None:
    body = "os.fork() or os._exit(signal.set_wakeup_fd(-1) + 1); print(os.wait()[1])"
    output, _ = run(body, tmp_path).communicate(timeout=HANG_S)
    assert output == "0\n"


def test_sigquit_shows_where_a_rank_is_and_it_goes_on(tmp_path: Path) -> None:
    process = run("os.kill(os.getpid(), signal.SIGQUIT), print('goes on')", tmp_path)
    output, errors = process.communicate(timeout=HANG_S)
    assert output == "goes on\n" and process.returncode == 0
    assert "in somewhere_deep" in errors


def test_a_rank_that_its_launcher_ends_shows_where_it_was_and_dies(tmp_path: Path) -> None:
    (tmp_path / "OWNER").write_text("7.0")
    launched = {"GAPO_ATTEMPT": "7.0", "GAPO_ATTEMPT_DIR": str(tmp_path)}
    process = run("time.sleep(3600)", tmp_path, **launched)
    process.terminate()
    _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == -signal.SIGTERM
    assert "in somewhere_deep" in errors


def test_an_error_is_left_for_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "OWNER").write_text("7.3\n")
    env = {"GAPO_ATTEMPT": "7.3", "GAPO_ATTEMPT_DIR": str(tmp_path), "RANK": "5"}
    before = time.time()
    process = run("raise RuntimeError('two\\nlines')", tmp_path, **env)
    process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    record = json.loads((tmp_path / "failure_5.json").read_text())
    assert (record["rank"], record["exit_code"]) == (5, 1)
    assert (record["error"], record["message"]) == ("RuntimeError", "two lines")
    assert "in somewhere_deep" in record["traceback"]
    assert before <= record["unix_s"] <= time.time()


def test_an_attempt_that_is_not_the_newest_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "OWNER").write_text("7.4\n")
    code = program("pass")
    env = {"GAPO_ATTEMPT": "7.3", "GAPO_ATTEMPT_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=os.environ | env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3 and "belongs to attempt 7.4" in done.stderr
    # An attempt started by hand, without a launcher, is the newest.
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], text=True)
    assert done.returncode == 0 and "7.4" not in (tmp_path / "OWNER").read_text()
