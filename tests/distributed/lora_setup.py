"""LoRA in any layout beside transformers and torch in float64: loss, gradients, update.

`python -m tests.distributed.lora_setup` prints deviations by layout (docs/lora.md).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from gapo_megatron import checkpoint
from gapo_megatron.config import Config
from gapo_megatron.learn.score import log_probs
from gapo_megatron.learn.update import update
from gapo_megatron.models.lora import factors_of
from gapo_megatron.models.rules import find_rule, shard_size
from gapo_megatron.policy import Policy, destroy
from gapo_megatron.policy.lora import Lora
from tests.attempt_setup import make_attempt
from tests.dist import run_distributed
from tests.distributed import conversion_setup, policy_setup
from tests.distributed.checkpoint_setup import make_state
from tests.distributed.policy_setup import (
    CP,
    EP,
    PP,
    SP,
    TP,
    VPP,
    WeightedLoss,
    gradients,
    load_policy,
    make_batch,
    make_config,
)

FULL = {"recompute": "full"}
SELECTIVE = {"recompute": "selective"}
# Micro-batches of each data parallel rank; see tests/distributed/test_policy.py.
TOGETHER = [[(0, 1, 2, 3), (4, 5, 6, 7)]]
APART = [[(0,), (1, 2, 3)], [(4, 5, 6), (7,)]]
EMPTY = [[(0, 1, 2, 3), (4, 5, 6, 7)], [(), ()]]
# Per layout of two ranks: [parallel] settings, [model] settings, micro-batches.
Layout = tuple[dict[str, Any], dict[str, Any], list[list[tuple[int, ...]]]]
DENSE: dict[str, Layout] = {
    "data, empty rank": ({}, {}, EMPTY),
    "data, overlapped reduction": ({"overlap_grad_reduce": True}, {}, APART),
    "tensor": ({TP: 2}, {}, TOGETHER),
    "tensor, sequence, full recomputation": ({TP: 2, SP: True}, FULL, TOGETHER),
    "pipeline": ({PP: 2}, {}, TOGETHER),
    "virtual stages, full recomputation": ({PP: 2, VPP: 2}, FULL, TOGETHER),
    "context, selective recomputation": ({CP: 2}, SELECTIVE, TOGETHER),
}
EXPERTS: dict[str, Layout] = {
    "expert, empty rank": ({EP: 2}, {}, EMPTY),
    "expert, full recomputation": ({EP: 2}, FULL, APART),
    "expert, tensor, sequence": ({EP: 2, TP: 2, SP: True}, {}, TOGETHER),
    "context, expert": ({CP: 2, EP: 2}, {}, TOGETHER),
    "virtual stages": ({PP: 2, VPP: 2}, {}, TOGETHER),
}
# gpt-oss: biases beside all that is adapted, and beside experts that are not.
SINKS = {name: EXPERTS[name] for name in ("expert, tensor, sequence", "context, expert")}
LATENT = {name: EXPERTS[name] for name in ("expert, tensor, sequence", "virtual stages")}
# Queries straight from the hidden state.
MOONLIGHT = {name: EXPERTS[name] for name in ("expert, tensor, sequence",)}
# Nothing but experts is trained: Megatron-core then makes an optimizer without parameters, too.
ALONE = {name: EXPERTS[name] for name in ("expert, tensor, sequence", "virtual stages")}
LAYOUTS = {"dense": DENSE, "experts": EXPERTS, "sinks": SINKS, "latent": LATENT}
LAYOUTS |= {"moonlight": MOONLIGHT, "experts alone": ALONE}
TARGETS = {
    "dense": ["qkv", "proj", "fc1", "fc2"],
    "experts": ["qkv", "proj", "experts"],
    "sinks": ["qkv", "proj"],
    "latent": ["qkv", "proj", "fc1", "fc2", "experts", "latent"],
    "moonlight": ["qkv", "proj", "fc1", "fc2", "experts", "latent"],
    "experts alone": ["experts"],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("qwen3_moe", {}),
    "sinks": ("gpt_oss", {}),
    "latent": ("deepseek_v3", {}),
    "moonlight": ("deepseek_v3", conversion_setup.MOONLIGHT),
    "experts alone": ("qwen3_moe", {}),
}
"""In `conversion_setup`, with changes."""
NUM_UPDATES = 2
RANK, ALPHA = 3, 5.0
BATCHES = {
    "dense": make_batch(),
    "experts": make_batch(vocab_size=conversion_setup.VOCAB_SIZE),
    "sinks": make_batch(vocab_size=conversion_setup.VOCAB_SIZE),
    "latent": make_batch(vocab_size=conversion_setup.VOCAB_SIZE),
    "moonlight": make_batch(vocab_size=conversion_setup.VOCAB_SIZE),
    "experts alone": make_batch(vocab_size=conversion_setup.VOCAB_SIZE),
}
Factors = dict[str, tuple[Tensor, Tensor]]
"""A [r, in] and B [out, r] by Hugging Face module name."""


def save_model(folder: Path, kind: str) -> None:
    """A model of four layers: with tied embeddings and biases, or of `MODELS`."""
    if kind == "dense":
        policy_setup.save_model(folder, "qwen2_tied", num_layers=4)
    else:
        name, changes = MODELS[kind]
        conversion_setup.save_model(folder, name, **changes)


def lora_config(folder: Path, kind: str, **sections: Any) -> Config:
    adapter = {"kind": "lora", "rank": RANK, "alpha": ALPHA, "targets": TARGETS[kind]}
    return make_config(folder, **({"adapter": adapter} | sections))


def lora_of(policy: Policy) -> Lora:
    assert isinstance(policy.adapter, Lora)
    return policy.adapter


def factors(policy: Policy) -> Factors:
    """Copies of all factors. Collective."""
    policy.begin_pass()
    return {
        name: (a.clone(), b.clone()) for name, a, b in policy.adapter.whole_factors(policy.stages)
    }


@torch.no_grad()
def randomise(policy: Policy) -> None:
    """Give B values, the same in every layout: with B = 0 the gradient of A is 0."""
    groups = policy.groups
    found = factors_of(policy.stages[0].rules, targets=TARGETS["latent"], rank=RANK)
    rules = [one.b for one in found]
    for stage in policy.stages:
        for name, tensor in stage.get_submodule("adapter").named():  # type: ignore[operator]
            if name.endswith(".lora_b"):
                rule, place = find_rule(rules, name)
                size = shard_size(rule, groups.tp_size)
                numbers = [ord(letter) for letter in rule.megatron_name(place)]
                random = np.random.default_rng(numbers)
                whole = torch.from_numpy(random.normal(0, 0.1, rule.full_shape))
                tensor.copy_(rule.shard(whole, groups.tp_rank % size, size))
    policy.optimizer.reload_model_params()


@contextmanager
def recorded_gradients(policy: Policy) -> Iterator[list[Factors]]:
    """A list to which every update adds the whole gradients of the factors."""
    seen: list[Factors] = []
    prepare = policy.optimizer.prepare_grads

    def watched() -> bool:
        seen.append(gradients(policy, factors))
        return bool(prepare())

    with patch.object(policy.optimizer, "prepare_grads", watched):
        yield seen


@dataclass
class Report:
    """Results of one rank; losses on the last pipeline stage only."""

    losses: list[float]
    """Of this data parallel rank, per update."""
    grad_norms: list[float]
    gradients: list[Factors]
    start: Factors
    end: Factors
    ratio_is_one: bool
    has_losses: bool
    """Whether this rank's losses count: it is the first copy on the last stage."""
    resumed: Factors
    """`end` of a run that is resumed from its checkpoint after the first update."""
    moved: Factors
    """The same from the checkpoint of the layout before."""
    merge_rounding: float
    """At the start."""


