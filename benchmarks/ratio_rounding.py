"""How far a step of GAPO moves its ratios, and how far 16 bits do, by length of the responses.

    python benchmarks/ratio_rounding.py [--model FOLDER] [--output FILE] [--tokens N ...]

Samples responses of exactly so many tokens, in groups of 4 of which 1 or 3 are planted as correct,
and takes one step on them with the package's own `learn`: an update for each group, clip 3e-3 /
5e-3, from the weights as loaded. All sequences are scored before and after, in the run's arithmetic
and in float32 (`numerics/*` of docs/metrics.md). All precisions get what bf16 sampled.
Every length and seed is a process of its own; those in FILE are kept. Prints means over seeds, with
the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from gapo_megatron.clock import Stopwatch

MODEL = Path("runs/smollm2/SmolLM2-135M-Instruct")
K = 4
PRECISIONS = ("bf16", "fp16")
NUM_CORRECT = (1, 3)
QUESTIONS = (
    "What is 17 + 25? Explain every step.",
    "A baker sells 14 loaves in the morning and twice as many in the afternoon. How many in all?",
    "How many minutes are there in three days? Show your work.",
    "Tom has 50 dollars and buys 3 books of 12 dollars each. What is left? Explain.",
)
KEYS = ("model", "tokens", "groups", "precision")
COLUMNS = ("ratio_signal", "ratio_rounding", "ratio_correlation", "clip_decisions_changed")


def main() -> None:
    """Run the cases that FILE lacks, each in a process, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="Hugging Face folder")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/rounding.jsonl"), help="JSON lines, a case each"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[128])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--groups", type=int, default=4, choices=range(1, 5), help="updates")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        rows = measure(str(arguments.model), **arguments.case)
        with arguments.output.open("a", encoding="utf-8") as file:
            named = {"model": arguments.model.name} | arguments.case
            file.writelines(json.dumps(named | row) + "\n" for row in rows)
        return
    for tokens in arguments.tokens:
        for seed in arguments.seeds:
            case = {"tokens": tokens, "groups": arguments.groups, "seed": seed}
            named = {"model": arguments.model.name} | case
            if not any(named.items() <= row.items() for row in read_rows(arguments.output)):
                print(case, file=sys.stderr, flush=True)
                options = ["--output", arguments.output, "--case", json.dumps(case)]
                command = [sys.executable, __file__, "--model", arguments.model, *options]
                subprocess.run(command, check=True)
    print_table(read_rows(arguments.output))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The cases of FILE."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def measure(folder: str, *, tokens: int, groups: int, seed: int) -> list[dict[str, Any]]:
    """Sample, take the step in each precision, and return its `numerics/*`."""
    from gapo_megatron.config import Config, parse_config
    from gapo_megatron.formats.weights import read_hf
    from gapo_megatron.learn import plan
    from gapo_megatron.learn.step import learn
    from gapo_megatron.objective import make_batch
    from gapo_megatron.policy import Policy, destroy, initialize
    from gapo_megatron.rollout.generate import generate
    from gapo_megatron.rollout.requests import SamplingSettings
    from gapo_megatron.rollout.sync import prompts_as_sequences, sync
    from gapo_megatron.rollout.table import to_rollouts
    from gapo_megatron.rollout.vllm import RolloutEngine
    from gapo_megatron.run import process_group
    from gapo_megatron.types import Outcome, Prompt, Verdict

    prompts = [
        Prompt(id=str(i), token_ids=tuple(ids), answer="")
        for i, ids in enumerate(prompt_ids(folder, groups))
    ]
    longest = max(len(one.token_ids) for one in prompts)
    world = process_group.start(3600.0)

    def build(precision: str) -> tuple[Config, Policy]:
        settings = {
            "run": {"output_dir": "none", "num_steps": 1, "seed": seed},
            "model": {"hf_dir": folder, "precision": precision},
            "data": {"train_path": "none", "max_prompt_tokens": longest},
            "batch": {
                "rollout_prompts": groups,
                "minibatch_prompts": 1,
                "rollouts_per_prompt": K,
                "max_tokens_per_microbatch": max(2048, longest + tokens),
            },
            "rollout": {"max_response_tokens": tokens, "enforce_eager": True, "verify_bound": 1.0},
            "reward": {"kind": "exact"},
            "objective": {"method": "gapo", "eps_low": 3e-3, "eps_high_max": 5e-3},
            "optimizer": {"learning_rate": 1e-6},
        }
        config = parse_config(settings, source="benchmark")
        policy = Policy.build(config, initialize(config.parallel), world.device)
        policy.load_hf_weights(read_hf(folder))
        return config, policy

    config, policy = build("bf16")
    engine = RolloutEngine(config, policy.hf_config, device=world.device)
    engine.eos_token_ids = []  # all responses are as long as asked for
    sync(policy, engine, prompts_as_sequences(prompts, 4), policy_version=0)
    episodes = generate(engine, prompts, SamplingSettings(K, tokens, seed=seed, step=0))
    assert episodes is not None
    engine.sleep()
    right = np.random.default_rng(seed)
    verdicts = [
        [Verdict(Outcome.CORRECT if n < c else Outcome.WRONG) for n in right.permutation(K)]
        for c, _ in zip(NUM_CORRECT * groups, episodes, strict=False)
    ]
    rows = []
    for precision in PRECISIONS:
        destroy()
        config, policy = build(precision)
        batch = make_batch(to_rollouts(episodes, verdicts), config.objective.resolve())
        with patch.object(plan, "ROUNDING_SEQUENCES", len(batch)):
            planned = plan.plan_step(
                batch, config.batch, needs_every_sequence=False, data_parallel_size=1
            )
        if policy.loss_scale is not None:
            policy.loss_scale.value = 2.0**16  # where these updates do not overflow
        sections = (config.objective, config.rollout)
        batch = replace(batch, plan=planned)
        metrics = learn(policy, batch, *sections, Stopwatch(), measures_rounding=True)
        assert metrics is not None
        found = {name: one for name, one in metrics.items() if name.startswith("numerics/")}
        rows.append({"precision": precision} | found)
    return rows


def prompt_ids(folder: str, num: int) -> list[list[int]]:
    """Questions in the model's chat template, or as they are behind its first token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if not tokenizer.chat_template:
        texts = [f"{tokenizer.bos_token or ''}Question: {one}\nAnswer:" for one in QUESTIONS[:num]]
    else:
        turns = [[{"role": "user", "content": one}] for one in QUESTIONS[:num]]
        options = {"tokenize": False, "add_generation_prompt": True}
        texts = [tokenizer.apply_chat_template(one, **options) for one in turns]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def print_table(rows: list[dict[str, Any]]) -> None:
    """Means over seeds."""
    print(f"| {' | '.join(KEYS)} | seeds | {' | '.join(COLUMNS)} |")
    cases: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault(tuple(str(row[key]) for key in KEYS), []).append(row)
    for case, found in cases.items():
        cells = []
        for name in COLUMNS:
            values = np.array([row[f"numerics/{name}"] for row in found])
            form = ".2f" if "correlation" in name else ".0%" if "changed" in name else ".1e"
            cells.append(f"{values.mean():{form}} ({values.min():{form}} to {values.max():{form}})")
        print(f"| {' | '.join(case)} | {len(found)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
