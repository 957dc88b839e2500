"""Print the table of benchmarks/RESULTS.md on routing replay: errors of log-ratios in bf16.

    python benchmarks/routing.py            (nine minutes of one core)

A random model with experts takes one step of four updates (GAPO, random verdicts) in bf16. Of every
sequence with A not 0, before and after the step, the log-ratio is computed in bf16 and in fp32 on
the same weights; its error is the difference. "free": the routers choose in both passes; "replay":
the second pass has the experts that the first has chosen in bf16. Seeds draw weights, tokens and
verdicts anew; figures are root mean squares over sequences and seeds, with the smallest and the
largest seed.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from gapo_megatron.clock import Stopwatch
from gapo_megatron.learn.routes import StepRoutes
from gapo_megatron.learn.score import score
from gapo_megatron.learn.step import learn
from gapo_megatron.objective import make_batch
from gapo_megatron.policy import Policy, destroy, initialize
from gapo_megatron.policy.exact import exact_arithmetic
from gapo_megatron.rollouts import Batch, Rollouts
from gapo_megatron.types import Episode, Prompt
from tests.batches import make_rollouts
from tests.configs import config_of
from tests.dist import single_rank
from tests.learn_setup import planned

PROMPTS, GROUP_SIZE, MINIBATCHES = 8, 4, 4
MODEL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_hidden_layers": 6,
    "moe_intermediate_size": 96,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}


def save_model(folder: Path, seed: int) -> None:
    """Matrices that keep the size of their input, and so scores of experts with variance 1."""
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MODEL, max_position_embeddings=1024))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                fan_in = 1 if "embed" in name else parameter.shape[-1]
                parameter.normal_(std=fan_in**-0.5)
    model.save_pretrained(folder)


def make_step(seed: int, length: int) -> Rollouts:
    """Random responses of half to all of `length` tokens, with random verdicts."""
    random = np.random.default_rng(seed)

    def tokens(shortest: int, longest: int) -> np.ndarray:
        size = random.integers(shortest, longest + 1)
        return random.integers(0, MODEL["vocab_size"], size).astype(np.int32)

    groups, verdicts = [], []
    for number in range(PROMPTS):
        prompt = Prompt(f"p{number}", tuple(tokens(8, 16).tolist()), answer="")
        responses = [tokens(length // 2, length) for _ in range(GROUP_SIZE)]
        groups.append(
            tuple(
                Episode(prompt, i, ids, np.zeros(len(ids), dtype=np.float32))
                for i, ids in enumerate(responses)
            )
        )
        num_correct = random.integers(1, GROUP_SIZE)
        verdicts.append("c" * num_correct + "w" * (GROUP_SIZE - num_correct))
    return make_rollouts(groups, verdicts)


def measure(seed: int, length: int, learning_rate: float) -> dict[str, float]:
    """Mean squares over the sequences of a step, and shares of routes that agree."""
    with tempfile.TemporaryDirectory() as name, single_rank():
        save_model(Path(name), seed)
        config = config_of(
            {
                "model": {"hf_dir": name, "precision": "bf16"},
                "data": {"max_prompt_tokens": 16},
                "rollout": {"max_response_tokens": length, "temperature": 1.0},
                "batch": {
                    "rollout_prompts": PROMPTS,
                    "minibatch_prompts": PROMPTS // MINIBATCHES,
                    "rollouts_per_prompt": GROUP_SIZE,
                    "max_tokens_per_microbatch": 4 * length,
                },
                "optimizer": {"learning_rate": learning_rate, "weight_decay": 0.0},
            }
        )
        policy = Policy.build(config, initialize(config.parallel), "cpu")
        policy.load_initial_weights()
        batch = planned(make_batch(make_step(seed, length), config.objective.resolve()), config)
        routes = StepRoutes(policy, batch, replayed="trainer")
        before = scores(policy, batch, routes)
        metrics = learn(policy, batch, config.objective, config.rollout, Stopwatch())
        after = scores(policy, batch, routes)
        destroy()
    assert metrics is not None
    found = {name: log_ratios(before[name], after[name]) for name in before}
    return {
        "free": mean_square(found["free"] - found["free exact"]),
        "replay": mean_square(found["replay"] - found["replay exact"]),
        "signal free": mean_square(found["free exact"]),
        "signal replay": mean_square(found["replay exact"]),
        "left out": mean_square(found["replay exact"] - found["free exact"]),
        "same": metrics["experts/same_routes_share"],
        "same, lowest layer": metrics["experts/same_routes_share_min"],
    }


def scores(policy: Policy, batch: Batch, routes: StepRoutes) -> dict[str, dict[int, Tensor]]:
    """Log-probs by way: in bf16 and in fp32, free and with the routes first chosen in bf16."""
    assert batch.plan is not None
    packing = [indices for one in batch.plan.minibatches for indices in one.microbatches[0]]
    ways: dict[str, Any] = {"replay": partial(routes.tracing, 0), "free": list}
    found = {name: score(policy, batch, packing, mark=mark) for name, mark in ways.items()}
    with exact_arithmetic(policy):
        for name, mark in ways.items():
            found[f"{name} exact"] = score(policy, batch, packing, mark=mark)
    return found


def log_ratios(before: dict[int, Tensor], after: dict[int, Tensor]) -> Tensor:
    """D of every sequence, float64."""
    return torch.stack([(after[i].double() - before[i].double()).mean() for i in before])


def mean_square(values: Tensor) -> float:
    """Over sequences."""
    return float(values.square().mean())


def cell(values: list[float]) -> str:
    """Root of the mean, and of the smallest and the largest."""
    mean, low, high = (math.sqrt(v) for v in (sum(values) / len(values), min(values), max(values)))
    return f"{mean:.1e} ({low:.1e} to {high:.1e})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-30, 1e-6, 1e-5])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| learning rate | same routes, lowest layer | step, free | error, free | step, replay | "
        "error, replay | step, replay - free |"
    )
    for rate in arguments.rates:
        seeds = [measure(seed, arguments.length, rate) for seed in range(arguments.seeds)]
        columns = {name: [one[name] for one in seeds] for name in seeds[0]}
        same, lowest = (np.mean(columns[name]) for name in ("same", "same, lowest layer"))
        names = ("signal free", "free", "signal replay", "replay", "left out")
        cells = [f"{rate:g}", f"{same:.2%}, {lowest:.2%}", *(cell(columns[n]) for n in names)]
        print(f"| {' | '.join(cells)} |", flush=True)
