"""Programs that run on another machine: who may, who waits, and what a lost service leaves."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from gapo_megatron.errors import ConfigError
from gapo_megatron.rewards.sandbox import (
    SYSTEM_PYTHON,
    Limits,
    SandboxError,
    remote,
    run_once,
    secret,
)
from gapo_megatron.rewards.sandbox.check import check_sandbox
from gapo_megatron.types import Outcome
from gapo_tools import serve_sandboxes
from gapo_tools.sandboxes import connections, server
from tests.sandbox_setup import (
    CORRECT,
    PATIENT,
    SUM,
    judge,
    needs_sandbox,
    processes_with,
    running_server,
    service,
    wait_until_gone,
)
from tests.waiting import HANG_S, wait_until

__all__ = ["service"]  # a fixture
pytestmark = needs_sandbox

ASSERTS = {"test_list": ["assert add(3, 4) == 7"]}
GOOD_SUM = "a, b = map(int, input().split())\nprint(a + b)"
GOOD_ADD = "def add(a, b): return a + b"
SLEEP = "import time\ntime.sleep(3600)"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with a secret."""
    monkeypatch.setenv("HOME", str(tmp_path))
    secret.make_secret()
    return Path(secret.SECRET_PATH).expanduser()


@contextmanager
def server_in_this_process() -> Iterator[tuple[server.Server, str]]:
    """With one place; and `reward.sandbox` for it. The secret must be there."""
    served = server.Server(
        host="127.0.0.1", port=0, python=SYSTEM_PYTHON, num_programs=1, largest=Limits(**PATIENT)
    )
    thread = threading.Thread(target=served.serve, daemon=True)
    thread.start()
    try:
        yield served, f"https://127.0.0.1:{served.port}"
    finally:
        served.server.should_exit = served.server.force_exit = True
        thread.join(HANG_S)
        served._threads.shutdown()
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def served(service: str) -> Iterator[str]:
    """`reward.sandbox` of a server in this process, whose place is free at the end."""
    with server_in_this_process() as (_, sandbox):
        yield sandbox
        assert judge(GOOD_SUM, SUM, sandbox=sandbox) == CORRECT


def ask(sandbox: str, path: str, body: object, **options: Any) -> httpx.Response:
    """A request as any program of its own would send it: with the certificate and the token."""
    known = secret.read_secret()
    context = ssl.create_default_context(cafile=known.path)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    options = {"auth": (secret.USER, known.token), "timeout": HANG_S, **options}
    with httpx.Client(verify=context, trust_env=False) as client:
        return client.post(sandbox + path, content=content, **options)


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
        (GOOD_ADD, {"fn_name": "add", "inputs": [[3, float("nan")]], "outputs": [7]}, "test 1"),
        (GOOD_ADD, {"fn_name": "add", "inputs": [["\ud800", "a"]], "outputs": ["\ud800a"]}, None),
    ],
)
def test_verdicts_are_those_of_bubblewrap(service, program, tests, reason):
    verdict = judge(program, tests, sandbox=service, cpu_s=1 if "while True" in program else 60)
    if reason is None:
        assert verdict == CORRECT
    else:
        assert verdict.outcome is Outcome.WRONG
        assert re.search(reason, verdict.reason)
    late = judge(SLEEP, SUM, sandbox=service, wall_s=1) if program == GOOD_SUM else None
    assert late is None or (late.outcome is Outcome.WRONG and "longer than 1 s" in late.reason)


def test_limits_beyond_those_of_the_service_are_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with running_server(tmp_path, "--max-total-s", "59", num_programs=1) as (_, sandbox):
        check_sandbox(sandbox=sandbox, python="", limits=Limits(total_s=59, memory_mib=128))
        with pytest.raises(ConfigError, match=r"_s \(60\).*reward\.timeout_s.*--max-total-s"):
            check_sandbox(sandbox=sandbox, python="", limits=Limits(total_s=60))
        with pytest.raises(ConfigError, match=r"memory_mib \(4096\).*1024"):
            check_sandbox(sandbox=sandbox, python="", limits=Limits(total_s=59, memory_mib=4096))


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_a_port_that_is_none_is_refused_by_name(home, monkeypatch, capsys, port):
    monkeypatch.setattr(sys, "argv", ["serve_sandboxes.py", f"--port={port}"])
    with pytest.raises(SystemExit, match="2"):
        serve_sandboxes.main()
    told = capsys.readouterr().err
    assert f"--port ({port})" in told and "65535" in told


