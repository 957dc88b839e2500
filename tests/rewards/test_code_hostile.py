"""Programs that attack: none scores, none escapes, none takes longer than its limits.

In the first stage one for each wall; all of them, and their seconds, in the second.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gapo_megatron.rewards import code
from gapo_megatron.types import Outcome, Verdict
from tests.hostile import READS_TEXT, read_programs
from tests.sandbox_setup import apptainer, bubblewrap, needs_sandbox, open_to_everyone, service

__all__ = ["apptainer", "bubblewrap", "service"]  # fixtures

pytestmark = needs_sandbox

LIMITS = {
    "cpu_s": 1,
    "wall_s": 4,  # only those that sleep take it, and a busy machine must not
    "total_s": 16,
    "memory_mib": 256,
    "num_processes": 16,
    "disk_mib": 16,
    "output_mib": 1,
}

PATIENT = LIMITS | {"cpu_s": 10, "wall_s": 100, "total_s": 600}
"""For a program that a busy machine has ended before it did what it is there for."""

TEXT_TESTS = {"inputs": ["3 4", "10 20"], "outputs": ["7", "30"]}
CALL_TESTS = {"fn_name": "add", "inputs": [[3, 4], [10, 20]], "outputs": [7, 30]}
ASSERTS = {"test_list": ["assert add(3, 4) == 7", "assert add(10, 20) == 30"]}


ONE_FOR_EACH_WALL = {
    "fork bomb",
    "hundred processes",
    "memory bomb",
    "full disk",
    "endless output",
    "network",
    "buffers of socket pairs",
    "service at a socket pair",
    "/etc/passwd",
    "the trainer's files",
    "a process of the machine",
    "trace of process 1",
    "inherited files",
    "writing to the libraries",
    "killing everyone",
    "pages that a pipe holds",
    "memory policies of pages",
    "paths longer than a page",
    "files that mappings keep open",
    "mappings that the first thread leaves",
    "mappings that nobody may count",
    "asynchronous requests",
    "watched files",
    "locks of its bytes",
    "timers",
    "children that nobody waits for",
    "children that leave no trace",
    "new user namespace",
    "becoming root",
    "exit before the answer",
    "daemon for the next test",
    "searching its memory",
    "exit in the call (asserts)",
    "equal to everything (asserts)",
    "patched checker (calls)",
    "forged verdict (asserts)",
    "noise on the channel (calls)",
}
"""Those of the first stage."""

THROUGH_A_SERVICE = {
    "fork bomb",
    "memory bomb",
    "endless output",
    "killing everyone",
    "closed channel (calls)",
    "forged verdict (asserts)",
    "noise on the channel (calls)",
    "nested reply (calls)",
    "huge value (calls)",
    "sleep in the call (asserts)",
}
"""The walls are the same there; what a program does to the channel is what may differ."""


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """What a program might reach for, put where every user of the machine reaches it."""
    folder = tmp_path_factory.mktemp("host")
    open_to_everyone(folder)
    folder.chmod(0o777)
    secret = folder / "secret"
    secret.write_text("the trainer's")
    secret.chmod(0o644)
    sleeper = subprocess.Popen(["sleep", "infinity"])
    listener = socket.create_server(("127.0.0.1", 0))
    service = socket.socket(socket.AF_UNIX)
    service.bind(str(folder / "socket"))
    service.listen()
    (folder / "socket").chmod(0o777)
    yield {
        "@FILE": str(secret),
        "@FOLDER": str(folder),
        "@PORT": str(listener.getsockname()[1]),
        "@PID": str(sleeper.pid),
    }
    assert sleeper.poll() is None
    assert sorted(path.name for path in folder.iterdir()) == ["secret", "socket"]
    assert secret.read_text() == "the trainer's"
    for sock in (listener, service):
        sock.settimeout(0)
        with pytest.raises(BlockingIOError):
            sock.accept()
        sock.close()
    sleeper.kill()
    sleeper.wait()


def judge(
    source: str, reason: str, tests: dict[str, object], *, sandbox: str
) -> tuple[Verdict, float]:
    """The verdict, and the seconds that it took."""
    start = time.monotonic()
    response, answer = f"```python\n{source}\n```", json.dumps(tests)
    verdict = code.verify(response, answer, limits=LIMITS, sandbox=sandbox)
    seconds = time.monotonic() - start
    if re.search("longer than|CPU time", verdict.reason) and not re.search(reason, verdict.reason):
        verdict = code.verify(response, answer, limits=PATIENT, sandbox=sandbox)
    return verdict, seconds


def cases(host: dict[str, str]) -> list[tuple[str, str, str, dict[str, object]]]:
    """(name, source, reason, tests) of every hostile program."""
    found = []
    for name, reason, source in read_programs("text.txt"):
        tests: dict[str, object] = TEXT_TESTS
        if name == "searching its memory":
            tests = {"inputs": ["3 4"], "outputs": [f"expected-{secrets.token_hex(4)}"]}
        found.append((name, READS_TEXT + source, reason, tests))
    for name, reason, source in read_programs("calls.txt"):
        found.append((f"{name} (calls)", source, reason, CALL_TESTS))
        found.append((f"{name} (asserts)", source, reason, ASSERTS))
    for key, value in host.items():
        found = [(name, source.replace(key, value), *rest) for name, source, *rest in found]
    return found


def failures(results: dict[str, tuple[str, Verdict]]) -> list[str]:
    """By name the reason for which it must fail, and how it was judged."""
    return [
        f"{name}: {verdict}; should fail by {reason!r}"
        for name, (reason, verdict) in results.items()
        if verdict.outcome is not Outcome.WRONG or not re.search(reason, verdict.reason)
    ]


def test_each_wall_stops_a_program(host, bubblewrap):
    chosen = [case for case in cases(host) if case[0] in ONE_FOR_EACH_WALL]
    assert len(chosen) == len(ONE_FOR_EACH_WALL)
    with ThreadPoolExecutor(4) as pool:  # beside each other
        results = pool.map(lambda case: judge(*case[1:], sandbox=bubblewrap), chosen)
        both = zip(chosen, results, strict=True)
        assert not failures({case[0]: (case[2], verdict) for case, (verdict, _) in both})


@pytest.mark.system
@pytest.mark.parametrize("kind", ["bubblewrap", "service", "apptainer"])
def test_hostile_programs_neither_score_nor_escape_nor_delay(host, kind, request):
    sandbox = request.getfixturevalue(kind)
    good = f"```\n{READS_TEXT}print(a + b)\n```"
    stop = threading.Event()
    beside: list[tuple[Verdict, float]] = []

    def judge_good_programs() -> None:
        while not stop.is_set():
            start = time.monotonic()
            verdict = code.verify(good, json.dumps(TEXT_TESTS), sandbox=sandbox)
            beside.append((verdict, time.monotonic() - start))

    all_cases = cases(host)
    assert len(all_cases) >= 40
    if kind == "service":
        all_cases = [case for case in all_cases if case[0] in THROUGH_A_SERVICE]
        assert len(all_cases) == len(THROUGH_A_SERVICE)
    with ThreadPoolExecutor(4) as pool:  # some sleep
        honest = pool.submit(judge_good_programs)
        try:
            results = list(pool.map(lambda case: judge(*case[1:], sandbox=sandbox), all_cases))
        finally:
            stop.set()
        honest.result()
    both = list(zip(all_cases, results, strict=True))
    print("seconds\tprogram\twhy it is wrong")  # with `pytest -s`
    for case, (verdict, seconds) in both:
        print(f"{seconds:.2f}\t{case[0]}\t{verdict.reason}")
    slowest = max(seconds for _, seconds in beside)
    print(f"{len(beside)} honest programs beside them, {slowest:.2f} s at the most")
    assert not failures({case[0]: (case[2], verdict) for case, (verdict, _) in both})
    # The limits that end a program are in its reason, above; how long a machine takes to apply them
    # depends on its load. One thread judges honest programs beside four that judge hostile ones.
    assert len(beside) >= len(all_cases) / 8
    assert {verdict for verdict, _ in beside} == {Verdict(Outcome.CORRECT)}