def train(kind: str, name: str, hf_dir: Path, run_dir: Path, before: Path) -> Report:
    """Two updates on this rank's share, saved in between, and resumed from there twice."""
    parallel, model, shares = LAYOUTS[kind][name]
    settings = {"hf_dir": str(hf_dir), "precision": "fp32", **model}
    config = lora_config(hf_dir, kind, parallel=parallel, model=settings)
    policy, batch = load_policy(config), BATCHES[kind]
    randomise(policy)
    groups, start, rounding = (
        policy.groups,
        factors(policy),
        policy.adapter.merge_rounding(policy.stages),
    )
    microbatches = [policy.pack(batch, indices) for indices in shares[groups.dp_rank]]
    losses, norms, equal = [], [], True
    with recorded_gradients(policy) as seen:
        for step in range(NUM_UPDATES):
            old = log_probs(policy, microbatches)
            loss = WeightedLoss(batch, microbatches)
            result = update(policy, microbatches, loss)
            losses.append(sum(float(one["loss"]) for one in result.outputs))
            norms.append(result.grad_norm)
            equal &= all(torch.equal(a, b) for a, b in zip(old, loss.seen, strict=False))
            if step == 0:
                checkpoint.save(
                    run_dir,
                    make_state(1),
                    policy=policy,
                    config=config,
                    attempt=make_attempt(run_dir),
                )
    end = factors(policy)

    def resumed(folder: Path) -> Factors:
        again = load_policy(config, groups)
        assert checkpoint.load_latest(folder, policy=again, config=config)
        for _ in range(NUM_UPDATES - 1):
            update(again, microbatches, WeightedLoss(batch, microbatches))
        return factors(again)

    has_losses = groups.is_last_stage and groups.is_first_copy
    report = Report(
        *(losses, norms, seen, start, end, equal, has_losses, resumed(run_dir), resumed(before)),
        merge_rounding=rounding,
    )
    destroy()
    return report


