"""The task of `configs/demo_language.toml`: word problems of one step, for a real language model.

    prompt "Kate has 7 coins. Paul gives Kate 5 more. How many coins does Kate have now?"
    answer "12"

A problem is a template with two numbers, told of people and things drawn at random. Held out are
whole combinations of template and numbers: no training problem has the same sum in the same words
about others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gapo_megatron.ops.prepare.demo_task import write_problems

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Kate", "Paul")
THINGS = ("apples", "books", "cards", "coins", "cookies", "marbles", "pencils", "shells")

Combination = tuple[str, tuple[int, int]]
"""A template and its numbers."""


@dataclass(frozen=True, slots=True)
class Level:
    """Problems of one operation."""

    answer: Callable[[int, int], int]
    pairs: tuple[tuple[int, int], ...]
    """Numbers (a, b) that its templates are told with."""
    templates: tuple[str, ...]
    """With the numbers {a}, {b}, two different people {x}, {y}, and the thing {t}."""


LEVELS = {
    "add": Level(
        answer=lambda a, b: a + b,
        pairs=tuple((a, b) for a in range(2, 11) for b in range(2, 11)),
        templates=(
            "{x} has {a} {t}. {y} gives {x} {b} more. How many {t} does {x} have now?",
            "{x} has {a} {t} and {y} has {b} {t}. How many {t} do they have together?",
            "{x} bought {a} {t} yesterday and {b} {t} today. How many {t} did {x} buy in all?",
        ),
    ),
    "subtract": Level(
        answer=lambda a, b: a - b,
        pairs=tuple((a, b) for a in range(4, 19) for b in range(2, 10) if 2 <= a - b <= 9),
        templates=(
            "{x} has {a} {t}. {x} gives {b} to {y}. How many {t} does {x} have left?",
            "There are {a} {t} in a box. {x} takes {b} of them. How many {t} are left?",
            "{x} has {a} {t}. {y} has {b} {t}. How many more {t} does {x} have than {y}?",
        ),
    ),
    "multiply": Level(
        answer=lambda a, b: a * b,
        pairs=tuple((a, b) for a in range(2, 10) for b in range(2, 10)),
        templates=(
            "{x} has {a} boxes with {b} {t} in each box. How many {t} does {x} have?",
            "{x} buys {b} {t} every day. How many {t} does {x} buy in {a} days?",
            "Each of {a} children brings {b} {t}. How many {t} do they bring in all?",
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class WordProblem:
    """One problem."""

    level: str
    template: str
    pair: tuple[int, int]
    people: tuple[str, str]
    thing: str

    @property
    def prompt(self) -> str:
        (a, b), (x, y) = self.pair, self.people
        return self.template.format(a=a, b=b, x=x, y=y, t=self.thing)

    @property
    def answer(self) -> str:
        return str(LEVELS[self.level].answer(*self.pair))


def write_task(output_dir: Path, *, seed: int, num_eval: int, num_train: int) -> None:
    """Write `eval.jsonl` and `train.jsonl` (data/schema.py).

    The splits share no combination of template and numbers. No problem of a file is there twice.

    Args:
        output_dir: created if missing.
        seed: equal seeds write equal files.
        num_eval: eval problems, each another combination; the same number per level.
        num_train: training problems, the same number per level.

    Raises:
        ValueError: more eval problems of a level are asked for than a half of its combinations.
    """
    draw = random.Random(seed)
    splits: dict[str, list[WordProblem]] = {"eval": [], "train": []}
    of_eval, of_train = num_eval // len(LEVELS), num_train // len(LEVELS)
    for name, level in LEVELS.items():
        combinations = [(template, pair) for template in level.templates for pair in level.pairs]
        draw.shuffle(combinations)
        if of_eval > len(combinations) // 2:
            raise ValueError(
                f"cannot hold out {of_eval} of the {len(combinations)} combinations of template "
                f"and numbers of {name!r}: a half is the most"
            )
        splits["eval"] += [_told(draw, name, combination) for combination in combinations[:of_eval]]
        splits["train"] += _distinct(draw, name, combinations[of_eval:], of_train)
    for split, problems in splits.items():
        write_problems(output_dir, split, problems)


def _distinct(
    draw: random.Random,
    level: str,
    combinations: Sequence[tuple[str, tuple[int, int]]],
    number: int,
) -> list[WordProblem]:
    """Problems that take turns with the combinations: each is told as often as the others."""
    problems: dict[str, WordProblem] = {}
    turn = 0
    while len(problems) < number:
        problem = _told(draw, level, combinations[turn % len(combinations)])
        # By its text: a template that does not name the second person tells the same without them.
        turn += problem.prompt not in problems
        problems.setdefault(problem.prompt, problem)
    return list(problems.values())


def _told(draw: random.Random, level: str, combination: Combination) -> WordProblem:
    x, y = draw.sample(NAMES, 2)
    return WordProblem(level, *combination, (x, y), draw.choice(THINGS))
