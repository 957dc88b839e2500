"""Programs that run on another machine: who may, who waits, and what a lost service leaves."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from gapo_megatron.errors import ConfigError
from gapo_megatron.rewards.sandbox import (
    SYSTEM_PYTHON,
    Limits,
    ProgramError,
    SandboxError,
    process,
    seal,
    server,
    start_sandbox,
)
from gapo_megatron.rewards.sandbox import service as client
from gapo_megatron.rewards.sandbox.check import check_sandbox
from gapo_megatron.types import Outcome
from tests.sandbox_setup import (
    CORRECT,
    PATIENT,
    SUM,
    judge,
    needs_sandbox,
    processes_with,
    running_server,
    service,
)
from tests.waiting import HANG_S, wait_until

__all__ = ["service"]  # a fixture
pytestmark = needs_sandbox

ASSERTS = {"test_list": ["assert add(3, 4) == 7"]}
GOOD_SUM = "a, b = map(int, input().split())\nprint(a + b)"
GOOD_ADD = "def add(a, b): return a + b"


@contextmanager
def server_in_this_process() -> Iterator[tuple[server.Server, str]]:
    """With one place; and `reward.sandbox` for it. The secret must be there."""
    served = server.Server(
        host="127.0.0.1", port=0, python=SYSTEM_PYTHON, num_programs=1, largest=Limits(**PATIENT)
    )
    listener = served._listener

    class IsOver(Exception):
        pass

    def serve() -> None:
        with suppress(IsOver):
            served.serve()

    def accept() -> NoReturn:
        raise IsOver

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield served, f"tcp://127.0.0.1:{served.port}"
    finally:
        # It goes on after errors of the system: what ends it is one of another kind.
        served._listener = SimpleNamespace(accept=accept)
        listener.shutdown(socket.SHUT_RDWR)  # wakes it where it waits for a client
        thread.join(HANG_S)
        listener.close()
        for stranger in served._strangers:
            stranger.socket.close()
        served._selector.close()
        served._places.shutdown()
        served._second_places.shutdown()
        assert not thread.is_alive()


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    client.make_secret()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Of the sandboxes of this process: time passes only where a test sets `now`."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.mark.parametrize(
    ("program", "tests", "reason"),
    [
        (GOOD_SUM, SUM, None),
        ("print(8)", SUM, "test 1: another output"),
        ("while True: pass", SUM, "CPU time"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", SUM, "killed by signal 11"),
        (GOOD_ADD, ASSERTS, None),
        ("def add(a, b): return a - b", ASSERTS, "AssertionError"),
        ("import os\nos._exit(0)", ASSERTS, "the program exited early"),
        # What a program writes cannot pass for the service's word.
        ("import os\nfor n in range(3, 64):\n    try: os.write(n, b'sgone\\n')\n"
         "    except OSError: pass\nos._exit(0)", ASSERTS, "not a JSON object"),
    ],
)  # fmt: skip
def test_verdicts_are_those_of_bubblewrap(service, program, tests, reason):
    verdict = judge(program, tests, sandbox=service, cpu_s=1 if "while True" in program else 60)
    if reason is None:
        assert verdict == CORRECT
    else:
        assert verdict.outcome is Outcome.WRONG
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(verdict.reason)


def test_the_check_tries_the_walls_over_there(service):
    check_sandbox(sandbox=service, python="", limits=Limits(memory_mib=128))


def test_larger_limits_than_the_service_has_are_refused_at_the_start(service):
    with pytest.raises(ConfigError, match=r"total_s \(601\).*600"):
        check_sandbox(sandbox=service, python="", limits=Limits(total_s=601))
    with pytest.raises(ConfigError, match=r"memory_mib \(4096\)"):
        check_sandbox(sandbox=service, python="", limits=Limits(memory_mib=4096))


def test_a_service_may_allow_less_than_a_minute(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with running_server(tmp_path, "--max-total-s", "59", num_programs=1) as (_, sandbox):
        check_sandbox(sandbox=sandbox, python="", limits=Limits(total_s=59, memory_mib=128))
        with pytest.raises(ConfigError, match=r"total_s \(60\).*reward\.timeout_s.*--max-total-s"):
            check_sandbox(sandbox=sandbox, python="", limits=Limits(total_s=60))


def test_a_service_may_listen_on_ipv6(tmp_path, monkeypatch):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    monkeypatch.setenv("HOME", str(tmp_path))
    with running_server(tmp_path, num_programs=1, host="::1") as (_, sandbox):
        assert sandbox.startswith("tcp://[::1]:")
        assert judge(GOOD_SUM, SUM, sandbox=sandbox) == CORRECT


def greet(address: tuple[str, int], wish: bytes) -> bytes:
    """What the service answers to a wish of who has the secret."""
    with socket.create_connection(address) as connection, connection.makefile("rb") as lines:
        connection.settimeout(HANG_S)
        greeting = lines.readline().rstrip(b"\n")
        connection.sendall(seal.proof(client.read_secret(), greeting, wish) + b" " + wish + b"\n")
        return lines.readline()


def test_strangers_who_stay_keep_no_client_out(secret, monkeypatch):
    monkeypatch.setattr(server, "GREETING_TIMEOUT_S", 1e6)  # no time sends them away
    with server_in_this_process() as (served, sandbox), ExitStack() as stack:
        address = ("127.0.0.1", served.port)
        strangers = [
            stack.enter_context(socket.create_connection(address))
            for _ in range(server.MAX_STRANGERS + 40)
        ]
        assert judge(GOOD_SUM, SUM, sandbox=sandbox) == CORRECT
        for number, stranger in enumerate(strangers[:41]):  # the last one for the client
            stranger.settimeout(HANG_S)
            said = b"".join(iter(lambda one=stranger: one.recv(4096), b""))
            assert len(said.splitlines()) == 1, number
        assert len(served._strangers) <= server.MAX_STRANGERS


@pytest.mark.system
def test_a_service_that_strangers_fill_serves_on(service):
    host, _, port = service.removeprefix("tcp://").partition(":")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1300):
            stack.enter_context(socket.create_connection((host, int(port))))
        check_sandbox(sandbox=service, python="", limits=Limits(memory_mib=128))


def test_a_crowd_from_one_machine_sends_nobody_of_another_away(secret, monkeypatch):
    monkeypatch.setattr(server, "GREETING_TIMEOUT_S", 1e6)
    monkeypatch.setattr(server, "MAX_STRANGERS", 3)
    with server_in_this_process() as (served, _), ExitStack() as stack:
        address = ("127.0.0.1", served.port)
        other = socket.create_connection(address, source_address=("127.0.0.2", 0))
        stack.enter_context(other).settimeout(HANG_S)
        crowd = [stack.enter_context(socket.create_connection(address)) for _ in range(9)]
        for stranger in crowd[:-2]:
            stranger.settimeout(HANG_S)
            while stranger.recv(4096):
                pass  # until it is sent away
        other.sendall(b"me\n")
        _, refusal = b"".join(iter(lambda: other.recv(4096), b"")).splitlines()
        assert b"secret" in refusal


def test_a_stranger_has_a_short_time_however_often_it_speaks(secret, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    passes = SimpleNamespace(monotonic=lambda: clock.now, sleep=None)
    monkeypatch.setattr(server, "time", passes)
    with server_in_this_process() as (served, sandbox):
        with socket.create_connection(("127.0.0.1", served.port)) as stranger:
            stranger.settimeout(HANG_S)
            assert stranger.recv(4096).endswith(b"\n")
            clock.now = server.GREETING_TIMEOUT_S / 2
            stranger.sendall(b"x")
            wait_until(lambda: served._strangers[0].answer == b"x", "its first letter")
            clock.now = server.GREETING_TIMEOUT_S
            stranger.sendall(b"x")
            assert stranger.recv(4096) == b""
        assert judge(GOOD_SUM, SUM, sandbox=sandbox) == CORRECT


def test_a_service_without_threads_or_files_serves_on_when_it_has_some(secret, monkeypatch):
    original, fails = threading.Thread.start, [True]

    def start(thread: threading.Thread) -> None:
        if "program" in thread.name and fails:
            fails.clear()
            raise RuntimeError("can't start new thread")
        original(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with server_in_this_process() as (served, sandbox):
        address = ("127.0.0.1", served.port)
        accept, full = served._listener.accept, [OSError(errno.EMFILE, "Too many open files")]

        def accept_soon() -> tuple[socket.socket, object]:
            if full:
                raise full.pop()
            return accept()

        monkeypatch.setattr(served, "_listener", SimpleNamespace(accept=accept_soon))
        wish = {"limits": asdict(Limits()), "is_second": False, "number": "0" * 32}
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(greet, address, json.dumps(wish).encode())
            wait_until(lambda: not fails, "the thread that does not start")
            assert judge(GOOD_SUM, SUM, sandbox=sandbox) == CORRECT
            assert waiting.result(HANG_S).endswith(b" +\n")


@pytest.fixture
def door(secret) -> Iterator[Callable[[str], bytes]]:
    """What a service of one place says to a wish; the place is free afterwards."""
    with server_in_this_process() as (served, _):
        yield lambda wish: greet(("127.0.0.1", served.port), wish.encode())
        assert served._places.submit(int).result(HANG_S) == 0


@pytest.mark.parametrize("name", [*asdict(Limits())])
@pytest.mark.parametrize("value", ["NaN", "null", '"1"', "true", "0", "-1", "1.0", "[]", "1e999"])
def test_a_limit_that_is_none_is_refused_by_name(door, name, value):
    limits = {**asdict(Limits()), name: "?"}
    wish = json.dumps({"limits": limits, "is_second": False}).replace('"?"', value)
    refusal = door(wish)
    assert refusal.startswith(b"s")
    assert name.encode() in refusal


@pytest.mark.parametrize(
    ("wish", "named"),
    [
        ("", b"JSON"),
        ("[" * 3000, b"nested"),
        ("[]", b"version"),
        ('{"limits": [], "is_second": false}', b"version"),
        ('{"limits": {"\\ud800\\n": 1}, "is_second": false}', b"version"),
        ('{"limits": {}, "is_second": false}', b"cpu_s"),
        (json.dumps({"limits": asdict(Limits()), "is_second": None}), b"is_second"),
        (json.dumps({"limits": asdict(Limits()), "is_second": False}), b"number"),
        (json.dumps({"limits": asdict(Limits()), "is_second": False, "number": "x"}), b"number"),
        (json.dumps({"limits": asdict(Limits(total_s=10**3000))}), b"is_second"),
        (json.dumps({"limits": asdict(Limits(cpu_s=10**3000)), "is_second": True}), b"cpu_s"),
    ],
)
def test_a_wish_of_another_form_is_refused_by_name(door, wish, named):
    refusal = door(wish)
    assert refusal.startswith(b"s")
    assert refusal.endswith(b"\n")
    assert named in refusal


def test_second_sandboxes_have_places_too(secret, monkeypatch):
    with (
        server_in_this_process() as (_, sandbox),
        start_sandbox(Limits(**PATIENT), sandbox=sandbox, python="", is_second=True) as box,
    ):
        box.send({"program": "print(7)", "prelude": ""})
        with monkeypatch.context() as patch:
            patch.setattr(client, "QUEUE_TIMEOUT_S", 0.5)  # as long as it waits, in vain
            patch.setattr(client, "START_TIMEOUT_S", 0.0)
            with (
                start_sandbox(Limits(), sandbox=sandbox, python="", is_second=True) as other,
                pytest.raises(SandboxError, match="timed out"),
            ):
                other.send({"program": "print(7)", "prelude": ""})
        assert judge(GOOD_SUM, SUM, sandbox=sandbox) == CORRECT  # a first one has its own
        assert box.ask({"stdin": ""}) == {"stdout": "7\n", "failure": ""}


def test_a_client_that_pauses_costs_its_program_no_time(secret, clock):
    with (
        server_in_this_process() as (_, sandbox),
        start_sandbox(Limits(total_s=100), sandbox=sandbox, python="") as box,
    ):
        box.send({"program": "print(7)", "prelude": ""})
        for _ in range(3):
            assert box.ask({"stdin": ""}) == {"stdout": "7\n", "failure": ""}
            clock.now += 1000


def test_who_has_another_secret_is_refused(service, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    client.make_secret()
    verdict = judge(GOOD_SUM, SUM, sandbox=service)
    assert verdict.outcome is Outcome.UNKNOWN
    assert "secret" in verdict.reason
    with pytest.raises(ConfigError, match="secret"):
        check_sandbox(sandbox=service, python="", limits=Limits())


def test_a_secret_has_to_be_there_and_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SandboxError, match=r"No such file"):
        client.read_secret()
    client.make_secret()
    secret = client.read_secret()
    client.make_secret()
    assert client.read_secret() == secret
    assert len(secret) == 64
    path = Path(client.SECRET_PATH).expanduser()
    path.chmod(0o640)
    with pytest.raises(SandboxError, match=r"640.*chmod 600"):
        client.read_secret()
    path.chmod(0o600)
    path.write_text("\n")
    with pytest.raises(SandboxError, match="empty"):
        client.read_secret()


def test_whoever_talks_nonsense_is_sent_away_and_takes_no_place(service):
    host, _, port = service.removeprefix("tcp://").partition(":")
    silent = socket.create_connection((host, int(port)))
    for line in (b"\n", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.settimeout(HANG_S)
            stranger.sendall(line)
            answer = b"".join(iter(lambda: stranger.recv(4096), b""))
            _, refusal = answer.splitlines()
            assert refusal.startswith(b"s")
            assert b"secret" in refusal
    assert judge(GOOD_SUM, SUM, sandbox=service) == CORRECT
    silent.close()


def test_a_queue_costs_a_program_none_of_its_time(secret, clock, monkeypatch):
    with server_in_this_process() as (served, sandbox), ThreadPoolExecutor(1) as pool:
        submit, queued = served._places.submit, threading.Event()

        def noted(*call: Any) -> Future[None]:
            future = submit(*call)
            queued.set()
            return future

        with start_sandbox(Limits(**PATIENT), sandbox=sandbox, python="") as box:
            box.send({"program": "print(7)", "prelude": ""})
            # It has the place, and the service waits for its client alone: the clock may go on.
            assert box.ask({"stdin": ""}) == {"stdout": "7\n", "failure": ""}
            monkeypatch.setattr(served._places, "submit", noted)
            verdict = pool.submit(judge, GOOD_SUM, SUM, sandbox=sandbox)
            assert queued.wait(HANG_S)
            clock.now += 1000
            assert box.ask({"stdin": ""}) == {"stdout": "7\n", "failure": ""}
            assert not verdict.done()
        assert verdict.result(timeout=HANG_S) == CORRECT


def test_one_place_is_enough_for_programs_that_need_two_sandboxes(service):
    with ThreadPoolExecutor(4) as pool:
        verdicts = pool.map(lambda _: judge(GOOD_ADD, ASSERTS, sandbox=service), range(6))
        assert set(verdicts) == {CORRECT}


def test_the_place_of_a_client_that_has_gone_is_free_again(service):
    limits = Limits(wall_s=600, total_s=600, disk_mib=59)
    with start_sandbox(limits, sandbox=service, python="") as box:
        box.send({"program": "import time\ntime.sleep(3600)", "prelude": ""})
        box.send({"stdin": ""})
        box._send(client.READ + b"\n")  # so that the server waits for the program
        assert processes_with(str(59 * 2**20))
    assert judge(GOOD_SUM, SUM, sandbox=service) == CORRECT
    assert not processes_with(str(59 * 2**20))


def test_a_sandbox_that_dies_over_there_says_nothing_about_the_program(service):
    limits = Limits(disk_mib=58)
    with start_sandbox(limits, sandbox=service, python="") as box:
        box.send({"program": "import time\ntime.sleep(3600)", "prelude": ""})
        for pid in processes_with(str(58 * 2**20)):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match=r"127\.0\.0\.1.*-9"):
            box.ask({"stdin": ""})


def test_a_server_that_is_killed_or_falls_silent_leaves_programs_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(client, "START_TIMEOUT_S", 0.2)  # what a silent service gets beside wall_s
    limits = {"wall_s": 1, "total_s": 600}
    with running_server(tmp_path, num_programs=2) as (running, sandbox):
        with ThreadPoolExecutor(1) as pool:
            running.send_signal(signal.SIGSTOP)
            with monkeypatch.context() as patch:
                patch.setattr(client, "CONNECT_TIMEOUT_S", 0.2)
                silent = judge(GOOD_SUM, SUM, sandbox=sandbox, **limits)
            running.send_signal(signal.SIGCONT)
            assert silent.outcome is Outcome.UNKNOWN
            assert "timed out" in silent.reason

            with start_sandbox(Limits(**limits), sandbox=sandbox, python="") as box:
                box.send({"program": "print(7)", "prelude": ""})
                running.send_signal(signal.SIGSTOP)
                with pytest.raises(SandboxError, match="timed out"):
                    box.ask({"stdin": ""})
                running.send_signal(signal.SIGCONT)

            sleep = "import time\ntime.sleep(3600)"
            sleeper = {"wall_s": 600, "total_s": 600, "disk_mib": 57}
            verdict = pool.submit(judge, sleep, SUM, sandbox=sandbox, **sleeper)
            wait_until(lambda: processes_with(str(57 * 2**20)), "a program")
            running.kill()
            killed = verdict.result(timeout=HANG_S)
            assert killed.outcome is Outcome.UNKNOWN
            assert "was lost" in killed.reason
        wait_until(lambda: not processes_with(str(57 * 2**20)), "the end of the program")
        refused = judge(GOOD_SUM, SUM, sandbox=sandbox)
        assert refused.outcome is Outcome.UNKNOWN
        # The kernel may still take a connection for a process that it is ending, and reset it.
        gone = "cannot be reached|was lost"
        assert re.search(gone, refused.reason)
        with pytest.raises(ConfigError, match=gone):
            check_sandbox(sandbox=sandbox, python="", limits=Limits())


def test_a_late_program_is_wrong_through_the_service_too(service):
    with start_sandbox(Limits(wall_s=1), sandbox=service, python="") as box:
        box.send({"program": "import time\ntime.sleep(3600)", "prelude": ""})
        with pytest.raises(ProgramError, match="longer than 1 s"):
            box.ask({"stdin": ""})


@contextmanager
def listener_that(answer: Callable[[socket.socket, list[bytes]], None]) -> Iterator[Any]:
    """A stranger's service: `answer` gets each connection, and what it has received so far."""
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with suppress(OSError), connection:
                        connection.settimeout(HANG_S)
                        answer(connection, received)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}", received
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(HANG_S)


