"""The task of `configs/demo_language.toml`: instructions that a real language model should follow.

    prompt "Write one sentence about the sea. Use fewer than 9 words."
    answer {"instructions": [{"id": "length_constraints:number_words", ...}]}

Each prompt asks for a sentence on a subject and has one constraint, a check of IFEval's
(`rewards.instructions`). Held out are whole combinations of subject and constraint.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gapo_tools.demonstration.demo_task import write_problems

ASKS = ("Write one sentence about {}.", "Describe {} in one sentence.", "Tell me a fact about {}.")
SUBJECTS = (
    *("the sea", "a cat", "rain", "a bicycle", "bread", "the moon", "a train", "coffee", "winter"),
    *("a teacher", "music", "a river", "the city", "a horse", "tea", "a bridge", "an old house"),
    *("the desert", "a library", "a garden", "snow", "a forest", "the wind", "a market", "a boat"),
    *("an island", "the summer", "a doctor", "a farm", "a clock", "an apple", "a mountain"),
)
WORDS = ("green", "morning", "quiet", "stone", "light", "happy", "window", "paper", "silver")
ENDS = ("That is all.", "The end.", "Thank you.", "Good night.")


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a response has to fulfil."""

    level: str
    text: str
    check: dict[str, Any]
    """An instruction of `rewards.instructions`, with its arguments."""


CONSTRAINTS = (
    *(
        Constraint(
            "words",
            f"Use fewer than {most} words.",
            {"id": "length_constraints:number_words", "relation": "less than", "num_words": most},
        )
        for most in range(8, 13)
    ),
    *(
        Constraint(
            "keywords",
            f"Use the words {first} and {second}.",
            {"id": "keywords:existence", "keywords": [first, second]},
        )
        for first, second in itertools.combinations(WORDS, 2)
    ),
    *(
        Constraint("no_comma", text, {"id": "punctuation:no_comma"})
        for text in ("Do not use any commas.", "Leave out all commas.", "Write without commas.")
    ),
    *(
        Constraint(
            "end", f"End with the words: {end}", {"id": "startend:end_checker", "end_phrase": end}
        )
        for end in ENDS
    ),
)
LEVELS = tuple(dict.fromkeys(constraint.level for constraint in CONSTRAINTS))


@dataclass(frozen=True, slots=True)
class Request:
    """One problem."""

    subject: str
    constraint: Constraint
    ask: str

    @property
    def level(self) -> str:
        return self.constraint.level

    @property
    def prompt(self) -> str:
        return f"{self.ask.format(self.subject)} {self.constraint.text}"

    @property
    def answer(self) -> str:
        return json.dumps({"instructions": [self.constraint.check]})


def write_task(output_dir: Path, *, seed: int, num_eval: int, num_train: int) -> None:
    """Write `eval.jsonl` and `train.jsonl` (data/schema.py).

    The splits share no combination of subject and constraint. No problem is in a file twice.

    Args:
        output_dir: created if missing.
        seed: equal seeds write equal files.
        num_eval: eval problems, each another combination; the same number per level.
        num_train: training problems, the same number per level as far as there are so many.

    Raises:
        ValueError: more eval problems of a level are asked for than there are combinations.
    """
    draw = random.Random(seed)
    splits: dict[str, list[Request]] = {"eval": [], "train": []}
    of_eval, of_train = num_eval // len(LEVELS), num_train // len(LEVELS)
    for level in LEVELS:
        constraints = [one for one in CONSTRAINTS if one.level == level]
        combinations = list(itertools.product(SUBJECTS, constraints))
        draw.shuffle(combinations)
        if of_eval >= len(combinations):
            raise ValueError(
                f"cannot hold out {of_eval} of the {len(combinations)} combinations of subject "
                f"and constraint of {level!r}"
            )
        held_out, others = combinations[:of_eval], combinations[of_eval:]
        splits["eval"] += [Request(*one, draw.choice(ASKS)) for one in held_out]
        splits["train"] += _distinct(draw, others, of_train)
    for split, requests in splits.items():
        write_problems(output_dir, split, requests)


def _distinct(
    draw: random.Random, combinations: Sequence[tuple[str, Constraint]], most: int
) -> list[Request]:
    requests = [Request(*one, ask) for one in combinations for ask in ASKS]
    draw.shuffle(requests)
    return requests[:most]
