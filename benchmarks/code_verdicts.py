"""Verdicts on programs: reference solutions of public sets, and verdicts per second.

    python benchmarks/code_verdicts.py leetcode humaneval humaneval_plus codeforces
    python benchmarks/code_verdicts.py speed

Judges every reference solution, and the same solution with a planted bug; `speed` compares verdicts
per second with a bare subprocess that runs the same program without isolation.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gapo_megatron.rewards.code import call_program, read_tests, run_tests, verify
from gapo_megatron.rewards.code.forms import CallTests, Tests, TextTests
from gapo_megatron.types import Outcome

PLANTED_BUG = """
def _off(value):
    if isinstance(value, bool) or value is None: return not value
    if isinstance(value, (int, float, complex)): return value + 1
    if isinstance(value, str): return value + "x"
    if isinstance(value, (list, tuple)): return type(value)([*value, 0])
    if isinstance(value, (dict, set)): return type(value)() if value else {0: 0}
    if hasattr(value, "next"): return ListNode(0, value)
    return TreeNode(0, value)

def _plant(function):
    return lambda *args, **kwargs: _off(function(*args, **kwargs))

"""
"""Changes every value that a function returns; a line that wraps the function is appended."""


def leetcode(data: Path) -> list[tuple[str, str, Tests]]:
    """Read (solution, solution with a bug, tests) of every problem."""
    found = []
    for name in ("train", "test"):
        for row in json.loads((data / f"deepcoder_rllm/leetcode_{name}.json").read_text()):
            method = row["tests"]["functional"].rsplit("check(Solution().", 1)[1].rstrip(")\n ")
            bug = f"{PLANTED_BUG}Solution.{method} = _plant(Solution.{method})"
            solution = row["solutions"]
            found.append((solution, f"{solution}\n{bug}", read_tests(json.dumps(row["tests"]))))
    return found


def humaneval(data: Path) -> list[tuple[str, str, Tests]]:
    """As `leetcode`, by the asserts of HumanEval."""
    found = []
    for row in _humaneval_rows(data):
        solution = row["prompt"] + row["canonical_solution"]
        bug = f"{PLANTED_BUG}{row['entry_point']} = _plant({row['entry_point']})"
        tests = {key: row[key] for key in ("test", "entry_point", "prompt")}
        found.append((solution, f"{solution}\n{bug}", read_tests(json.dumps(tests))))
    return found


def humaneval_plus(data: Path) -> list[tuple[str, str, Tests]]:
    """As `leetcode`, by the inputs of HumanEval+ and what the solution returns for them.

    What it returns is asked of the same sandbox. So `correct` says only that values cross it
    unchanged and the same twice; whether verdicts are right, the bugs alone say here.
    """
    found = []
    for row in _humaneval_rows(data):
        solution = row["prompt"] + row["canonical_solution"]
        bug = f"{PLANTED_BUG}{row['entry_point']} = _plant({row['entry_point']})"
        inputs = [*row["base_input"], *row["plus_input"]]
        outputs = call_program(solution, row["entry_point"], inputs)
        tests = CallTests(row["entry_point"], tuple(inputs), tuple(outputs), row["atol"] or None)
        found.append((solution, f"{solution}\n{bug}", tests))
    return found


def _humaneval_rows(data: Path) -> list[dict[str, Any]]:
    lines = (data / "humaneval_plus/HumanEvalPlus.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


SETS: dict[str, Callable[[Path], list[tuple[str, str, Tests]]]] = {
    "leetcode": leetcode,
    "humaneval": humaneval,
    "humaneval_plus": humaneval_plus,
}


def judge_set(name: str, data: Path, *, num_problems: int, num_workers: int) -> None:
    """Judge every solution and every planted bug of a set."""
    problems = SETS[name](data)
    if num_problems:
        problems = random.Random(0).sample(problems, num_problems)
    for kind, place, wanted in (("solutions", 0, Outcome.CORRECT), ("bugs", 1, Outcome.WRONG)):
        start = time.monotonic()
        with ThreadPoolExecutor(num_workers) as pool:
            verdicts = list(
                pool.map(run_tests, [row[place] for row in problems], [row[2] for row in problems])
            )
        seconds = time.monotonic() - start
        counts = Counter(str(verdict.outcome) for verdict in verdicts)
        print(f"{name}: {len(problems)} {kind} in {seconds:.1f} s: {dict(counts)}", flush=True)
        for (solution, *_), verdict in zip(problems, verdicts, strict=True):
            if verdict.outcome is not wanted:
                print(f"  {verdict.outcome}: {verdict.reason} | {solution[:80]!r}")


def parse_codeforces(data: Path) -> None:
    """Read every problem's tests."""
    rows = json.loads((data / "deepcoder_rllm/codeforces_test.json").read_text())
    tests = [read_tests(json.dumps(row["tests"])) for row in rows]
    texts = sum(isinstance(test, TextTests) for test in tests)
    print(f"codeforces: {texts} of {len(rows)} parse as text tests")


def measure_speed(*, num_programs: int, num_workers: int, sandboxes: Sequence[str]) -> None:
    """Verdicts per second on a small program with one and with ten tests."""
    program = "a, b = map(int, input().split())\nprint(a + b)"
    for num_tests in (1, 10):
        tests = {"inputs": ["3 4"] * num_tests, "outputs": ["7"] * num_tests}
        answer, response = json.dumps(tests), f"```python\n{program}\n```"

        def bare(_: int, num_tests: int = num_tests) -> None:
            for _ in range(num_tests):
                subprocess.run(
                    ["/usr/bin/python3", "-c", program],
                    input=b"3 4",
                    check=True,
                    capture_output=True,
                )

        def sandboxed(_: int, sandbox: str, response: str = response, answer: str = answer) -> None:
            assert verify(response, answer, sandbox=sandbox).outcome is Outcome.CORRECT

        works: dict[str, Callable[[int], None]] = {"bare subprocess": bare}
        works |= {name: functools.partial(sandboxed, sandbox=name) for name in sandboxes}
        seconds: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(3):  # in turns, because the machine may be busy
            for name, work in works.items():
                start = time.monotonic()
                with ThreadPoolExecutor(num_workers) as pool:
                    list(pool.map(work, range(num_programs)))
                seconds[name].append(time.monotonic() - start)
        for name, runs in seconds.items():
            print(
                f"{num_programs} programs, {num_tests} tests each, {name}: "
                f"{num_programs / min(runs):.1f} verdicts/s (seconds: "
                f"{', '.join(f'{run:.2f}' for run in runs)})",
                flush=True,
            )


def main(arguments: Sequence[str]) -> int:
    """Run the parts named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("parts", nargs="+", choices=[*SETS, "codeforces", "speed"])
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared/data")
    parser.add_argument("--num-problems", type=int, default=0, help="0: all")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-programs", type=int, default=256, help="of the speed")
    parser.add_argument(
        "--sandbox", nargs="+", default=["bubblewrap"], help="of the speed: reward.sandbox of each"
    )
    options = parser.parse_args(arguments)
    for part in options.parts:
        if part == "speed":
            measure_speed(
                num_programs=options.num_programs,
                num_workers=options.num_workers,
                sandboxes=options.sandbox,
            )
        elif part == "codeforces":
            parse_codeforces(options.data)
        else:
            judge_set(
                part,
                options.data,
                num_problems=options.num_problems,
                num_workers=options.num_workers,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
