"""The demo's task, tokenizer and model: chains of additions, harder the longer they are.

    prompt "3+8+5+9="   response "11>16>25"   answer "25"

The worked examples of the warm start have slips: now and then a running sum is off by one, and the
following sums build on it. A model trained on them slips as often, so it solves short chains more
often than long ones (groups with every c), and training with the verifier can remove the slips.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import sentencepiece
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from gapo_megatron.rewards.exact import FIELD_SEPARATOR

P = TypeVar("P")
"""A problem's class."""
ADDITIONS = (2, 3, 5, 7)
"""Additions in a chain, one level each."""
SLIP_RATE = 0.2
"""Share of the running sums of worked examples that are off by one."""
ABOUT_EXAMPLES = "some of the running sums are wrong."
"""Said of the worked examples by the demo."""


@dataclass(frozen=True, slots=True)
class Chain:
    """One problem: digits 1-9, added from left to right."""

    terms: tuple[int, ...]

    @property
    def level(self) -> str:
        return f"additions_{len(self.terms) - 1}"

    @property
    def prompt(self) -> str:
        return "+".join(map(str, self.terms)) + "="

    @property
    def answer(self) -> str:
        return str(sum(self.terms))

    def worked(self, slips: Sequence[int]) -> str:
        """Every running sum, the answer last; `slips[n]` is added to sum n and all after it."""
        sums, total = [], self.terms[0]
        for term, slip in zip(self.terms[1:], slips, strict=True):
            total += term + slip
            sums.append(str(total))
        return FIELD_SEPARATOR.join(sums)


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
        num_supervised: worked examples with slips; levels and chains are drawn with replacement.

    Raises:
        ValueError: more problems of a level are asked for than there are.
    """
    draw = random.Random(seed)
    splits = draw_splits(
        ADDITIONS, partial(_distinct, draw), num_eval=num_eval, num_train=num_train
    )
    # Worked examples are drawn anew, and skip the eval problems.
    held_out = set(splits["eval"])
    for split, chains in splits.items():
        write_problems(output_dir, split, chains)
    write_rows(
        output_dir / "supervised.jsonl",
        (
            {"prompt": chain.prompt, "response": chain.worked(_slips(draw, len(chain.terms) - 1))}
            for chain in _examples(draw, num_supervised, held_out)
        ),
    )


class Problem(Protocol):
    """A problem of a demo."""

    @property
    def prompt(self) -> str: ...

    @property
    def answer(self) -> str: ...

    @property
    def level(self) -> str: ...


def draw_splits(
    levels: Sequence[int],
    distinct: Callable[[int, int], list[P]],
    *,
    num_eval: int,
    num_train: int,
) -> dict[str, list[P]]:
    """Draw the problems of the splits `eval` and `train`, which share none.

    Args:
        levels: levels of the problems.
        distinct: draws that many problems of a level, all different.
        num_eval: eval problems, the same number per level.
        num_train: training problems, likewise.
    """
    splits: dict[str, list[P]] = {"eval": [], "train": []}
    of_eval, of_train = num_eval // len(levels), num_train // len(levels)
    for level in levels:
        # One draw without repetition, cut in two.
        problems = distinct(level, of_eval + of_train)
        splits["eval"] += problems[:of_eval]
        splits["train"] += problems[of_eval:]
    return splits


def write_problems(output_dir: Path, split: str, problems: Sequence[Problem]) -> None:
    """Write `{split}.jsonl` (data/schema.py) into a folder, which is created if missing."""
    output_dir.mkdir(parents=True, exist_ok=True)
    write_rows(
        output_dir / f"{split}.jsonl",
        (
            {
                "id": f"{split}-{number}",
                "prompt": problem.prompt,
                "answer": problem.answer,
                "level": problem.level,
            }
            for number, problem in enumerate(problems)
        ),
    )


def write_rows(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def training_texts(rows: Sequence[dict[str, str]]) -> list[str]:
    """Training text of the tokenizer: prompts and responses of the worked examples."""
    return [row["prompt"] + row["response"] for row in rows]


def write_tokenizer(texts: Iterable[str], output_dir: Path) -> Qwen2Tokenizer:
    """Train SentencePiece on `texts` and write it as a Hugging Face folder with the same ids.

    The pieces are ASCII characters without spaces, so every number has one tokenisation. Ids 0, 1
    and 2 are padding, end of sequence and unknown; there is no beginning-of-sequence token.
    """
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=trained,
        model_type="char",
        vocab_size=64,
        hard_vocab_limit=False,  # as many pieces as there are characters
        character_coverage=1.0,
        add_dummy_prefix=False,
        pad_id=0,
        pad_piece="<pad>",
        eos_id=1,
        eos_piece="</s>",
        unk_id=2,
        unk_piece="<unk>",
        bos_id=-1,
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    # The class transformers loads for any Qwen2 folder. ASCII bytes stand for themselves in it.
    tokenizer = Qwen2Tokenizer(
        vocab={pieces.id_to_piece(i): i for i in range(len(pieces))},
        merges=[],
        unk_token="<unk>",
        eos_token="</s>",
        pad_token="<pad>",
    )
    output_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(output_dir)
    (output_dir / "tokenizer.model").write_bytes(trained.getvalue())
    return tokenizer


def write_initial_model(tokenizer: Qwen2Tokenizer, output_dir: Path, *, seed: int) -> None:
    """Write a randomly initialised Qwen2 of 0.8 million parameters beside its tokenizer."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.08,  # about 1/sqrt(hidden_size): learns in half the steps of 0.02
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(output_dir)


def _distinct(draw: random.Random, additions: int, number: int) -> list[Chain]:
    if number > 9 ** (additions + 1):
        raise ValueError(
            f"cannot make {number} different chains of {additions} additions: "
            f"there are only {9 ** (additions + 1)}"
        )
    chains: dict[Chain, None] = {}
    while len(chains) < number:
        chains[_chain(draw, additions)] = None
    return list(chains)


def _examples(draw: random.Random, number: int, held_out: set[Chain]) -> Iterator[Chain]:
    while number > 0:
        chain = _chain(draw, draw.choice(ADDITIONS))
        if chain not in held_out:
            yield chain
            number -= 1


def _chain(draw: random.Random, additions: int) -> Chain:
    return Chain(tuple(draw.randint(1, 9) for _ in range(additions + 1)))


def _slips(draw: random.Random, number: int) -> list[int]:
    return [draw.choice((-1, 1)) if draw.random() < SLIP_RATE else 0 for _ in range(number)]
