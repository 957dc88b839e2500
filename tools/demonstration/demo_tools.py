"""The task of `configs/demo_tools.toml`: products that the model cannot work out, but a tool can.

    prompt "47*86="   answer "4042"

The worked examples of the warm start mostly answer at once. The answers are right, but so small a
model cannot learn to multiply: it learns what an answer looks like. Now and then an example calls
the calculator, as `rollout.environments.tools` reads it, and copies the result. A model trained on
them calls as rarely, and is right about as often as it calls; training with the verifier can make
it call.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenizers import AddedToken
from transformers import Qwen2Tokenizer

from gapo_megatron.rollout.environments.tools import calculate
from gapo_tools.demonstration import demo_task

DIGITS = (2, 3, 4, 5)
"""Digits of each factor, one level each."""
CALL_RATE = 0.15
"""Share of worked examples that call the calculator."""
ABOUT_EXAMPLES = "most answer at once; some call the calculator."
"""Said of the worked examples by the demo."""

_OPEN, _CLOSE = '{"name": "calculator", "arguments": {"expression": "', '"}}'
_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", _OPEN, _CLOSE)
"""Texts that are a token each: a call would have 80 characters."""


@dataclass(frozen=True, slots=True)
class Product:
    """One problem: two factors of equally many digits."""

    factors: tuple[int, int]

    @property
    def level(self) -> str:
        return f"digits_{len(str(self.factors[0]))}"

    @property
    def expression(self) -> str:
        return "*".join(map(str, self.factors))

    @property
    def prompt(self) -> str:
        return f"{self.expression}="

    @property
    def answer(self) -> str:
        return str(self.factors[0] * self.factors[1])

    @property
    def direct(self) -> list[dict[str, str]]:
        """The worked example that answers at once."""
        return [{"prompt": self.prompt, "response": self.answer}]

    @property
    def called(self) -> list[dict[str, str]]:
        """The worked example that calls the calculator, a row for each turn of the model.

        The tool's result is in the second row's prompt: nothing is learned from it. Training adds
        EOS to the call, too; it is never sampled there, for `environment.stop` ends the turn.
        """
        call = f"<tool_call>{_OPEN}{self.expression}{_CLOSE}</tool_call>"
        result = f"<tool_response>{calculate(self.expression)}</tool_response>"
        return [
            {"prompt": self.prompt, "response": call},
            {"prompt": self.prompt + call + result, "response": self.answer},
        ]


def write_task(
    output_dir: Path, *, seed: int, num_eval: int, num_train: int, num_supervised: int
) -> None:
    """Write `eval.jsonl`, `train.jsonl` (data/schema.py) and `supervised.jsonl` (prompt, response).

    No eval problem is in a training file, and no problem is in `train.jsonl` twice.

    Args:
        output_dir: created if missing.
        seed: equal seeds write equal files.
        num_eval: eval problems, the same number per level.
        num_train: problems to sample rollouts for, the same number per level.
        num_supervised: rows of worked examples; levels and factors are drawn with replacement.

    Raises:
        ValueError: more problems of a level are asked for than there are.
    """
    draw = random.Random(seed)
    splits = demo_task.draw_splits(
        DIGITS, partial(_distinct, draw), num_eval=num_eval, num_train=num_train
    )
    for split, products in splits.items():
        demo_task.write_problems(output_dir, split, products)
    rows = _examples(draw, num_supervised, set(splits["eval"]))
    demo_task.write_rows(output_dir / "supervised.jsonl", rows)


def training_texts(rows: Sequence[dict[str, str]]) -> list[str]:
    """Training text of the tokenizer: worked examples without the texts that are tokens."""
    is_token = re.compile("|".join(map(re.escape, _TOKENS)))
    return [is_token.sub("", row["prompt"] + row["response"]) for row in rows]


def write_tokenizer(texts: Iterable[str], output_dir: Path) -> Qwen2Tokenizer:
    """Write the demo's tokenizer of characters, and a token for each constant part of a call.

    Characters that `texts` do not have are left out of what is encoded: little remains of an error
    that the calculator returns.
    """
    tokenizer = demo_task.write_tokenizer(texts, output_dir)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in _TOKENS])
    tokenizer.save_pretrained(output_dir)
    return tokenizer


def _distinct(draw: random.Random, digits: int, number: int) -> list[Product]:
    most = (9 * 10 ** (digits - 1)) ** 2
    if number > most:
        raise ValueError(
            f"cannot make {number} different products of {digits} digits: there are only {most}"
        )
    products: dict[Product, None] = {}
    while len(products) < number:
        products[_product(draw, digits)] = None
    return list(products)


def _examples(draw: random.Random, number: int, held_out: set[Product]) -> Iterator[dict[str, str]]:
    while number > 0:
        product = _product(draw, draw.choice(DIGITS))
        if product in held_out:
            continue
        rows = product.called if draw.random() < CALL_RATE else product.direct
        yield from rows[:number]
        number -= len(rows)


def _product(draw: random.Random, digits: int) -> Product:
    low, high = 10 ** (digits - 1), 10**digits - 1
    return Product((draw.randint(low, high), draw.randint(low, high)))