def test_a_wall_that_is_down_over_there_is_named(service, monkeypatch):
    monkeypatch.setattr("gapo_megatron.rewards.sandbox.check._PROBE", "print('[\"no wall\"]')")
    with pytest.raises(ConfigError, match="by the service: no wall"):
        check_sandbox(sandbox=service, python="", limits=Limits())


def test_a_service_may_listen_on_ipv6(tmp_path, monkeypatch):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    monkeypatch.setenv("HOME", str(tmp_path))
    with running_server(tmp_path, num_programs=1, host="::1") as (_, sandbox):
        assert sandbox.startswith("https://[::1]:")
        assert judge(GOOD_SUM, SUM, sandbox=sandbox) == CORRECT


def connect(sandbox: str) -> socket.socket:
    host, _, port = sandbox.removeprefix("https://").partition(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(HANG_S)
    return connection


def tls(connection: socket.socket) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=secret.read_secret().path)
    return context.wrap_socket(connection, server_hostname="127.0.0.1")


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n", b"POST /verdict HTTP/1.1\r\nhost: x"])
def test_strangers_who_stay_keep_no_client_out_and_end_soon(home, monkeypatch, said):
    monkeypatch.setattr(connections, "_MOST", 5)
    with server_in_this_process() as (served, sandbox), ExitStack() as stack:
        silent = [stack.enter_context(connect(sandbox)) for _ in range(20)]  # not even TLS
        strangers = [stack.enter_context(tls(connect(sandbox))) for _ in range(8)]
        for stranger in strangers:
            with suppress(OSError):
                stranger.sendall(said)
        assert judge(GOOD_SUM, SUM, sandbox=sandbox) == CORRECT
        assert len(served._strangers) <= 5
        monkeypatch.setattr(connections, "_WAIT_S", 0.2)
        last = stack.enter_context(tls(connect(sandbox)))
        last.sendall(said)
        with suppress(ConnectionError, ssl.SSLError):
            assert last.recv(1) == b""
        assert silent


@pytest.mark.system
def test_a_service_that_strangers_fill_serves_on(service):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1300):
            stack.enter_context(connect(service))
        check_sandbox(sandbox=service, python="", limits=Limits(memory_mib=128))


@pytest.mark.parametrize("name", [*asdict(Limits())])
@pytest.mark.parametrize("value", ["NaN", "null", '"1"', "true", "0", "-1", "1.0", "[]", "1e999"])
def test_a_limit_that_is_none_is_refused_by_name(served, name, value):
    wish = {"program": "", "kind": "TextTests", "tests": {"inputs": [], "outputs": []}}
    body = json.dumps(wish | {"limits": {name: "?"}}).replace('"?"', value).encode()
    answer = ask(served, "/verdict", body)
    assert answer.status_code == 422 and name in answer.text


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        ("/verdict", b"", 422, "JSONDecodeError"),
        ("/verdict", b"[" * 100_000, 422, "Recursion"),
        ("/verdict", [], 422, "version"),
        ("/verdict", {"program": "", "kind": "Tests", "tests": {}, "limits": []}, 422, "version"),
        ("/verdict", {"program": "", "kind": "Tests", "tests": {}, "limits": {}}, 422, "Tests"),
        ("/verdict", {"program": "", "kind": "TextTests", "tests": {"?": 1}}, 422, "'?'"),
        ("/verdict", {"program": "", "kind": "TextTests", "tests": {"inputs": [], "outputs": []},
                      "limits": {"\ud800\n": 1}}, 422, r"\ud800\n"),
        ("/run_code", {"code": "", "language": "cpp"}, 422, "language ('cpp')"),
        ("/run_code", {"language": "python"}, 422, "code"),
        ("/run_code", {"code": "", "language": "python", "run_timeout": 0}, 422, "run_timeout (0)"),
        ("/run_code", {"code": "", "language": "python", "run_timeout": 1e9}, 422, "--max-total-s"),
        ("/run_code", {"code": "", "language": "python", "memory_limit_MB": 4096}, 422, "memory"),
        ("/run_code", {"code": "", "language": "python", "files": {"a": ""}}, 422, "files"),
        ("/run_code", {"code": "", "language": "python", "fetch_files": ["a"]}, 422, "fetch_files"),
        ("/run_jupyter", {}, 404, "Not Found"),
    ],
)  # fmt: skip
def test_a_request_of_another_form_is_refused_by_name(served, path, body, status, named):
    answer = ask(served, path, body)
    assert answer.status_code == status and named in answer.text
    assert ask(served, path, body, auth=(secret.USER, "0" * 64)).status_code in (401, 404)


