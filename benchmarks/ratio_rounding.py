"""What a step of GAPO does to its ratios, and what rounding does to them, in each arithmetic.

    python benchmarks/ratio_rounding.py MODEL_FOLDER --output rounding.jsonl

Any published model folder will do; docs/numerics.md has the figures of SmolLM2-135M-Instruct.

Samples responses of a given length from the model, plants the verdicts of each group of 8 (c = 1,
3, 5, 7 in turns), and takes one step of GAPO on them with the package's own `learn`: four
mini-batches, AdamW at 1e-6. `learn.rounding` measures it, over all sequences in place of a few.
Weights before the step are either as loaded, on the 16-bit grid, or, as later in a run, anywhere
between two 16-bit numbers: the master weights are moved by up to half the distance.

Arithmetics are values of `model.precision`; `+residual` keeps the residual stream in float32 (a
patch of this benchmark: Megatron-core 0.16 has a field for it, and rounds the stream all the same).
Finished cases are kept in the output file, and not run again. Prints means over seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import Config, parse_config
from gapo_megatron.hf.weights import read_hf
from gapo_megatron.learn import plan
from gapo_megatron.learn.step import learn
from gapo_megatron.policy import ParallelGroups, Policy, attention, initialize
from gapo_megatron.policy.optimizer import inner_optimizers
from gapo_megatron.run import process_group
from gapo_megatron.types import Batch

K = 8
NUM_CORRECT = (1, 3, 5, 7)
NUM_MINIBATCHES = 4
QUESTIONS = (
    "What is 17 + 25? Explain every step.",
    "A baker sells 14 loaves in the morning and twice as many in the afternoon. How many in all?",
    "How many minutes are there in three days? Show your work.",
    "Tom has 50 dollars and buys 3 books of 12 dollars each. What is left? Explain.",
)
ARITHMETICS = ["bf16", "bf16+residual", "fp16", "fp16+residual", "fp32"]
COLUMNS = {
    "ratio_signal": "step, rms",
    "ratio_rounding": "rounding, rms",
    "ratio_correlation": "correlation",
    "clip_decisions_changed": "decided otherwise",
}


def main() -> None:
    """Run what is missing of the output file, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("hf_dir", help="model folder (config.json, tokenizer, safetensors)")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file of finished cases")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512], help="of a response")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--arithmetic",
        nargs="+",
        default=["bf16", "bf16+residual", "fp16", "fp16+residual", "fp32"],
    )
    parser.add_argument("--state", nargs="+", default=["loaded", "between"])
    parser.add_argument("--clip", nargs=2, type=float, default=[3e-3, 5e-3])
    arguments = parser.parse_args()
    process_group.start(3600)
    groups = initialize(config_of(arguments.hf_dir, "fp32", arguments.clip, 128).parallel)
    cases = itertools.product(
        arguments.tokens, arguments.seeds, arguments.arithmetic, arguments.state
    )
    for case in cases:
        run_once(case, arguments, groups)
    print_table(read_rows(arguments.output))


def run_once(case: tuple[int, int, str, str], arguments: Any, groups: ParallelGroups) -> None:
    """Measure one case and append it, unless the file has it."""
    key = dict(zip(("tokens", "seed", "arithmetic", "state"), case, strict=True))
    key["clip"] = list(arguments.clip)
    if any(all(row.get(k) == v for k, v in key.items()) for row in read_rows(arguments.output)):
        return
    num_tokens, seed, arithmetic, state = case
    start = time.perf_counter()
    batch = sample(arguments.hf_dir, num_tokens, seed, folder=arguments.output.parent)
    config = config_of(arguments.hf_dir, arithmetic.partition("+")[0], arguments.clip, num_tokens)
    policy = Policy.build(config, groups, "cpu")
    policy.load_hf_weights(read_hf(arguments.hf_dir))
    if state == "between":
        move_between(policy, seed)
    residual = (
        wide_residual(policy) if arithmetic.endswith("+residual") else contextlib.nullcontext()
    )
    with residual, patch.object(plan, "ROUNDING_SEQUENCES", len(batch)):
        packing = plan.plan_updates(batch, config, data_parallel_size=1)
        metrics = learn(policy, batch, packing, config, Stopwatch(), measures_rounding=True)
    assert metrics is not None
    row = key | {
        "seconds": round(time.perf_counter() - start, 1),
        "clip_fraction": metrics["clip/fraction_sequences"],
        **{
            name.partition("/")[2]: v for name, v in metrics.items() if name.startswith("numerics/")
        },
    }
    with arguments.output.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), file=sys.stderr)


def config_of(hf_dir: str, precision: str, clip: list[float], num_tokens: int) -> Config:
    """Four mini-batches of a group each."""
    return parse_config(
        {
            "run": {"output_dir": "unused", "num_steps": 1},
            "model": {"hf_dir": hf_dir, "precision": precision},
            "data": {"train_path": "unused", "max_prompt_tokens": 128},
            "rollout": {"max_response_tokens": num_tokens},
            "reward": {"kind": "exact"},
            "batch": {
                "rollout_prompts": len(NUM_CORRECT),
                "rollouts_per_prompt": K,
                "minibatch_prompts": len(NUM_CORRECT) // NUM_MINIBATCHES,
                "max_tokens_per_microbatch": max(2048, num_tokens + 128),
            },
            "objective": {"method": "gapo", "eps_low": clip[0], "eps_high_max": clip[1]},
        },
        source="ratio_rounding",
    )


