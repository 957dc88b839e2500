"""Mathematical verdicts per second: the pool of workers, and math-verify called directly.

    python benchmarks/verdicts.py [--responses 2048] [--workers 2]
    python benchmarks/verdicts.py --failures
    python benchmarks/verdicts.py --alone [--responses 1000]

A rollout batch is made of DeepScaleR's reference answers: groups of 8 in which half are right, some
of these in another spelling, and half are the answers of other problems, each at the end of a
solution of some thousand characters. `--failures` judges every reference answer against itself
instead, an expression against every reference (which has to be parsed then), and every answer of
the batch, and lists whatever is not as it should be. `--alone` judges the generated pairs of the
tests by math-verify alone, by it on answers in one spelling, and by this verifier, and counts the
wrong verdicts of both kinds.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path

import math_verify
from rich.console import Console
from rich.table import Table

from gapo_megatron.config import RewardConfig
from gapo_megatron.rewards import start_pool
from gapo_megatron.rewards.math.boxes import boxes
from gapo_megatron.rewards.math.spelling import clean
from gapo_megatron.types import Outcome

GROUP_SIZE = 8
Item = tuple[str, str]


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), metavar="DIR")
    parser.add_argument(
        "--responses", type=int, default=2048, help="responses of the batch, or pairs of each set"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--failures", action="store_true", help="list wrong verdicts; measure nothing"
    )
    parser.add_argument("--alone", action="store_true", help="compare with math-verify alone")
    arguments = parser.parse_args()
    if arguments.alone:
        compare_alone(num_pairs=arguments.responses, num_workers=arguments.workers)
        return
    answers = _read_answers(arguments.data)
    batch, expected = make_batch(answers, num_responses=arguments.responses)
    if arguments.failures:
        list_failures(sorted(set(answers)), batch, expected, num_workers=arguments.workers)
    else:
        measure(batch, num_workers=arguments.workers)


def make_batch(answers: list[str], *, num_responses: int) -> tuple[list[Item], list[bool]]:
    """Pairs (response, reference) of whole groups, and whether each is right; seeded."""
    rng = random.Random(0)
    items, expected = [], []
    for number in range(num_responses):
        if number % GROUP_SIZE == 0:
            reference = rng.choice(answers)
        right = rng.random() < 0.5
        given = _respell(reference) if right else rng.choice(answers)
        if given == reference and not right:
            right = True
        working = "We add $x^2 + 1$ and $\\frac{3}{4}$ to both sides of the equation. " * 60
        items.append((f"{working}\nThe answer is $\\boxed{{{given}}}$.", reference))
        expected.append(right)
    return items, expected


def measure(batch: list[Item], *, num_workers: int) -> None:
    """Time the batch in the pool, cold and warm, and math-verify on one core."""
    config = RewardConfig(kind="math")
    table = Table(title=f"{len(batch):,} responses, {num_workers} worker(s)", title_justify="left")
    for column in ("", "seconds", "verdicts/s", "verdicts"):
        table.add_column(column, justify="left" if column in ("", "verdicts") else "right")

    def add(name: str, seconds: float, outcomes: Counter[str]) -> None:
        shown = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(outcomes.items()))
        table.add_row(name, f"{seconds:.2f}", f"{len(batch) / seconds:,.0f}", shown)

    begin = time.perf_counter()
    with start_pool(config, num_workers=num_workers) as pool:
        pool.wait_until_ready()
        started = time.perf_counter()
        for name in ("pool", "pool, again (answers it has seen)"):
            begin_batch = time.perf_counter()
            verdicts = pool.judge(batch)
            add(
                name,
                time.perf_counter() - begin_batch,
                Counter(verdict.outcome.value for verdict in verdicts),
            )
    outcomes: Counter[str] = Counter()
    begin_batch = time.perf_counter()
    for response, reference in batch:
        gold = math_verify.parse(f"\\boxed{{{reference}}}")
        equal = math_verify.verify(gold, math_verify.parse(response))
        outcomes["correct" if equal else "wrong"] += 1
    add("math-verify called directly, one core", time.perf_counter() - begin_batch, outcomes)
    console = Console(width=120)
    console.print(table)
    console.print(f"workers ready after {started - begin:.2f} s")


def compare_alone(*, num_pairs: int, num_workers: int) -> None:
    """Count right answers refused and wrong ones accepted, of the tests' generated pairs."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout
    from tests.math_respellings import pairs
    from tests.math_rules import ruled_pairs

    sets = {
        "respellings": list(pairs(num_pairs, seed=1)),
        "rules": list(ruled_pairs(num_pairs, seed=1)),
    }
    with start_pool(RewardConfig(kind="math"), num_workers=num_workers) as pool:
        for name, made in sets.items():
            items = [(f"So $\\boxed{{{one.given}}}$.", one.reference) for one in made]
            ours = [verdict.outcome is Outcome.CORRECT for verdict in pool.judge(items)]
            verdicts = {
                "math-verify alone": [_alone(text, gold) for text, gold in items],
                "one spelling first": [
                    _alone(_spelled(text), _spelled(gold)) for text, gold in items
                ],
                "this verifier": ours,
            }
            for who, correct_or_not in verdicts.items():
                both = list(zip(made, correct_or_not, strict=True))
                missed = sum(pair.is_equal and not correct for pair, correct in both)
                accepted = sum(correct and not pair.is_equal for pair, correct in both)
                print(
                    f"{name:12} {who:18} {len(made):,} pairs: {missed} right ones missed, "
                    f"{accepted} wrong ones accepted"
                )