@pytest.mark.parametrize(
    ("code", "status", "result"),
    [
        ("print(input())", "Success", ("Finished", 0, "7\n", "")),
        ("import sys\nprint(1)\nsys.exit('bad')", "Failed", ("Finished", 1, "1\n", "bad\n")),
        ("import os\nos.kill(os.getpid(), 11)", "Failed", ("Finished", -11, "", "")),
        ("while True: pass", "Failed", ("TimeLimitExceeded", None, "", "")),
        ("import time\ntime.sleep(9)", "Failed", ("TimeLimitExceeded", None, "", "")),
        # Ended by a limit.
        ("import socket, os, time\nfor _ in range(3): os.fork()\n"
         "a = [socket.socketpair() for _ in range(30)]\ntime.sleep(9)",
         "Failed", ("Finished", -9, "", "\nopened more than 128 sockets\n")),
    ],
)  # fmt: skip
def test_it_speaks_the_api_of_sandboxfusion(served, code, status, result):
    asked = {"code": code, "language": "python", "stdin": "7\n", "run_timeout": 30}
    late = result[0] == "TimeLimitExceeded"
    answer = ask(served, "/run_code", asked | ({"run_timeout": 0.5} if late else {})).json()
    ran = answer.pop("run_result")
    rest = {"message": "", "compile_result": None, "executor_pod_name": None, "files": {}}
    assert answer == rest | {"status": status}
    assert ran.pop("execution_time") > 0
    names = ("status", "return_code", "stdout", "stderr")
    assert ran == dict(zip(names, result, strict=True))


def test_a_client_without_the_file_of_the_service_is_refused(served, tmp_path, monkeypatch):
    known = Path(secret.read_secret().path).read_text()
    for other, reason in ((None, "could not be authenticated"), ("0" * 64, "token")):
        with monkeypatch.context() as patch:
            patch.setenv("HOME", str(tmp_path / str(other)))
            secret.make_secret()
            if other:
                path = Path(secret.SECRET_PATH).expanduser()
                path.write_text(known.replace(secret._FORM.match(known)[1], other))
            verdict = judge(GOOD_SUM, SUM, sandbox=served)
            assert verdict.outcome is Outcome.UNKNOWN and reason in verdict.reason
            with pytest.raises(ConfigError, match=reason):
                check_sandbox(sandbox=served, python="", limits=Limits())


def test_the_secret_has_to_be_there_whole_and_secret(home, monkeypatch):
    known, text = secret.read_secret(), home.read_text()
    secret.make_secret()  # keeps it
    assert secret.read_secret() == known and len(known.token) == 64
    assert home.stat().st_mode & 0o777 == 0o600
    assert list(home.parent.iterdir()) == [home]
    home.chmod(0o640)
    with pytest.raises(SandboxError, match=r"640.*chmod 600"):
        secret.read_secret()
    home.chmod(0o600)
    for damaged in ("", text[:200], text.replace("token", "tokens")):
        home.write_text(damaged)
        with pytest.raises(SandboxError, match="must hold"):
            secret.read_secret()
    home.unlink()
    with pytest.raises(SandboxError, match="No such file"):
        secret.read_secret()


