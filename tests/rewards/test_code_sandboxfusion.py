"""Programs that somebody else's SandboxFusion runs."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gapo_megatron.errors import ConfigError
from gapo_megatron.rewards.code import run_program
from gapo_megatron.rewards.sandbox import SYSTEM_PYTHON, Limits, remote
from gapo_megatron.rewards.sandbox.check import check_sandbox
from gapo_megatron.types import Outcome
from tests.sandbox_setup import CORRECT, SUM, judge

Answer = Callable[[dict[str, Any]], tuple[int, Any]]


class Fusion(ThreadingHTTPServer):
    """Answers /run_code as `answer` does; `asked` are the requests."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.asked = answer, list[dict[str, Any]]()
        self.sandbox = f"sandboxfusion:http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Fusion

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(asked)
        status, answer = self.server.answer(asked) if self.path == "/run_code" else (404, "")
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def run(asked: dict[str, Any], *, folder: Path) -> tuple[int, Any]:
    """Run the code in a process, without isolation, and answer as SandboxFusion does."""
    assert asked["language"] == "python" and asked["code"].isascii()
    path = folder / "code.py"
    path.write_text(asked["code"])
    result: dict[str, Any] = {"status": "Finished", "execution_time": 0.1}
    try:
        done = subprocess.run(
            [SYSTEM_PYTHON, path],
            input=asked["stdin"].encode(),
            capture_output=True,
            timeout=asked["run_timeout"],
            cwd=folder,
        )
        result |= {"return_code": done.returncode}
    except subprocess.TimeoutExpired as error:
        done = error
        result |= {"status": "TimeLimitExceeded", "return_code": None}
    for name in ("stdout", "stderr"):
        text = getattr(done, name) or b""
        if len(text) > 128 * 1024:  # nobody reads on: the program waits until its time is over
            result |= {"status": "TimeLimitExceeded", "return_code": None}
        try:
            result[name] = text[: 128 * 1024].decode()
        except UnicodeDecodeError as error:
            result[name] = f"[DecodeError] {error}"
    status = "Success" if result["return_code"] == 0 else "Failed"
    return 200, {"status": status, "message": "", "compile_result": None, "run_result": result}


@pytest.fixture
def fusion(tmp_path: Path) -> Iterator[Fusion]:
    with Fusion(lambda asked: run(asked, folder=tmp_path)) as served:
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield served
        served.shutdown()
        thread.join()


GOOD_SUM = "print(sum(map(int, input().split())))"
GOOD_ADD = "def add(a: int, b: int) -> List[int]: return [a, b]"
CALLS = {
    "fn_name": "add",
    "inputs": [[3, "x"], ["\u00fc", 4]],
    "outputs": [[3, "x"], ["\u00fc", 4]],
}
ASSERTS = {"test_list": ["assert add(3, 4) == [3, 4]"]}
CHECK = {"test": "def check(f):\n    assert f(1, 2) == [1, 2]", "entry_point": "add", "prompt": ""}
NODES = {"functional": "assert is_same_list(Solution().f(list_node([1, 2])), list_node([1, 2]))"}
DEEP = "def f(n): return n and 1 + f(n - 1)\nassert f(20_000)\n" + GOOD_SUM


@pytest.mark.parametrize(
    ("program", "tests", "reason"),
    [
        (GOOD_SUM, SUM, None),
        (DEEP, SUM, None),
        ("import os\nos.write(2, b'\\xff')\n" + GOOD_SUM, SUM, None),
        ("print('7' * 99_000)", {"inputs": [""], "outputs": ["7" * 99_000]}, None),
        ("print(8)", SUM, "test 1: another output"),
        ("import sys\nsys.exit('bad')", SUM, "test 1: the program ended with exit code 1: bad"),
        ("while True: pass", SUM, "took longer than 1 s"),
        (GOOD_ADD, CALLS, None),
        ("print(1)\n" + GOOD_ADD.replace("return", "print(2); return"), CALLS, None),
        ("def add(a, b): return [a]", CALLS, "test 1: another value"),
        ("def add(a, b): return 1 / 0", CALLS, "test 1: ZeroDivisionError"),
        ("import os\nos._exit(0)", CALLS, "not a JSON object"),
        (GOOD_ADD, ASSERTS, None),
        (GOOD_ADD, CHECK, None),
        ("class Solution:\n    def f(self, head: ListNode): return head", NODES, None),
        ("def add(a, b): return 0", ASSERTS, "AssertionError"),
        ("def sub(a, b): return 0", CHECK, "NameError|KeyError"),
        ("import os\nos._exit(3)", SUM, "ended with exit code 3$"),
        ("import os\nos._exit(0)", ASSERTS, "ended the asserts"),
        ("raise SystemExit", CHECK, "ended the asserts"),
    ],
)
def test_programs_are_judged_by_what_they_do(fusion, program, tests, reason):
    wall_s = 1 if program.startswith("while") else 60
    verdict = judge(program, tests, sandbox=fusion.sandbox, wall_s=wall_s)
    if reason is None:
        assert verdict == CORRECT
    else:
        assert verdict.outcome is Outcome.WRONG
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(verdict.reason)
    assert fusion.asked[0]["memory_limit_MB"] == Limits().memory_mib
    assert not any("outputs" in json.dumps(asked) for asked in fusion.asked)


