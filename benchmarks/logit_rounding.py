"""Print the table of docs/numerics.md on what rounding logits to 16 bits costs.

    python benchmarks/logit_rounding.py            (a quarter of an hour of one core)

Errors against float64 on the same bfloat16 inputs, of logits kept in float32 (this package) or
rounded to 16 bits. Labels are sampled from the policy. D compares it with a policy 1 % apart; its
rms is the root of the mean square over sequences of L tokens, with the 95 % Student-t interval of
that mean over seeds.

Synthetic hidden states: "unit variance"; "peaked", as a trained model's: every row has a favourite
with a logit of 18 +- 3, the others have 0 +- 3; "common offset", 200 added to unit variance.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from gapo_megatron.logprob import token_log_probs
from gapo_tools.evaluation.statistics import mean_interval

ROWS, HIDDEN_SIZE, VOCAB_SIZE = 4096, 1536, 5003
LENGTHS = (256, 1024, 4096)
KINDS = ("unit variance", "peaked", "common offset")


@dataclass
class Errors:
    """Errors of one way to keep logits, over seeds."""

    largest: float = 0.0
    squares: list[float] = field(default_factory=list)
    """Mean square of a token's error, by seed."""
    of_mean: dict[int, list[float]] = field(default_factory=lambda: {n: [] for n in LENGTHS})
    """Length -> mean square of D's error over the sequences of a seed, by seed."""

    def add(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Add a seed's errors under both policies, [ROWS] float64 each."""
        self.largest = max(self.largest, float(old.abs().max()))
        self.squares.append(float(old.square().mean()))
        for length, found in self.of_mean.items():
            means = (new - old).view(-1, length).mean(1)
            found.append(float(means.square().mean()))

    def cells(self) -> list[str]:
        cells = [f"{self.largest:.1e}", f"{math.sqrt(sum(self.squares) / len(self.squares)):.1e}"]
        for squares in self.of_mean.values():
            found = mean_interval(squares)
            mean, low, high = (math.sqrt(max(v, 0)) for v in (found.mean, found.low, found.high))
            cells.append(f"{mean:.1e} ({low:.1e} to {high:.1e})")
        return cells


def problem(kind: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states of two policies, [ROWS, HIDDEN_SIZE], and their output layer, all bfloat16."""
    torch.manual_seed(seed)
    hidden = torch.randn(ROWS, HIDDEN_SIZE)
    weight = torch.randn(VOCAB_SIZE, HIDDEN_SIZE) / HIDDEN_SIZE**0.5
    if kind == "peaked":
        hidden = weight[torch.randint(VOCAB_SIZE, (ROWS,))] * 18 + 3 * hidden
    if kind == "common offset":
        hidden[:, -1], weight[:, -1] = 16.0, 12.5
    moved = hidden * (1 + 0.01 * torch.randn(hidden.shape))
    return hidden.bfloat16(), moved.bfloat16(), weight.bfloat16()


def rounded(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, dtype: torch.dtype
) -> torch.Tensor:
    """Log-probs of logits that are rounded to `dtype` before a float32 softmax."""
    logits = (hidden.float() @ weight.float().T).to(dtype).float()
    return torch.log_softmax(logits, 1).gather(1, labels[:, None])[:, 0]


def measure(kind: str, num_seeds: int) -> None:
    """Print the rows of one kind of logits, and how peaked they are."""
    heads: dict[str, Callable[..., Any]] = {"float32": token_log_probs}
    for dtype in (torch.float16, torch.bfloat16):
        heads[str(dtype).removeprefix("torch.")] = functools.partial(rounded, dtype=dtype)
    found = {name: Errors() for name in heads}
    entropy = largest = 0.0
    for seed in range(num_seeds):
        old, new, weight = problem(kind, seed)
        exact = [torch.log_softmax(one.double() @ weight.double().T, 1) for one in (old, new)]
        labels = torch.multinomial(exact[0].exp(), 1)
        entropy -= float((exact[0].exp() * exact[0]).sum(1).mean()) / num_seeds
        largest += float((old.float() @ weight.float().T).amax(1).mean()) / num_seeds
        exact = [one.gather(1, labels)[:, 0] for one in exact]
        for name, function in heads.items():
            pairs = zip((old, new), exact, strict=True)
            errors = [function(h, weight, labels[:, 0]).double() - e for h, e in pairs]
            found[name].add(*errors)
    for name, errors in found.items():
        print(f"| {kind} | {name} | {' | '.join(errors.cells())} |", flush=True)
    print(f"{kind}: mean entropy {entropy:.2f} nats, mean of the largest logit {largest:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=32)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| logits | kept in | max | rms | D, L = 256 | D, L = 1024 | D, L = 4096 |")
    for kind in arguments.kinds:
        measure(kind, arguments.seeds)
