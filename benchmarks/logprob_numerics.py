"""Print the tables of docs/numerics.md: errors against float64, and batch invariance.

    python benchmarks/logprob_numerics.py            (about a minute on one core)

Synthetic hidden states: "plain" logits of unit variance; "peaked" ones with maxima about 25 and
labels anywhere between certain and impossible; "offset" ones with 200 added to all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gapo_megatron.logprob import token_log_probs

ROWS, HIDDEN_SIZE, VOCAB_SIZE = 4096, 1536, 5003


def problem(kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, output layer (bfloat16) and labels."""
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN_SIZE)
    weight = torch.randn(VOCAB_SIZE, HIDDEN_SIZE) / HIDDEN_SIZE**0.5
    labels = torch.randint(VOCAB_SIZE, (ROWS,))
    if kind == "peaked":
        hidden = weight[labels] * 13 + 3 * hidden
    if kind == "offset":
        hidden[:, -1], weight[:, -1] = 16.0, 12.5
    return hidden.bfloat16(), weight.bfloat16(), labels


def exact(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probs in float64."""
    log_p = torch.log_softmax(hidden.double() @ weight.double().T, 1)
    return log_p.gather(1, labels[:, None])[:, 0]


def rounded(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probs of a bfloat16 output layer followed by a float32 softmax."""
    log_p = torch.log_softmax((hidden @ weight.T).float(), 1)
    return log_p.gather(1, labels[:, None])[:, 0]


def print_errors() -> None:
    """Largest and rms error of log-probs, rms error of D over sequences of L tokens."""
    print("| logits | kept in | max | rms | D, L = 256 | D, L = 1024 | D, L = 4096 |")
    for kind in ("plain", "peaked", "offset"):
        hidden, weight, labels = problem(kind)
        # A policy after an update: hidden states changed by 1 % of their size.
        moved = (hidden.float() * (1 + 0.01 * torch.randn(hidden.shape))).bfloat16()
        new, old = exact(hidden, weight, labels), exact(moved, weight, labels)
        for name, function in (("float32", token_log_probs), ("bfloat16", rounded)):
            error = function(hidden, weight, labels).double() - new
            difference = error - (function(moved, weight, labels).double() - old)
            means = [
                difference.view(-1, n).mean(1).square().mean().sqrt() for n in (256, 1024, 4096)
            ]
            cells = [error.abs().max(), error.square().mean().sqrt(), *means]
            print(f"| {kind} | {name} | " + " | ".join(f"{float(c):.1e}" for c in cells) + " |")


def print_invariance() -> None:
    """Print the numbers of rows for which a row's bits differ from those among 1024 rows."""
    hidden, weight, labels = (t[:1024] for t in problem("plain"))
    hidden, weight = hidden.float(), weight.float()
    sizes = [*range(1, 65), 100, 127, 128, 129, 500, 511, 512, 513, 1000]

    def differing(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[int]:
        whole = function(hidden, labels)
        return [n for n in sizes if not torch.equal(function(hidden[:n], labels[:n]), whole[:n])]

    for threads in (1, 2):
        torch.set_num_threads(threads)
        print(f"threads {threads}: plain product", differing(lambda h, y: h @ weight.T), end="; ")
        print("operator", differing(lambda h, y: token_log_probs(h, weight, y % len(weight))))
    torch.set_num_threads(1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print_errors()
    print_invariance()