NUMBER = b"0" * 32 + b"\n"


def _granting(greeting: bytes, proof: Callable[[bytes], bytes]) -> Any:
    """Greets, and grants a sandbox with a proof made of what the client has said."""

    def answer(connection: socket.socket, received: list[bytes]) -> None:
        connection.sendall(greeting)
        received.append(connection.recv(2**16))
        connection.sendall(proof(received[-1]) + b"+\n")
        received.append(connection.recv(2**16))

    return answer


def test_what_a_stranger_refuses_with_is_one_line(secret):
    def refuse(connection: socket.socket, received: list[bytes]) -> None:
        connection.sendall(seal.PROTOCOL + b" " + NUMBER)
        received.append(connection.recv(2**16))
        connection.sendall(b"s\x1b[2J\rall 5 steps are done\n")

    refused = pytest.raises(ConfigError, match="all 5 steps are done")
    with listener_that(refuse) as (sandbox, _), refused as caught:
        check_sandbox(sandbox=sandbox, python="", limits=Limits())
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("greeting", "proof"),
    [
        (seal.PROTOCOL + b" " + NUMBER, lambda said: b""),
        (seal.PROTOCOL + b" " + NUMBER, lambda said: b"0" * seal.CODE_BYTES + b" "),  # a guess
        # The client's own code.
        (seal.PROTOCOL + b" " + NUMBER, lambda said: said[: seal.CODE_BYTES] + b" "),
        (NUMBER, lambda said: b""),  # as the version that proved nothing
    ],
)
def test_a_listener_without_the_secret_sees_no_test_and_judges_nothing(secret, greeting, proof):
    with listener_that(_granting(greeting, proof)) as (sandbox, received):
        verdict = judge(GOOD_ADD, ASSERTS, sandbox=sandbox)
        assert verdict.outcome is Outcome.UNKNOWN
        assert not any(b"return" in line for line in received)
        with pytest.raises(ConfigError, match=re.escape(sandbox)):
            check_sandbox(sandbox=sandbox, python="", limits=Limits())


