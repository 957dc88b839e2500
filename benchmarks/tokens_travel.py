"""What a rank receives of one rollout batch, and how long that takes, from 8 to 1,024 ranks.

    python benchmarks/tokens_travel.py

Every rank has sampled the same number of sequences, and computes as many. The buffers of one rank
are built and read; no other rank is started. Beside them what every rank received before: all
rollouts, pickled. Prints the table of benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gapo_megatron import exchange
from gapo_megatron.config import Config, parse_config
from gapo_megatron.facts import Facts, Tokens
from gapo_megatron.learn.plan import wanted_sequences
from gapo_megatron.objective import make_batch
from gapo_megatron.types import Batch

GROUP_SIZE = 8
PROMPT_TOKENS, MEAN_TOKENS, MOST_TOKENS = 200, 2000, 8192


class Kept:
    """A channel whose messages are kept."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.messages: list[torch.Tensor] = []

    def send(self, buffer: torch.Tensor, *, to: int, tag: int) -> Any:
        self.messages.append(buffer)

    def receive(self, buffer: torch.Tensor, *, source: int, tag: int) -> Any:
        raise AssertionError("messages are read without a channel")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--sequences", type=int, default=16, help="sampled by each rank")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    print(
        "| ranks | sequences | facts, MB | tokens, MB | messages | facts, s | plan, s | pack, s ",
        end="",
    )
    print("| read, s | before: received, MB | before: read, s |")
    print("|" + "---|" * 11)
    for num_ranks in given.ranks:
        print(row(num_ranks, given.sequences, given.repeats), flush=True)


def row(num_ranks: int, share: int, repeats: int) -> str:
    """One line of the table: of a rank in the middle."""
    rank, facts = num_ranks // 2, make_facts(num_ranks, share)
    config = make_config(num_ranks, share)
    mine = np.flatnonzero(facts.holder == rank).tolist()
    held = {i: make_tokens(facts, i) for i in mine}

    def lay_out() -> Batch:
        return make_batch(Facts.join(Facts(part) for part in parts), config.objective.resolve())

    parts = np.split(facts.table, num_ranks)
    facts_s, batch = timed(lay_out, repeats)
    plan_s, wanted = timed(
        lambda: wanted_sequences(batch, config, data_parallel_size=num_ranks), min(repeats, 3)
    )

    def pack() -> exchange.Posted:
        channel = Kept(rank, num_ranks)
        return exchange.post(held, facts, wanted, channel=channel, tag=1)

    pack_s, _ = timed(pack, repeats)
    arriving = np.asarray(wanted[rank])
    arriving = arriving[facts.holder[arriving] != rank]
    messages = []
    for source in np.unique(facts.holder[arriving]):
        theirs = facts.take(arriving[facts.holder[arriving] == source])
        tokens = [make_tokens(theirs, i) for i in range(len(theirs))]
        messages.append((exchange.pack(tokens, theirs), theirs))
    read_s, _ = timed(lambda: [exchange.unpack(*one) for one in messages], repeats)
    num_bytes = sum(len(buffer) for buffer, _ in messages)
    # What one rank sent to every other; unpickling grows with their number.
    pickled = pickle.dumps([held[i] for i in mine])
    before_s, _ = timed(lambda: pickle.loads(pickled), repeats)
    cells = [
        *(f"{num_ranks:,}", f"{len(facts):,}", f"{facts.table.nbytes / 1e6:.2f}"),
        *(f"{num_bytes / 1e6:.2f}", f"{len(messages)}", f"{facts_s:.4f}", f"{plan_s:.3f}"),
        *(f"{pack_s:.4f}", f"{read_s:.4f}", f"{len(pickled) * num_ranks / 1e6:.1f}"),
        f"{before_s * num_ranks:.3f}",
    ]
    return "| " + " | ".join(cells) + " |"


def make_facts(num_ranks: int, share: int) -> Facts:
    """Log-normal lengths, some of them at the limit; three groups of four teach something."""
    random = np.random.default_rng(0)
    count = num_ranks * share
    lengths = random.lognormal(np.log(MEAN_TOKENS) - 0.32, 0.8, count).astype(np.int32)
    facts = Facts(np.zeros((count, Facts.NUM_COLUMNS), dtype=np.int32))
    facts.problem[:] = np.arange(count) // GROUP_SIZE
    facts.sample[:] = np.arange(count) % GROUP_SIZE
    facts.num_prompt_tokens[:] = PROMPT_TOKENS
    facts.num_response_tokens[:] = facts.num_sampled_tokens[:] = lengths.clip(1, MOST_TOKENS)
    facts.is_finished[:] = 1
    teaches = (facts.problem % 4 > 0) & (facts.sample < 1 + facts.problem % 7)
    facts.outcome[:] = teaches
    facts.holder[:] = np.arange(count) // share
    return facts


def make_tokens(facts: Facts, i: int) -> Tokens:
    """Sequence i, all of its tokens and log-probs 0."""
    prompt = np.zeros(facts.num_prompt_tokens[i], dtype=np.int32)
    response = np.zeros(facts.num_response_tokens[i], dtype=np.int32)
    nothing = np.empty(0, dtype=np.float32)
    return Tokens(prompt, response, np.zeros(len(response), np.float32), nothing)


def make_config(num_ranks: int, share: int) -> Config:
    """Four updates a step, at the widths of the paper."""
    num_prompts = num_ranks * share // GROUP_SIZE
    return parse_config(
        {
            "run": {"output_dir": str(Path("unused")), "num_steps": 1},
            "model": {"hf_dir": "unused"},
            "data": {"train_path": "unused", "max_prompt_tokens": PROMPT_TOKENS},
            "batch": {
                "rollout_prompts": num_prompts,
                "minibatch_prompts": num_prompts // 4,
                "rollouts_per_prompt": GROUP_SIZE,
                "max_tokens_per_microbatch": 16384,
            },
            "rollout": {"max_response_tokens": MOST_TOKENS},
            "reward": {"kind": "exact"},
        },
        source="benchmark",
    )


def timed(call: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Median seconds of processor time of a call, and its result."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()  # others may be at work on the machine
        result = call()
        seconds.append(time.process_time() - start)
    return sorted(seconds)[repeats // 2], result


if __name__ == "__main__":
    main()
