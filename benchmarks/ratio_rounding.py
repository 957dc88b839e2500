"""How far a step of GAPO moves its ratios, and how far rounding does, in each precision.

    python benchmarks/ratio_rounding.py MODEL_FOLDER --output rounding.jsonl

Any published model folder will do; docs/numerics.md has the figures of SmolLM2-135M-Instruct.

Samples responses of a given length from the model, plants the verdicts of each group of 8 (c = 1,
3, 5, 7 in turns), and takes one step of GAPO on them with the package's own `learn`: a mini-batch
of each group, AdamW. `learn.rounding` scores all sequences, in place of a few, before and after.
Weights before the step are either as loaded, on the 16-bit grid, or, as later in a run, anywhere
between two 16-bit numbers: the master weights are moved by up to half the distance.

Arithmetics are values of `model.precision`; `+residual` keeps the residual stream in float32 (a
patch of this benchmark: Megatron-core 0.16 has a field for it, and rounds the stream all the same).
The row `+scoring` is the same step with old log-probs from a pass without rounding. Finished cases
are kept in the output file, and not run again. Prints means over seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
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
from gapo_megatron.learn.rounding import Scores
from gapo_megatron.learn.step import learn
from gapo_megatron.policy import Policy, attention, destroy, initialize
from gapo_megatron.policy.optimizer import inner_optimizers
from gapo_megatron.rollouts import Batch, Rollouts
from gapo_megatron.run import process_group

K = 8
NUM_CORRECT = (1, 3, 5, 7)
QUESTIONS = (
    "What is 17 + 25? Explain every step.",
    "A baker sells 14 loaves in the morning and twice as many in the afternoon. How many in all?",
    "How many minutes are there in three days? Show your work.",
    "Tom has 50 dollars and buys 3 books of 12 dollars each. What is left? Explain.",
)
STATES = ["loaded", "between"]
ARITHMETICS = ["bf16", "bf16+residual", "fp16", "fp16+residual", "fp32"]
WIDTHS = (7e-5, 3e-4, 3e-3, 5e-3)
"""Clip widths on either side of 1: the paper's narrowest, its widest, and two in between."""