def _between(
    port: int,
    change: Callable[[int, bytes], list[bytes]],
    *,
    change_ours: Callable[[bytes], bytes] = bytes,
) -> Any:
    """Hands on every line of the service's, as `change` of its number and text has it.

    What the client says is recorded, and handed on as `change_ours` has it.
    """

    def answer(connection: socket.socket, received: list[bytes]) -> None:
        with socket.create_connection(("127.0.0.1", port)) as real, real.makefile("rb") as lines:
            real.settimeout(HANG_S)

            def hand_on() -> None:
                with suppress(OSError):
                    while data := connection.recv(2**16):
                        received.append(data)
                        real.sendall(change_ours(data))
                with suppress(OSError):
                    real.shutdown(socket.SHUT_WR)

            thread = threading.Thread(target=hand_on, daemon=True)
            thread.start()
            with suppress(OSError):
                for number, line in enumerate(lines):
                    for changed in change(number, line):
                        connection.sendall(changed)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # to close it would not wake the thread
            thread.join(HANG_S)

    return answer


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (lambda number, line: [line], Outcome.WRONG),
        (lambda number, line: [line.replace(b"8", b"7")] if number > 1 else [line], None),
        (lambda number, line: [line, line] if number == 1 else [line], None),  # repeated
        (lambda number, line: [] if number == 2 else [line], None),  # left out
        (lambda number, line: [line[:64] + b" pno\n"] if number == 2 else [line], None),
    ],
)  # fmt: skip
def test_a_line_that_is_changed_on_its_way_is_no_verdict(secret, change, outcome, monkeypatch):
    """The program is wrong in its second test, where it prints 8 instead of 7."""
    monkeypatch.setattr(client, "START_TIMEOUT_S", 0.2)  # what is left out is waited for in vain
    tests = {"inputs": ["1", "2"], "outputs": ["7", "7"]}
    program = "print(7 if input() == '1' else 8)"
    with (
        server_in_this_process() as (served, _),
        listener_that(_between(served.port, change)) as (sandbox, _),
    ):
        verdict = judge(program, tests, sandbox=sandbox, wall_s=5)
        assert verdict.outcome is (outcome or Outcome.UNKNOWN)


