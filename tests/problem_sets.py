"""Reference solutions of public sets, each with the same solution that has a planted bug."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from gapo_megatron.rewards.code import read_tests
from gapo_megatron.rewards.code.forms import Tests

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
    lines = (data / "humaneval_plus/HumanEvalPlus.jsonl").read_text().splitlines()
    found = []
    for row in map(json.loads, lines):
        solution = row["prompt"] + row["canonical_solution"]
        bug = f"{PLANTED_BUG}{row['entry_point']} = _plant({row['entry_point']})"
        tests = {key: row[key] for key in ("test", "entry_point", "prompt")}
        found.append((solution, f"{solution}\n{bug}", read_tests(json.dumps(tests))))
    return found


SETS: dict[str, Callable[[Path], list[tuple[str, str, Tests]]]] = {
    "leetcode": leetcode,
    "humaneval": humaneval,
}
