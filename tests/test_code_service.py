"""Programs that run on another machine: who may, who waits, and what a lost service leaves."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gapo_megatron.errors import ConfigError
from gapo_megatron.rewards.code import verify
from gapo_megatron.rewards.sandbox import (
    SYSTEM_PYTHON,
    Limits,
    ProgramError,
    SandboxError,
    server,
    start_sandbox,
)
from gapo_megatron.rewards.sandbox import service as client
from gapo_megatron.rewards.sandbox.check import check_sandbox
from gapo_megatron.types import Outcome, Verdict
from tests.sandbox_setup import needs_sandbox, processes_with, running_server, service

__all__ = ["service"]  # a fixture
pytestmark = needs_sandbox

SUM = {"inputs": ["3 4", "10 20"], "outputs": ["7", "30"]}
ASSERTS = {"test_list": ["assert add(3, 4) == 7"]}
GOOD_SUM = "a, b = map(int, input().split())\nprint(a + b)"
GOOD_ADD = "def add(a, b): return a + b"
CORRECT = Verdict(Outcome.CORRECT)


def judge(program: str, tests: object, *, sandbox: str, **limits: int) -> Verdict:
    return verify(f"```\n{program}\n```", json.dumps(tests), sandbox=sandbox, limits=limits)


def sleeping(sandbox: str, *, seconds: int, **limits: int) -> threading.Thread:
    """A thread with a program that takes a place; it has it when this returns."""
    started = threading.Event()
    limits = {"wall_s": 300, "total_s": 300} | limits

    def run() -> None:
        with start_sandbox(Limits(**limits), sandbox=sandbox, python="") as box:
            program = f"import time\ntime.sleep({seconds})\nprint(7)"
            box.send({"program": program, "prelude": ""})
            box.send({"stdin": ""})
            started.set()
            box.receive()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(60)
    return thread


@pytest.mark.parametrize(
    ("program", "tests", "reason"),
    [
        (GOOD_SUM, SUM, None),
        ("print(8)", SUM, "test 1: another output"),
        ("while True: pass", SUM, "longer than 2 s|CPU time"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", SUM, "killed by signal 11"),
        (GOOD_ADD, ASSERTS, None),
        ("def add(a, b): return a - b", ASSERTS, "AssertionError"),
        ("import os\nos._exit(0)", ASSERTS, "the program broke off"),
        # What a program writes cannot pass for the service's word.
        ("import os\nfor n in range(3, 64):\n    try: os.write(n, b'sgone\\n')\n"
         "    except OSError: pass\nos._exit(0)", ASSERTS, "something other than a value"),
    ],
)  # fmt: skip
def test_verdicts_are_those_of_bubblewrap(service, program, tests, reason):
    verdict = judge(program, tests, sandbox=service, cpu_s=2, wall_s=2)
    if reason is None:
        assert verdict == CORRECT
    else:
        assert verdict.outcome is Outcome.WRONG
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(verdict.reason)


def test_the_check_tries_the_walls_over_there(service):
    check_sandbox(sandbox=service, python="", limits=Limits(memory_mib=128))


def test_larger_limits_than_the_service_has_are_refused_at_the_start(service):
    with pytest.raises(ConfigError, match=r"total_s \(601\) is more than .* allows \(600\)"):
        check_sandbox(sandbox=service, python="", limits=Limits(total_s=601))
    with pytest.raises(ConfigError, match=r"memory_mib \(4096\) is more than"):
        check_sandbox(sandbox=service, python="", limits=Limits(memory_mib=4096))


def test_a_service_may_allow_less_than_a_minute(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with running_server(tmp_path, "--max-total-s", "15", num_programs=1) as (_, sandbox):
        check_sandbox(sandbox=sandbox, python="", limits=Limits(total_s=15, memory_mib=128))
        with pytest.raises(ConfigError, match=r"total_s \(16\).*reward\.timeout_s.*--max-total-s"):
            check_sandbox(sandbox=sandbox, python="", limits=Limits(total_s=16))


def test_a_service_may_listen_on_ipv6(tmp_path, monkeypatch):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    monkeypatch.setenv("HOME", str(tmp_path))
    with running_server(tmp_path, num_programs=1, host="::1") as (_, sandbox):
        assert sandbox.startswith("tcp://[::1]:")
        assert judge(GOOD_SUM, SUM, sandbox=sandbox) == CORRECT


def test_strangers_neither_end_a_service_nor_hold_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(server, "MAX_GREETINGS", 2)
    monkeypatch.setattr(server, "GREETING_TIMEOUT_S", 0.5)
    client.make_secret()
    options = {"python": SYSTEM_PYTHON, "num_programs": 1, "largest": Limits()}
    service = server.Server(host="127.0.0.1", port=0, **options)
    address = ("127.0.0.1", service.port)
    original, fails = threading.Thread.start, [True]

    def start(thread: threading.Thread) -> None:
        if isinstance(thread._target, functools.partial) and fails:  # one of the service's
            fails.clear()
            raise RuntimeError("can't start new thread")
        original(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    threading.Thread(target=service.serve, daemon=True).start()
    with socket.create_connection(address) as stranger:
        stranger.settimeout(60)
        assert stranger.recv(1) == b""  # there was no thread for it
    num_threads = threading.active_count()
    strangers = [socket.create_connection(address) for _ in range(6)]
    until = time.monotonic() + 60
    while strangers:  # each sends a little now and then, and is sent away for it
        assert time.monotonic() < until
        assert threading.active_count() <= num_threads + 2
        for stranger in list(strangers):
            try:
                stranger.send(b"x")
            except OSError:
                strangers.remove(stranger)
                stranger.close()
        time.sleep(0.1)
    assert judge(GOOD_SUM, SUM, sandbox=f"tcp://127.0.0.1:{service.port}") == CORRECT


def test_a_client_that_pauses_costs_its_program_no_time(service):
    with start_sandbox(Limits(total_s=2), sandbox=service, python="") as box:
        box.send({"program": "print(7)", "prelude": ""})
        for _ in range(2):
            assert box.ask({"stdin": ""}) == {"stdout": "7\n", "failure": ""}
            time.sleep(2.5)
        assert box.ask({"stdin": ""}) == {"stdout": "7\n", "failure": ""}


def test_who_has_another_secret_is_refused(service, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    client.make_secret()
    verdict = judge(GOOD_SUM, SUM, sandbox=service)
    assert verdict.outcome is Outcome.UNKNOWN
    assert "the secret is another than this service's" in verdict.reason
    with pytest.raises(ConfigError, match="the secret is another"):
        check_sandbox(sandbox=service, python="", limits=Limits())


def test_a_secret_has_to_be_there_and_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SandboxError, match=r"No such file.*copy the file"):
        client.read_secret()
    client.make_secret()
    secret = client.read_secret()
    client.make_secret()
    assert client.read_secret() == secret
    assert len(secret) == 64
    path = Path(client.SECRET_PATH).expanduser()
    path.chmod(0o640)
    with pytest.raises(SandboxError, match=r"mode 640.*chmod 600"):
        client.read_secret()
    path.chmod(0o600)
    path.write_text("\n")
    with pytest.raises(SandboxError, match="is empty"):
        client.read_secret()


def test_whoever_talks_nonsense_is_sent_away_and_takes_no_place(service):
    host, _, port = service.removeprefix("tcp://").partition(":")
    silent = socket.create_connection((host, int(port)))
    for line in (b"\n", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.settimeout(60)
            stranger.sendall(line)
            answer = b"".join(iter(lambda: stranger.recv(4096), b""))
            assert answer.splitlines()[1:] == [b"sthe secret is another than this service's"]
    assert judge(GOOD_SUM, SUM, sandbox=service) == CORRECT
    silent.close()


def test_a_queue_costs_a_program_none_of_its_time(service):
    other = sleeping(service, seconds=3)
    start = time.monotonic()
    assert judge(GOOD_SUM, SUM, sandbox=service, wall_s=2, total_s=2) == CORRECT
    assert time.monotonic() - start > 2
    other.join()


def test_one_place_is_enough_for_programs_that_need_two_sandboxes(service):
    with ThreadPoolExecutor(4) as pool:
        verdicts = pool.map(lambda _: judge(GOOD_ADD, ASSERTS, sandbox=service), range(6))
        assert set(verdicts) == {CORRECT}


def test_the_place_of_a_client_that_has_gone_is_free_again(service):
    limits = Limits(wall_s=300, total_s=300, disk_mib=59)
    with start_sandbox(limits, sandbox=service, python="") as box:
        box.send({"program": "import time\ntime.sleep(299)", "prelude": ""})
        box.send({"stdin": ""})
        box._send(client.READ + b"\n")  # so that the server waits for the program
        assert processes_with(str(59 * 2**20))
    start = time.monotonic()
    assert judge(GOOD_SUM, SUM, sandbox=service) == CORRECT
    assert time.monotonic() - start < 60
    assert not processes_with(str(59 * 2**20))


def test_a_sandbox_that_dies_over_there_says_nothing_about_the_program(service):
    limits = Limits(disk_mib=58)
    with start_sandbox(limits, sandbox=service, python="") as box:
        box.send({"program": "import time\ntime.sleep(99)", "prelude": ""})
        for process in processes_with(str(58 * 2**20)):
            os.kill(process, signal.SIGKILL)
        with pytest.raises(SandboxError, match=r"service at 127.*ended with code -9"):
            box.ask({"stdin": ""})


def test_a_server_that_is_killed_or_falls_silent_leaves_programs_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(client, "START_TIMEOUT_S", 0.5)  # what a silent service gets beside wall_s
    limits = {"wall_s": 1, "total_s": 60}
    with running_server(tmp_path, num_programs=2) as (running, sandbox):
        with ThreadPoolExecutor(1) as pool:
            running.send_signal(signal.SIGSTOP)
            with monkeypatch.context() as patch:
                patch.setattr(client, "CONNECT_TIMEOUT_S", 0.5)
                silent = judge(GOOD_SUM, SUM, sandbox=sandbox, **limits)
            running.send_signal(signal.SIGCONT)
            assert silent.outcome is Outcome.UNKNOWN
            assert "was lost: timed out" in silent.reason

            with start_sandbox(Limits(**limits), sandbox=sandbox, python="") as box:
                box.send({"program": "print(7)", "prelude": ""})
                running.send_signal(signal.SIGSTOP)
                with pytest.raises(SandboxError, match="was lost: timed out"):
                    box.ask({"stdin": ""})
                running.send_signal(signal.SIGCONT)

            sleep = "import time\ntime.sleep(99)"
            sleeper = {"wall_s": 99, "total_s": 99, "disk_mib": 57}
            verdict = pool.submit(judge, sleep, SUM, sandbox=sandbox, **sleeper)
            until = time.monotonic() + 60
            while not processes_with(str(57 * 2**20)):
                assert time.monotonic() < until
                time.sleep(0.02)
            running.kill()
            killed = verdict.result(timeout=60)
            assert killed.outcome is Outcome.UNKNOWN
            assert "was lost" in killed.reason
            assert time.monotonic() < until
        while processes_with(str(57 * 2**20)):
            assert time.monotonic() < until, "processes are left behind"
            time.sleep(0.02)
        refused = judge(GOOD_SUM, SUM, sandbox=sandbox)
        assert refused.outcome is Outcome.UNKNOWN
        # The kernel may still take a connection for a process that it is ending, and reset it.
        gone = "cannot be reached|was lost"
        assert re.search(gone, refused.reason)
        with pytest.raises(ConfigError, match=rf"isolated there: .* ({gone})"):
            check_sandbox(sandbox=sandbox, python="", limits=Limits())


def test_a_late_program_is_wrong_through_the_service_too(service):
    with start_sandbox(Limits(wall_s=1), sandbox=service, python="") as box:
        box.send({"program": "import time\ntime.sleep(9)", "prelude": ""})
        with pytest.raises(ProgramError, match="took longer than 1 s"):
            box.ask({"stdin": ""})
