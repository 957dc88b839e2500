"""Print the tables of benchmarks/RESULTS.md on routing replay: errors of log-ratios in bf16.

    python benchmarks/routing.py            (ten minutes of one core)

A random model with experts takes one step of four updates (GAPO, random verdicts) in bf16. Of every
sequence with A not 0, before and after the step, the log-ratio is computed in bf16 and in fp32 on
the same weights; its error is the difference. "free": the routers choose in both passes; "replay":
the second pass has the experts that the first has chosen in bf16. Seeds draw weights, tokens and
verdicts anew; figures are root mean squares over sequences and seeds, with the smallest and the
largest seed.

Then, at equal weights in bf16, an engine (transformers) against the trainer: how far their
log-probs of the same tokens differ if both route freely, and if the trainer follows the engine's
routes.
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
from gapo_megatron.config import Config
from gapo_megatron.learn.checks.routes import StepRoutes
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
from tests.learn_setup import planned, with_columns

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


def make_config(folder: str, length: int, *, learning_rate: float = 1e-6) -> Config:
    """Four mini-batches of responses of at most `length` tokens, in bf16."""
    return config_of(
        {
            "model": {"hf_dir": folder, "precision": "bf16"},
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


def measure(seed: int, length: int, learning_rate: float) -> dict[str, float]:
    """Mean squares over the sequences of a step, and shares of routes that agree."""
    with tempfile.TemporaryDirectory() as name, single_rank():
        save_model(Path(name), seed)
        config = make_config(name, length, learning_rate=learning_rate)
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


def measure_mismatch(seed: int, length: int) -> dict[str, float]:
    """Engine and trainer in bf16 at equal weights: mean squares over sequences, means over tokens.

    A token's mismatch is the difference of its two log-probs.
    """
    with tempfile.TemporaryDirectory() as name, single_rank():
        save_model(Path(name), seed)
        config = make_config(name, length)
        rollouts, engine = of_engine(Path(name), make_step(seed, length))
        policy = Policy.build(config, initialize(config.parallel), "cpu")
        policy.load_initial_weights()
        batch = planned(make_batch(rollouts, config.objective.resolve()), config)
        assert batch.plan is not None
        packing = [indices for one in batch.plan.minibatches for indices in one.microbatches[0]]
        routes = StepRoutes(policy, batch, replayed="rollout")
        ways: dict[str, Any] = {"free": list, "replay": partial(routes.recording, 0)}
        found = {}
        for way, mark in ways.items():
            ours = score(policy, batch, packing, mark=mark)
            differences = [ours[i].double() - engine[i].double() for i in ours]
            of_tokens = torch.cat(differences)
            found[way] = mean_square(torch.stack([one.mean() for one in differences]))
            found[f"{way}, token"] = float(of_tokens.abs().mean())
            found[f"{way}, KL"] = float((of_tokens.exp() - 1 - of_tokens).mean())
        metrics = routes.summarize()
        destroy()
    for name in ("", "_min"):
        found[f"same{name}"] = metrics[f"experts/engine_same_routes_share{name}"]
    return found


def of_engine(folder: Path, rollouts: Rollouts) -> tuple[Rollouts, list[Tensor]]:
    """The rollouts with the routes of transformers in bf16, and its log-probs of the responses."""
    model: Any = Qwen3MoeForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, trust_remote_code=False
    )
    chosen: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
    routes, log_probs = [], []
    for row in range(len(rollouts)):
        response = torch.from_numpy(rollouts.response_ids[row]).long()
        ids = torch.cat([torch.from_numpy(rollouts.prompt_ids[row]).long(), response])
        chosen.clear()
        with torch.no_grad():
            logits = model(ids[None, :-1]).logits[0, -len(response) :].float()
        log_probs.append(logits.log_softmax(-1).gather(1, response[:, None])[:, 0])
        routes.append(torch.cat(chosen, dim=1).to(torch.uint8).numpy())
    return with_columns(rollouts, routes=routes), log_probs


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
    seeds = [measure_mismatch(seed, arguments.length) for seed in range(arguments.seeds)]
    columns = {name: [one[name] for one in seeds] for name in seeds[0]}
    same, lowest = (np.mean(columns[name]) for name in ("same", "same_min"))
    print(f"\nsame routes of engine and trainer: {same:.2%}, lowest layer {lowest:.2%}")
    print("| routes | a sequence's mean log-ratio | a token's, without sign | KL (k3) |")
    for way in ("free", "replay"):
        of_tokens = [f"{np.mean(columns[f'{way}, {name}']):.1e}" for name in ("token", "KL")]
        print(f"| {way} | {cell(columns[way])} | {' | '.join(of_tokens)} |", flush=True)