@contextmanager
def listener_that(answer: Callable[[socket.socket, list[bytes]], None]) -> Iterator[Any]:
    """A stranger's service: `answer` gets each connection, and what all have received so far."""
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
        yield f"https://127.0.0.1:{listening.getsockname()[1]}", received
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(HANG_S)


def _speaks_plainly(connection: socket.socket, received: list[bytes]) -> None:
    received.append(connection.recv(2**16))
    connection.sendall(b'HTTP/1.1 200 OK\r\n\r\n{"outcome": "correct", "reason": ""}')


def _closes(connection: socket.socket, received: list[bytes]) -> None:
    received.append(connection.recv(2**16))


def _repeats(connection: socket.socket, received: list[bytes]) -> None:
    while said := connection.recv(2**16):
        received.append(said)
        connection.sendall(said)


def _has_another_certificate(connection: socket.socket, received: list[bytes]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(os.environ["OTHER"])
    with context.wrap_socket(connection, server_side=True) as connection:
        _speaks_plainly(connection, received)


@pytest.mark.parametrize("kind", [_speaks_plainly, _closes, _repeats, _has_another_certificate])
def test_a_listener_without_the_certificate_sees_nothing_and_judges_nothing(
    home, tmp_path, monkeypatch, kind
):
    with monkeypatch.context() as patch:
        patch.setenv("HOME", str(tmp_path / "other"))
        secret.make_secret()
        monkeypatch.setenv("OTHER", secret.read_secret().path)
    with listener_that(kind) as (sandbox, received):
        verdict = judge(GOOD_ADD, ASSERTS, sandbox=sandbox)
        assert verdict.outcome is Outcome.UNKNOWN and sandbox in verdict.reason
        token = secret.read_secret().token.encode()
        assert not any(b"return" in said or token in said for said in received)
        with pytest.raises(ConfigError, match=re.escape(sandbox)) as caught:
            check_sandbox(sandbox=sandbox, python="", limits=Limits())
        assert str(caught.value).isprintable()


def test_a_queue_costs_a_program_none_of_its_time_and_ends(home, monkeypatch):
    with server_in_this_process() as (_, sandbox), ThreadPoolExecutor(2) as pool:
        wait = f"import time\ntime.sleep(3)\n{GOOD_SUM}"
        first = pool.submit(judge, wait, {"inputs": ["3 4"], "outputs": ["7"]}, sandbox=sandbox)
        wait_until(lambda: processes_with(str(64 * 2**20)), "the first program")
        monkeypatch.setattr(server, "QUEUE_TIMEOUT_S", 0.2)
        monkeypatch.setattr(remote, "_RETRY_S", (0.1,))
        refused = judge(GOOD_SUM, SUM, sandbox=sandbox)
        assert refused.outcome is Outcome.UNKNOWN and "no place for 0.2 s" in refused.reason
        monkeypatch.setattr(server, "QUEUE_TIMEOUT_S", HANG_S)
        assert judge(GOOD_SUM, SUM, sandbox=sandbox, wall_s=1, total_s=1) == CORRECT
        assert first.result(HANG_S) == CORRECT


def test_one_place_is_enough_for_programs_that_need_two_sandboxes(service):
    with ThreadPoolExecutor(4) as pool:
        verdicts = pool.map(lambda _: judge(GOOD_ADD, ASSERTS, sandbox=service), range(6))
        assert set(verdicts) == {CORRECT}


def test_the_place_of_a_client_that_has_gone_is_free_again(service):
    wish = {"program": SLEEP, "kind": "TextTests", "tests": {"inputs": [""], "outputs": ["7"]}}
    wish["limits"] = {"wall_s": 600, "total_s": 600, "disk_mib": 59}
    with pytest.raises(httpx.ReadTimeout):
        ask(service, "/verdict", wish, timeout=1)
    half_sent = tls(connect(service))
    half_sent.sendall(b"POST /verdict HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n1")
    half_sent.close()
    assert judge(GOOD_SUM, SUM, sandbox=service) == CORRECT
    wait_until_gone(str(59 * 2**20))


def test_a_sandbox_that_dies_over_there_says_nothing_about_the_program(service):
    with ThreadPoolExecutor(1) as pool:
        verdict = pool.submit(judge, SLEEP, SUM, sandbox=service, disk_mib=58)
        for pid in wait_until(lambda: processes_with(str(58 * 2**20)), "a program"):
            os.kill(pid, signal.SIGKILL)
        died = verdict.result(HANG_S)
    assert died.outcome is Outcome.UNKNOWN
    assert "-9" in died.reason or "cannot start" in died.reason


def test_a_server_that_is_killed_or_falls_silent_leaves_programs_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with running_server(tmp_path, num_programs=1) as (running, sandbox):
        running.send_signal(signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(remote, "CONNECT_TIMEOUT_S", 0.2)
            silent = judge(GOOD_SUM, SUM, sandbox=sandbox)
            assert silent.outcome is Outcome.UNKNOWN and "timed out" in silent.reason
        running.send_signal(signal.SIGCONT)
        with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
            patch.setattr(remote, "QUEUE_TIMEOUT_S", 0)
            patch.setattr("gapo_megatron.rewards.code.START_TIMEOUT_S", 0.5)
            patch.setattr("gapo_megatron.rewards.code.MAX_ASSERTS_S", 0)
            limits = {"wall_s": 1, "total_s": 1, "disk_mib": 56}
            verdict = pool.submit(judge, SLEEP, SUM, sandbox=sandbox, **limits)
            wait_until(lambda: processes_with(str(56 * 2**20)), "a program")
            running.send_signal(signal.SIGSTOP)
            silent = verdict.result(HANG_S)
            assert silent.outcome is Outcome.UNKNOWN and "timed out" in silent.reason
            running.send_signal(signal.SIGCONT)
        with ThreadPoolExecutor(1) as pool:
            sleeper = {"wall_s": 600, "total_s": 600, "disk_mib": 57}
            verdict = pool.submit(judge, SLEEP, SUM, sandbox=sandbox, **sleeper)
            wait_until(lambda: processes_with(str(57 * 2**20)), "a program")
            running.kill()
            killed = verdict.result(timeout=HANG_S)
            assert killed.outcome is Outcome.UNKNOWN and "was lost" in killed.reason
    wait_until_gone(str(57 * 2**20))
    # The kernel may still take a connection for a process that it is ending, and reset it.
    gone = "cannot be reached|was lost"
    refused = judge(GOOD_SUM, SUM, sandbox=sandbox)
    assert refused.outcome is Outcome.UNKNOWN and re.search(gone, refused.reason)
    with pytest.raises(ConfigError, match=gone):
        check_sandbox(sandbox=sandbox, python="", limits=Limits())
    port = sandbox.rpartition(":")[2]
    with running_server(tmp_path, "--port", port, num_programs=1) as (_, again):
        assert again == sandbox
        assert judge(GOOD_SUM, SUM, sandbox=sandbox) == CORRECT


def test_what_is_too_large_is_refused_and_says_nothing_about_the_program(served, monkeypatch):
    monkeypatch.setattr(server, "MAX_REQUEST_BYTES", 1000)
    refused = judge("#" * 2000, SUM, sandbox=served)
    assert refused.outcome is Outcome.UNKNOWN and "more than 1000 bytes" in refused.reason
    monkeypatch.undo()
    monkeypatch.setattr(remote, "MAX_ANSWER_BYTES", 1000)
    with pytest.raises(SandboxError, match="more than 1000 bytes"):
        run_once("print('x' * 2000)", limits=Limits(), sandbox=served, python="")
    assert judge(GOOD_SUM, SUM, sandbox=served) == CORRECT