def main() -> None:
    """Run the cases missing in the output file, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("hf_dir", help="model folder (config.json, tokenizer, safetensors)")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file of finished cases")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[128, 512], help="tokens of a response"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arithmetic", nargs="+", choices=ARITHMETICS, default=ARITHMETICS)
    parser.add_argument("--state", nargs="+", choices=STATES, default=STATES)
    parser.add_argument(
        "--groups", type=int, default=4, help="groups of 8 responses; one update each"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    arguments = parser.parse_args()
    process_group.start(3600)
    cases = itertools.product(
        arguments.tokens, arguments.seeds, arguments.arithmetic, arguments.state
    )
    for tokens, seed, arithmetic, state in cases:
        case = Case(tokens, seed, arithmetic, state, arguments.groups, arguments.learning_rate)
        run_once(case, arguments.hf_dir, arguments.output)
    print_table(read_rows(arguments.output))


@dataclass(frozen=True)
class Case:
    """Settings of a measured step."""

    tokens: int
    seed: int
    arithmetic: str
    state: str
    groups: int
    learning_rate: float

    def config(self, hf_dir: str) -> Config:
        """Config in which each group is a mini-batch."""
        return parse_config(
            {
                "run": {"output_dir": "unused", "num_steps": 1},
                "model": {"hf_dir": hf_dir, "precision": self.arithmetic.partition("+")[0]},
                "data": {"train_path": "unused", "max_prompt_tokens": 128},
                "rollout": {"max_response_tokens": self.tokens},
                "reward": {"kind": "exact"},
                "batch": {
                    "rollout_prompts": self.groups,
                    "rollouts_per_prompt": K,
                    "minibatch_prompts": 1,
                    "max_tokens_per_microbatch": max(2048, self.tokens + 128),
                },
                "objective": {"method": "gapo", "eps_low": 3e-3, "eps_high_max": 5e-3},
                "optimizer": {"learning_rate": self.learning_rate},
            },
            source="ratio_rounding",
        )


def run_once(case: Case, hf_dir: str, output: Path) -> None:
    """Measure a case and append it to the file, unless it is there already."""
    key = asdict(case)
    if any(key.items() <= row.items() for row in read_rows(output)):
        return
    start = time.perf_counter()
    batch = sample(hf_dir, case, folder=output.parent)
    config = case.config(hf_dir)
    policy = Policy.build(config, initialize(config.parallel), "cpu")
    policy.load_hf_weights(read_hf(hf_dir))
    if case.state == "between":
        move_between(policy, case.seed)
    scores: list[Scores] = []
    score_all = Scores.of

    def score(*arguments: Any) -> Scores:
        scores.append(score_all(*arguments))
        return scores[-1]

    is_wide = case.arithmetic.endswith("+residual")
    with (
        wide_residual(policy) if is_wide else contextlib.nullcontext(),
        patch.object(plan, "ROUNDING_SEQUENCES", len(batch)),
        patch.object(Scores, "of", score),
    ):
        planned = plan.plan_step(
            batch, config.batch, needs_every_sequence=False, data_parallel_size=1
        )
        batch = replace(batch, plan=planned)
        sections = (config.objective, config.rollout)
        metrics = learn(policy, batch, *sections, Stopwatch(), measures_rounding=True)
    destroy()
    assert metrics is not None
    before, after = scores
    indices = sorted(before.in_run)
    log_ratios = {
        "seen": (after.in_run, before.in_run),
        "exact": (after.exact, before.exact),
        "scored_exactly": (after.in_run, before.exact),
    }
    row = key | {
        "seconds": round(time.perf_counter() - start, 1),
        "clip_fraction": metrics["clip/fraction_sequences"],
        "advantages": batch.advantages[indices].tolist(),
        **{
            name: [float((new[i].double() - old[i].double()).mean()) for i in indices]
            for name, (new, old) in log_ratios.items()
        },
    }
    with output.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    summary = {name: f"{value:.3g}" for name, value in summarize(row).items()}
    print(case, summary, file=sys.stderr)


def summarize(row: dict[str, Any], seen: str = "seen") -> dict[str, float]:
    """Figures of a finished case; `seen`: the log-ratio that the clip gets."""
    y, exact, advantages = (np.array(row[name]) for name in (seen, "exact", "advantages"))
    signs = np.sign(advantages)

    def is_clipped(log_ratio: np.ndarray, width: float) -> np.ndarray:
        return np.asarray(signs * np.expm1(log_ratio) > width)

    return {
        "step, rms": float(np.sqrt(np.mean(exact**2))),
        "rounding, rms": float(np.sqrt(np.mean((y - exact) ** 2))),
        "correlation": float(np.corrcoef(y, exact)[0, 1]),
        **{
            f"otherwise at {width:g}, %": 100
            * float(np.mean(is_clipped(y, width) != is_clipped(exact, width)))
            for width in WIDTHS
        },
    }


def sample(hf_dir: str, case: Case, *, folder: Path) -> Batch:
    """Sample responses of this length at temperature 1, cached in a file; verdicts are planted."""
    num_tokens, seed = case.tokens, case.seed
    path = folder / f"responses_{num_tokens}_{seed}.npz"
    if not path.exists():
        prompts, lengths, responses = _generate(hf_dir, num_tokens, seed)
        np.savez(path, prompts=prompts, lengths=lengths, responses=responses)
    kept = np.load(path)
    rows = zip(kept["prompts"], kept["lengths"], strict=True)
    contexts = [row[:n] for row, n in rows][: case.groups]
    answers = list(kept["responses"][: K * case.groups])
    random = np.random.default_rng(seed)
    advantages, num_correct = [], []
    for c in NUM_CORRECT[: case.groups]:
        is_right = random.permutation(K) < c
        advantages += [float(right) - c / K for right in is_right]
        num_correct += [c] * K
    rollouts = Rollouts.of(
        [one for one in contexts for _ in range(K)],
        answers,
        [np.zeros(num_tokens, dtype=np.float32) for _ in answers],
    )
    rollouts = rollouts.changed(sample=[*range(K)] * len(contexts))
    return Batch(
        rollouts.table,
        rollouts.tokens,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        num_correct=torch.tensor(num_correct),
        group_size=torch.full((len(answers),), K),
        valid=torch.ones(len(answers), dtype=torch.bool),
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
    """Move master weights by up to half the distance to the next 16-bit number; weights stay."""
    dtype = policy.stages[0].config.params_dtype
    if dtype == torch.float32:
        dtype = torch.bfloat16  # fp32 has no master weights: move it as bf16's
    generator = torch.Generator().manual_seed(seed)
    for optimizer in inner_optimizers(policy.optimizer):
        for group in optimizer.param_groups:
            for master in group["params"]:
                noise = torch.rand(master.shape, generator=generator) - 0.5
                exponent = master.detach().abs().clamp(min=1e-30).log2().floor()
                master.data += noise * torch.exp2(exponent) * torch.finfo(dtype).eps * 0.999


@contextlib.contextmanager
def wide_residual(policy: Policy) -> Iterator[None]:
    """Keep the residual stream in float32; norms read it and return 16 bits."""

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
    """Read the finished cases."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def print_table(rows: list[dict[str, Any]]) -> None:
    """Means over seeds, with the smallest and the largest."""
    names = ("state", "tokens", "groups", "learning_rate", "arithmetic")
    cases: dict[tuple[Any, ...], list[dict[str, float]]] = {}
    for row in rows:
        for seen, ending in (("seen", ""), ("scored_exactly", "+scoring")):
            case = tuple(row[name] for name in names)
            cases.setdefault((*case[:-1], case[-1] + ending), []).append(summarize(row, seen))
    columns = [*next(iter(cases.values()))[0]]
    table = Table("before", "tokens", "groups", "rate", "arithmetic", "seeds", *columns)
    for case in sorted(cases):
        found, cells = cases[case], []
        for name in columns:
            values = [one[name] for one in found]
            form = {"rms": ".1e", "%": ".0f"}.get(name.split()[-1], ".3f")
            low, mean, high = min(values), np.mean(values), max(values)
            cells.append(f"{mean:{form}} ({low:{form}} to {high:{form}})")
        table.add_row(*map(str, case), str(len(found)), *cells)
    Console(width=240).print(table)


if __name__ == "__main__":
    main()