def sample(hf_dir: str, num_tokens: int, seed: int, *, folder: Path) -> Batch:
    """Responses of so many tokens at temperature 1, kept in a file; verdicts are planted."""
    path = folder / f"responses_{num_tokens}_{seed}.npz"
    if not path.exists():
        np.savez(
            path,
            **dict(
                zip(
                    ("prompts", "lengths", "responses"),
                    _generate(hf_dir, num_tokens, seed),
                    strict=True,
                )
            ),
        )
    kept = np.load(path)
    lengths, responses = kept["lengths"], list(kept["responses"])
    prompts = [row[:n] for row, n in zip(kept["prompts"], lengths, strict=True)]
    random = np.random.default_rng(seed)
    advantages, num_correct = [], []
    for c in NUM_CORRECT:
        is_right = random.permutation(K) < c
        advantages += [float(right) - c / K for right in is_right]
        num_correct += [c] * K
    return Batch(
        prompt_ids=[prompt for prompt in prompts for _ in range(K)],
        response_ids=responses,
        rollout_log_probs=[np.zeros(num_tokens, dtype=np.float32) for _ in responses],
        advantages=torch.tensor(advantages, dtype=torch.float64),
        num_correct=torch.tensor(num_correct),
        group_size=torch.full((len(responses),), K),
        valid=torch.ones(len(responses), dtype=torch.bool),
    )


@torch.no_grad()
def _generate(hf_dir: str, num_tokens: int, seed: int) -> tuple[np.ndarray, ...]:
    tokenizer = AutoTokenizer.from_pretrained(hf_dir, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        hf_dir, dtype=torch.float32, trust_remote_code=False
    )
    torch.manual_seed(seed)
    prompts, responses = [], []
    for question in QUESTIONS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        output = model.generate(
            torch.tensor([ids] * K),
            attention_mask=torch.ones(K, len(ids), dtype=torch.int64),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
        )
        prompts.append(np.array(ids, dtype=np.int32))
        responses += [row[len(ids) :].numpy().astype(np.int32) for row in output]
    lengths = np.array([len(one) for one in prompts])
    padded = np.zeros((len(prompts), lengths.max()), dtype=np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    return padded, lengths, np.stack(responses)


def move_between(policy: Policy, seed: int) -> None:
    """Move master weights by up to half the distance of two 16-bit numbers; weights stay."""
    dtype = getattr(torch, policy.config.model.dtype)
    if dtype == torch.float32:
        dtype = torch.bfloat16  # fp32 has no master weights: it moves as bf16's would
    generator = torch.Generator().manual_seed(seed)
    for optimizer in inner_optimizers(policy.optimizer):
        for group in optimizer.param_groups:
            for master in group["params"]:
                noise = torch.rand(master.shape, generator=generator) - 0.5
                exponent = master.detach().abs().clamp(min=1e-30).log2().floor()
                master.data += noise * torch.exp2(exponent) * torch.finfo(dtype).eps * 0.999


@contextlib.contextmanager
def wide_residual(policy: Policy) -> Iterator[None]:
    """Within, what goes from layer to layer is float32; norms take it, and give 16 bits."""

    def norm(self: Any, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)
        return normed.to(self.weight.dtype)

    def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, _: float) -> Tensor:
        x, bias = x_with_bias
        return residual.float() + (x if bias is None else x + bias).float()

    with contextlib.ExitStack() as undo:
        undo.enter_context(patch.object(attention.RMSNorm, "forward", norm))
        for layer in policy.stages[0].decoder.layers:
            for name in ("self_attn_bda", "mlp_bda"):
                undo.enter_context(patch.object(layer, name, lambda *_: add))
        yield


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Finished cases."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def print_table(rows: list[dict[str, Any]]) -> None:
    """Means over seeds, with the smallest and the largest."""
    table = Table("weights before", "arithmetic", "tokens", "seeds", *COLUMNS.values())
    cases = dict.fromkeys((row["state"], row["arithmetic"], row["tokens"]) for row in rows)
    for state, arithmetic, tokens in sorted(cases, key=lambda one: (one[0], one[2], one[1])):
        found = [
            row
            for row in rows
            if (row["state"], row["arithmetic"], row["tokens"]) == (state, arithmetic, tokens)
        ]
        cells = []
        for name in COLUMNS:
            values = [row[name] for row in found if name in row]
            form = ".1e" if name in ("ratio_signal", "ratio_rounding") else ".3f"
            cells.append(f"{np.mean(values):{form}} ({min(values):{form}} to {max(values):{form}})")
        table.add_row(state, arithmetic, str(tokens), str(len(found)), *cells)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