def train_all(root: Path, cases: list[tuple[str, str]]) -> dict[tuple[str, str], Report]:
    """All cases on this rank; each also resumes from the checkpoint of the one before."""
    reports, before = {}, {}
    for kind, name in cases:
        run_dir = root / f"run-{kind}-{name.replace(', ', '-')}".replace(" ", "_")
        reports[kind, name] = train(kind, name, root / kind, run_dir, before.get(kind, run_dir))
        before[kind] = run_dir
    return reports


# --- transformers and torch, in float64 ---------------------------------------------------------


@dataclass
class Expected:
    """What float64 says; in the form of `Report`."""

    losses: list[float]
    grad_norms: list[float]
    gradients: list[Factors]
    end: Factors


def expected(kind: str, hf_dir: Path, start: Factors, *, scale: float) -> Expected:
    """The same updates of W + scale * B A by torch's AdamW; what is fused shares its A."""
    # The one implementation of the experts that takes float64.
    options = {"experts_implementation": "eager"} if kind != "dense" else {}
    model = AutoModelForCausalLM.from_pretrained(hf_dir, **options).double().eval()
    model.requires_grad_(False)
    shared = {_fused(name): a.double() for name, (a, _) in start.items()}
    shared = {name: a.clone().requires_grad_() for name, a in shared.items()}
    own = {name: b.double().clone().requires_grad_() for name, (_, b) in start.items()}
    trained = [*shared.values(), *own.values()]
    adam = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-3)
    result, batch = Expected([], [], [], {}), BATCHES[kind]
    for _ in range(NUM_UPDATES):
        adam.zero_grad()
        product = {name: scale * b @ shared[_fused(name)] for name, b in own.items()}
        weights = _merged(dict(model.named_parameters()), product)
        loss = -sum(
            float(batch.advantages[i]) * _log_prob(model, weights, batch, i)
            for i in batch.rows_here
        ) / int(batch.num_sampled_tokens.sum())
        loss.backward()
        result.losses.append(float(loss))
        result.gradients.append(
            {n: (shared[_fused(n)].grad.clone(), own[n].grad.clone()) for n in own}
        )  # type: ignore[union-attr]
        result.grad_norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 0.1)))
        adam.step()
    result.end = {n: (shared[_fused(n)].detach(), own[n].detach()) for n in own}
    return result