@pytest.mark.parametrize(
    ("was", "becomes", "outcome"),
    [
        (b"return a - b", b"return a + b", Outcome.UNKNOWN),
        (b"[3, 4]", b"[7, 0]", Outcome.UNKNOWN),
        (b"no such text", b"", Outcome.WRONG),
    ],
)
def test_a_program_or_input_that_is_changed_on_its_way_is_no_verdict(secret, was, becomes, outcome):
    def change_ours(data: bytes) -> bytes:
        return data.replace(was, becomes)

    with server_in_this_process() as (served, _):
        answer = _between(served.port, lambda _, line: [line], change_ours=change_ours)
        with listener_that(answer) as (sandbox, _):
            verdict = judge(
                "def add(a, b): return a - b",
                {"fn_name": "add", "inputs": [[3, 4]], "outputs": [7]},
                sandbox=sandbox,
                wall_s=5,
            )
            assert verdict.outcome is outcome


def test_a_recorded_session_shows_nobody_a_test_and_starts_no_sandbox(secret):
    """Whoever has listened to a session knows all its lines, and none of the next one's codes."""
    theirs: list[bytes] = []

    def record(_: int, line: bytes) -> list[bytes]:
        theirs.append(line)
        return [line]

    with server_in_this_process() as (served, _):
        with listener_that(_between(served.port, record)) as (sandbox, ours):
            assert judge(GOOD_SUM, SUM, sandbox=sandbox) == CORRECT
        # To the service, as the client: refused at its first line.
        with (
            socket.create_connection(("127.0.0.1", served.port), HANG_S) as stranger,
            stranger.makefile("rb") as lines,
        ):
            stranger.sendall(ours[0])
            assert lines.readline().startswith(seal.PROTOCOL)
            assert lines.readline().startswith(client.SANDBOX_FAILED)

    def replay(connection: socket.socket, received: list[bytes]) -> None:
        for line in theirs:
            connection.sendall(line)
            received.append(connection.recv(2**16))

    # To the client, as the service.
    with listener_that(replay) as (sandbox, received):
        verdict = judge(GOOD_SUM, SUM, sandbox=sandbox)
        assert verdict.outcome is Outcome.UNKNOWN and "secret" in verdict.reason
    assert received[0] and not any(received[1:])  # its wish, and the end
