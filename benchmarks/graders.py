"""Accuracy and verdicts per CPU second beside other graders, in one run, on outside labels.

    python benchmarks/graders.py [--data DIR] [--nemo-skills CHECKOUT]

The items are the tests of other verifiers that can be boxed (tests/peers/test_math_verdicts.py),
Minerva's answers with the units of their own solutions, right and with a changed digit, solutions
of GSM8K with their published labels, and DeepScaleR's answers, respelled or of other problems. Each
grader judges each item once, in the order of the items, in a process of its own; an unknown verdict
agrees with no label. math-verify reads the box alone, as its README does; TRL's `accuracy_reward`
the whole response; NeMo-Skills' `math_equal` what its `extract_answer` takes out of it.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout
Item = tuple[str, str, bool]
"""Response, reference, whether it is right."""


def main() -> None:
    """Parse the command line, judge, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, default=Path("data/graders"), metavar="DIR")
    parser.add_argument("--nemo-skills", type=Path, metavar="DIR", help="a checkout of it")
    parser.add_argument("--out", type=Path, help="write every verdict there, as JSON lines")
    arguments = parser.parse_args()
    items = read_items(arguments.data)
    names = ["ours", "math-verify", "TRL"] + ["NeMo-Skills"] * bool(arguments.nemo_skills)
    print(f"{len(items)} items, {sum(right for *_, right in items)} of them right\n")
    print("| grader | agrees | right, refused | wrong, accepted | unknown | per CPU s | p99, ms |")
    print("|---|---|---|---|---|---|---|")
    rows: dict[str, list[bool | None]] = {}
    context = multiprocessing.get_context("spawn")
    for name in names:
        with context.Pool(1) as pool:
            times, verdicts = pool.apply(judge, (name, items, arguments.nemo_skills))
        both = list(zip(items, verdicts, strict=True))
        agree = sum(verdict is right for (_, _, right), verdict in both) / len(items)
        missed = sum(right and verdict is False for (_, _, right), verdict in both)
        accepted = sum(verdict is True and not right for (_, _, right), verdict in both)
        slow = sorted(times)[int(0.99 * len(times))] * 1000
        print(
            f"| {name} | {agree:.1%} | {missed} | {accepted} | {verdicts.count(None)} "
            f"| {len(items) / sum(times):.0f} | {slow:.0f} |"
        )
        rows[name] = verdicts
    if arguments.out:
        with arguments.out.open("w", encoding="utf-8") as out:
            for (text, gold, right), *verdicts in zip(items, *rows.values(), strict=True):
                out.write(json.dumps([text[-200:], gold, right, *verdicts]) + "\n")


def read_items(data: Path) -> list[Item]:
    """The items in a fixed order."""
    from tests.minerva import units
    from tests.peers.test_math_verdicts import SUITES, _box, _boxed, _respell, _rows

    items: list[Item] = []
    for suite in SUITES:
        cases = [(case, _boxed(case)) for case in _rows(f"verifier_pairs/{suite}.jsonl")]
        items += [(t, c["gold"] or "", bool(c["expected"])) for c, t in cases if t is not None]
    rng = random.Random(48)
    for reference, given in units(data):
        items.append((_box(given), reference, True))
        digit = str((int(given[0]) + 1) % 10) if given[0].isdigit() else None
        items += [(_box(digit + given[1:]), reference, False)] if digit else []
    solutions = _rows("verifier_completions/gsm8k_model_solutions.jsonl")
    for row in rng.sample(solutions, 120):
        one = row[rng.choice(("6b_finetuning", "175b_verification"))]
        given = one["solution"].rpartition("A:")[2].strip() if "A:" in one["solution"] else ""
        reference = row["ground_truth"].rpartition("A:")[2].strip()
        items.append((f"{one['solution']}\n{_box(given)}", reference, bool(one["is_correct"])))
    rows = _rows("deepscaler/deepscaler_40k_by_difficulty.jsonl")
    answers = sorted({row["answer"] for row in rows if len(row["answer"]) > 4})
    for reference in rng.sample(answers, 120):
        items.append((_box(_respell(reference)), reference, True))
        items.append((_box(rng.choice(answers)), reference, False))
    return items


def judge(
    name: str, items: list[Item], nemo_skills: Path | None
) -> tuple[list[float], list[bool | None]]:
    """CPU seconds and verdict of each item."""
    logging.disable(logging.CRITICAL)
    grade = _grader(name, nemo_skills)
    grade("\\boxed{x+1}", "1+x")  # imports and caches of the libraries
    times, verdicts = [], []
    for response, reference, _ in items:
        begin = time.process_time()
        verdicts.append(grade(response, reference))
        times.append(time.process_time() - begin)
    return times, verdicts


def _grader(name: str, nemo_skills: Path | None) -> Callable[[str, str], bool | None]:
    import math_verify

    from gapo_megatron.rewards import math
    from gapo_megatron.types import Outcome

    def ours(response: str, reference: str) -> bool | None:
        outcome = math.verify(response, reference).outcome
        return {Outcome.CORRECT: True, Outcome.WRONG: False}.get(outcome)

    def alone(response: str, reference: str) -> bool | None:
        gold = math_verify.parse(f"\\boxed{{{reference}}}", parsing_timeout=None)
        given = math_verify.parse(response, parsing_timeout=None)
        return bool(math_verify.verify(gold, given, timeout_seconds=None))

    if name == "TRL":
        from trl.rewards import accuracy_reward

        def trl(response: str, reference: str) -> bool | None:
            found = accuracy_reward([[{"content": response}]], [f"\\boxed{{{reference}}}"])[0]
            return None if found is None else bool(found)

        return trl
    if name == "NeMo-Skills":
        sys.path.insert(0, str(nemo_skills))
        sys.modules["nemo_skills.utils"] = ModuleType("nemo_skills.utils")  # needs much else
        sys.modules["nemo_skills.utils"].get_logger_name = str  # type: ignore[attr-defined]
        from nemo_skills.evaluation import math_grader

        def nemo(response: str, reference: str) -> Any:
            return bool(math_grader.math_equal(reference, math_grader.extract_answer(response)))

        return nemo
    return ours if name == "ours" else alone


if __name__ == "__main__":
    main()