def _alone(response: str, reference: str) -> bool:
    """math-verify's verdict, without its limits on wall time, which a busy machine may reach."""
    boxed = reference if "\\boxed" in reference else f"\\boxed{{{reference}}}"
    gold = math_verify.parse(boxed, parsing_timeout=None)
    given = math_verify.parse(response, parsing_timeout=None)
    return bool(math_verify.verify(gold, given, timeout_seconds=None))


def _spelled(text: str) -> str:
    """The answer normalised by `spelling` and `signs` alone."""
    return f"\\boxed{{{clean((boxes(text) or [text])[-1] or '')}}}"


def list_failures(
    answers: list[str], batch: list[Item], expected: list[bool], *, num_workers: int
) -> None:
    """Print pairs whose verdict is not the expected one."""
    items = [(f"$\\boxed{{{answer}}}$", answer) for answer in answers]
    items += [(r"$\boxed{q^7+\sqrt{w}}$", answer) for answer in answers] + batch
    should = [True] * len(answers) + [False] * len(answers) + expected
    parts = ["itself"] * len(answers) + ["expression"] * len(answers) + ["batch"] * len(batch)
    with start_pool(RewardConfig(kind="math"), num_workers=num_workers) as pool:
        verdicts = pool.judge(items)
    counts: Counter[tuple[str, str]] = Counter()
    for number, ((response, reference), verdict) in enumerate(zip(items, verdicts, strict=True)):
        part = parts[number]
        as_it_should_be = verdict.outcome is (Outcome.CORRECT if should[number] else Outcome.WRONG)
        counts[part, "as expected" if as_it_should_be else verdict.outcome.value] += 1
        if not as_it_should_be:
            print(f"{verdict.outcome}: {reference!r} | {response[-100:]!r} | {verdict.reason}")
    for (part, outcome), count in sorted(counts.items()):
        print(f"{part:12} {outcome:12} {count:6,}")


def _respell(answer: str) -> str:
    answer = re.sub(r"^(-?)\\[dt]?frac\{(\w+)\}\{(\w+)\}$", r"\1\2/\3", answer)
    return answer.replace("\\sqrt{", "\\sqrt[2]{").replace("\\pi", "{\\pi}")


def _read_answers(data: Path) -> list[str]:
    path = data / "deepscaler" / "deepscaler_40k_by_difficulty.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["answer"] for line in lines]


if __name__ == "__main__":
    main()