def _run_result(**changed: Any) -> Answer:
    def answer(asked: dict[str, Any]) -> tuple[int, Any]:
        result = {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stdout": "7"}
        return 200, {"status": "Success", "message": "", "run_result": result | changed}

    return answer


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda _: (500, {"detail": "broken\n"}), r"HTTP status 500\): .*broken"),
        (lambda _: (422, {"detail": "language"}), "422.*language"),
        (lambda _: (200, b"<html>"), "not JSON"),
        (lambda _: (200, b"[" * 100_000), "not JSON"),
        (lambda _: (200, []), r"failed: \[\]"),
        (lambda _: (200, b"x" * 10**6), "more than 500000 bytes"),
        (lambda _: (200, {"status": "SandboxError", "message": "no\x1b[2J disk"}), "no.*disk"),
        (lambda _: (200, {"status": "Success", "run_result": None}), "run_result None"),
        (_run_result(status="Error"), "run_result"),
        (_run_result(return_code=None), "run_result"),
        (_run_result(return_code="0"), "run_result"),
        (_run_result(stdout=7), "run_result"),
        (_run_result(execution_time="1"), "run_result"),
        (_run_result(), "did not start"),  # it printed the right answer, but from where?
        (_run_result(return_code=127, stderr="python: not found"), "did not start.*not found"),
        (_run_result(status="TimeLimitExceeded", return_code=None), "did not start.*longer"),
    ],
)
def test_a_service_that_answers_badly_leaves_programs_unknown(fusion, monkeypatch, answer, reason):
    fusion.answer = answer
    monkeypatch.setattr(remote, "MAX_ANSWER_BYTES", 500_000)
    for tests in (SUM, ASSERTS):
        verdict = judge(GOOD_SUM, tests, sandbox=fusion.sandbox)
        assert verdict.outcome is Outcome.UNKNOWN
        assert verdict.reason.isprintable() and fusion.sandbox[14:] in verdict.reason
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(verdict.reason)
    with pytest.raises(ConfigError, match=reason):
        check_sandbox(sandbox=fusion.sandbox, python="", limits=Limits())


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ({"inputs": ["1"], "outputs": ["7" * 110_000]}, "test 1 expects more than"),
        ({"test_list": ["assert 1"]}, "do not call the program"),
        (ASSERTS | {"test_setup_code": "import no_such_module"}, "did not start.*no_such_module"),
        ({"test_list": ["assert add(1, 2) =="]}, "did not start.*SyntaxError"),
    ],
)
def test_tests_that_it_cannot_run_leave_programs_unknown(fusion, tests, reason):
    verdict = judge(GOOD_ADD, tests, sandbox=fusion.sandbox)
    assert verdict.outcome is Outcome.UNKNOWN
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(verdict.reason)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_service_is_asked_again_and_in_the_end_given_up(fusion, monkeypatch, status):
    monkeypatch.setattr(remote, "_RETRY_S", (0.0, 0.0))
    real, busy = fusion.answer, 2
    fusion.answer = lambda asked: (status, "busy") if len(fusion.asked) <= busy else real(asked)
    assert judge(GOOD_SUM, SUM, sandbox=fusion.sandbox) == CORRECT
    busy = 10**9
    verdict = judge(GOOD_SUM, SUM, sandbox=fusion.sandbox)
    assert verdict.outcome is Outcome.UNKNOWN and f"{status}" in verdict.reason


def test_all_tests_of_a_program_share_its_time(fusion):
    tests = {"inputs": ["1"] * 40, "outputs": ["1"] * 40}
    verdict = judge("print(1)", tests, sandbox=fusion.sandbox, wall_s=1, total_s=1)
    assert verdict.outcome is Outcome.WRONG and "longer than" in verdict.reason
    assert len(fusion.asked) <= 11  # each reports 0.1 s


def test_the_start_of_a_run_and_its_tools_use_it_too(fusion, tmp_path):
    with pytest.warns(UserWarning, match="can forge the verdict of asserts"):
        check_sandbox(sandbox=fusion.sandbox, python="", limits=Limits())
    options = {"timeout_s": 5, "sandbox": fusion.sandbox, "python": ""}
    assert run_program("print(7)", **options) == ("7\n", "")
    assert run_program("1 / 0", **options) == (
        "",
        "ended with exit code 1: ZeroDivisionError: division by zero",
    )