def _fused(name: str) -> str:
    """Name of what shares one A: query, key and value, or gate and up projection."""
    before, _, last = name.rpartition(".")
    kinds = {
        "q_proj": "qkv",
        "k_proj": "qkv",
        "v_proj": "qkv",
        "gate_proj": "fc1",
        "up_proj": "fc1",
    }
    return f"{before}.{kinds.get(last, last)}"


def _merged(parameters: dict[str, Tensor], product: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of transformers' model with the products added; its experts are stacked."""
    merged = {}
    for name, weight in parameters.items():
        prefix, is_expert, last = name.rpartition(".mlp.experts.")
        if is_expert:
            projections = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            names = [
                [f"{prefix}{is_expert}{e}.{p}" for p in projections] for e in range(len(weight))
            ]
            if names[0][0] not in product:
                continue
            parts = [torch.cat([product[one] for one in row]) for row in names]
            merged[name] = weight + torch.stack(parts)
        elif name.removesuffix(".weight") in product:
            merged[name] = weight + product[name.removesuffix(".weight")]
    return merged


def _log_prob(model: nn.Module, weights: dict[str, Tensor], batch: Any, row: int) -> Tensor:
    """Sum of the log-probs of one response."""
    prompt = batch.prompt_ids[row]
    ids = torch.from_numpy(np.concatenate([prompt, batch.response_ids[row]])).long()
    output = torch.func.functional_call(model, weights, (ids[None],))
    scores = output.logits[0, :-1].log_softmax(dim=-1)
    assert scores.dtype == torch.float64
    return scores.gather(1, ids[1:, None])[len(prompt) - 1 :, 0].sum()


# --- both beside each other ---------------------------------------------------------------------


@dataclass
class Deviation:
    """Largest deviations of one layout from float64."""

    loss: float
    """Relative to the loss."""
    gradient: float
    """Of a factor's gradient, relative to its largest element."""
    grad_norm: float
    """Relative."""
    update: float
    """Of a factor after the last update, absolute."""


def deviation(ranks: list[Report], reference: Expected) -> Deviation:
    """Compare the reports of all ranks with the reference."""
    found = Deviation(0.0, 0.0, 0.0, 0.0)
    for step in range(NUM_UPDATES):
        loss = sum(rank.losses[step] for rank in ranks if rank.has_losses)
        found.loss = max(found.loss, abs(loss / reference.losses[step] - 1))
        for rank in ranks:
            norm = rank.grad_norms[step] / reference.grad_norms[step]
            found.grad_norm = max(found.grad_norm, abs(norm - 1))
            assert rank.gradients[step].keys() == reference.gradients[step].keys()
            for name, pair in reference.gradients[step].items():
                for theirs, ours in zip(pair, rank.gradients[step][name], strict=True):
                    gap = float((ours - theirs).abs().max() / theirs.abs().max())
                    found.gradient = max(found.gradient, gap)
    for rank in ranks:
        found.update = max(found.update, distance(rank.end, reference.end))
    return found


def distance(one: Factors, other: Factors) -> float:
    """Largest absolute difference of a factor."""
    assert one.keys() == other.keys()
    return max(
        float((a - b).abs().max())
        for name, pair in one.items()
        for a, b in zip(pair, other[name], strict=True)
    )


def main() -> None:
    """Print deviations by layout (docs/lora.md)."""
    cases = [(kind, name) for kind, layouts in LAYOUTS.items() for name in layouts]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for kind in LAYOUTS:
            save_model(root / kind, kind)
        ranks = run_distributed(train_all, 2, root, cases)
        print("| model | layout | loss | worst gradient | gradient norm | update |")
        print("|---|---|---|---|---|---|")
        for kind in LAYOUTS:
            start = ranks[0][kind, next(iter(LAYOUTS[kind]))].start
            reference = expected(kind, root / kind, start, scale=ALPHA / RANK)
            for layout in LAYOUTS[kind]:
                found = deviation([rank[kind, layout] for rank in ranks], reference)
                numbers = (found.loss, found.gradient, found.grad_norm, found.update)
                shown = " | ".join(f"{number:.1e}" for number in numbers)
                print(f"| {kind} | {layout} | {shown} |")


if __name__ == "__main__":
    main()
