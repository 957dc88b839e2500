"""Updates of a policy in any layout beside transformers' and torch's AdamW in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from gapo_megatron import checkpoint
from gapo_megatron.config import Config
from gapo_megatron.learn.score import log_probs
from gapo_megatron.learn.update import update
from gapo_megatron.policy import Policy, destroy
from gapo_megatron.policy.lora import Lora
from tests.attempt_setup import make_attempt
from tests.convert_setup import one_by_one
from tests.distributed import conversion_setup
from tests.distributed.checkpoint_setup import make_state
from tests.distributed.conversion_setup import ARCHITECTURES, MOONLIGHT, VOCAB_SIZE
from tests.distributed.lora_setup import ALPHA, RANK, TARGETS, factors, lora_of, randomise, section
from tests.distributed.policy_setup import (
    WeightedLoss,
    copies,
    gradients,
    load_policy,
    make_batch,
    make_config,
    reference_log_probs,
)

# Micro-batches of each data parallel rank, of sequences of all lengths, or of none.
TOGETHER = [[(0, 1, 2, 3), (), (4, 5, 6, 7)]]
APART = [[(0,), (1, 2, 3)], [(4, 5, 6), (7,)]]
EMPTY = [[(0, 1, 2, 3), (4, 5, 6, 7)], [(), ()]]
NUM_UPDATES = 2
# Two of the sequences have several conversations, which take turns.
BATCH = make_batch(
    vocab_size=VOCAB_SIZE, conversations={2: [0, 1, 0, 2, 1, 1, 2, 0], 5: [0, 1, 2, 3]}
)
Layout = tuple[dict[str, Any], list[list[tuple[int, ...]]]]
"""Config sections `parallel` and `model`, and the micro-batches of each data parallel rank."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ARCHITECTURES},
    "moonlight": ("deepseek_v3", MOONLIGHT),
    # The chosen experts' shares do not add up to one.
    "qwen3_moe, not normalised": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen2 of six layers": ("qwen2", {"num_hidden_layers": 6}),
    "qwen2 of eight layers": ("qwen2", {"num_hidden_layers": 8}),
}
"""In `conversion_setup`, with changes."""
WITH_EXPERTS = ("qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v3", "moonlight")
LORA = " + LoRA"
# Nothing but experts is trained: Megatron-core then makes an optimizer without parameters, too.
EXPERTS_ALONE = f"qwen3_moe{LORA} of experts"
ADAPTED = (*(f"{name}{LORA}" for name in TARGETS), EXPERTS_ALONE)


def name_of(model: str) -> str:
    """Its name in `MODELS`, without an adapter."""
    return model.partition(LORA)[0]


def save_models(root: Path, models: list[str]) -> None:
    for name in dict.fromkeys(map(name_of, models)):
        if not (root / name).exists():
            conversion_setup.save_model(root / name, MODELS[name][0], **MODELS[name][1])


def config_of(root: Path, model: str, /, **sections: Any) -> Config:
    name = name_of(model)
    if model in ADAPTED:
        own = {"targets": ["experts"]} if model == EXPERTS_ALONE else {}
        sections["adapter"] = section(name) | own
    return make_config(root / name, **sections)


def build(config: Config) -> Policy:
    """A policy with its weights and, if it has an adapter, random factors."""
    policy = load_policy(config)
    if isinstance(policy.adapter, Lora):
        randomise(policy)
    return policy


def trained(policy: Policy) -> dict[str, Tensor]:
    """Copies of what is trained: whole weights by Hugging Face name, or factors. Collective."""
    if not isinstance(policy.adapter, Lora):
        return copies(policy)
    pairs = factors(policy)
    return {
        f"{name}.{x}": one
        for name, pair in pairs.items()
        for x, one in zip("AB", pair, strict=True)
    }


@dataclass
class Report:
    """Results of one rank."""

    start: dict[str, Tensor]
    losses: list[float]
    """Of this data parallel rank; 0 unless it is the first copy on the last stage."""
    gradients: list[dict[str, Tensor]]
    """Of every update, whole."""
    grad_norms: list[float]
    ratio_is_one: bool
    rounding: float
    """`merge_rounding` of factors at the start."""
    weights: dict[str, Tensor]
    """After the last update."""
    resumed: dict[str, Tensor]
    """The same, if the run is resumed from a checkpoint after the first update."""
    moved: dict[str, Tensor]
    """The same, from the checkpoint of the layout before this one."""


def train(root: Path, model: str, run_dir: Path, layout: Layout, *, before: Path) -> Report:
    """Two updates on this rank; `before` has a checkpoint after the first of another layout."""
    sections, shares = layout
    config = config_of(root, model, **sections)
    policy = build(config)
    groups, is_adapted = policy.groups, model in ADAPTED
    microbatches = [policy.pack(BATCH, indices) for indices in shares[groups.dp_rank]]
    rounding = lora_of(policy).merge_rounding(policy.stages) if is_adapted else 0.0
    report = Report(trained(policy), [], [], [], True, rounding, {}, {}, {})
    prepare = policy.optimizer.prepare_grads

    def watched() -> bool:
        report.gradients.append(gradients(policy, trained))
        return bool(prepare())

    with patch.object(policy.optimizer, "prepare_grads", watched):
        for step in range(NUM_UPDATES):
            old = log_probs(policy, microbatches)
            loss = WeightedLoss(BATCH, microbatches)
            result = update(policy, microbatches, loss)
            counts = groups.is_last_stage and groups.is_first_copy
            report.losses.append(counts * sum(float(one["loss"]) for one in result.outputs))
            report.grad_norms.append(result.grad_norm)
            equal = all(torch.equal(a, b) for a, b in zip(old, loss.seen, strict=False))
            report.ratio_is_one &= equal
            if step == 0:
                state, attempt = make_state(1), make_attempt(run_dir)
                checkpoint.save(run_dir, state, policy=policy, config=config, attempt=attempt)
    report.weights = trained(policy)

    def go_on_from(folder: Path) -> dict[str, Tensor]:
        resumed = load_policy(config, groups)
        assert checkpoint.load_latest(folder, policy=resumed, config=config)
        for _ in range(NUM_UPDATES - 1):
            update(resumed, microbatches, WeightedLoss(BATCH, microbatches))
        return trained(resumed)

    report.resumed, report.moved = go_on_from(run_dir), go_on_from(before)
    destroy()
    return report


def train_all(
    root: Path, cases: list[tuple[str, str]], layouts: dict[str, Layout]
) -> dict[tuple[str, str], Report]:
    """Train (model, layout) one after the other in the same processes."""
    reports, before = {}, {}
    for model, layout in cases:
        run_dir = root / f"run of {model} - {layout}"
        reports[model, layout] = train(
            root, model, run_dir, layouts[layout], before=before.get(model, run_dir)
        )
        before[model] = run_dir
    return reports


@dataclass
class Expected:
    """In the form of `Report`."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    constants: dict[str, Tensor]
    """Corrections of experts' loads, which no training changes."""


def expected(folder: Path, factors: dict[str, Tensor] | None = None) -> Expected:
    """The same updates by transformers and torch's AdamW, in float64.

    With factors, these are trained, and the model computes W + scale * B A.
    """
    # The one implementation of the experts that takes float64.
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    model = model.double().eval()
    named = dict(model.named_parameters())
    buffers = {n: b.float() for n, b in model.named_buffers() if n.endswith("correction_bias")}
    if factors:
        run, groups, export = _with_factors(model, factors)
        buffers = {}
    else:
        # Biases of experts are stacked.
        decayed = [n for n, p in named.items() if p.dim() > 1 and not n.endswith("_bias")]
        others = [p for n, p in named.items() if n not in decayed]
        groups = [
            {"params": [named[n] for n in decayed]},
            {"params": others, "weight_decay": 0.0},
        ]
        run, export = model, lambda of: by_hf_name({n: of(p) for n, p in named.items()})
    adam = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-3)
    result = Expected([], [], [], {}, buffers)
    for _ in range(NUM_UPDATES):
        adam.zero_grad()
        # Our objective and nothing beside it: no loss that balances the experts.
        per_sequence = torch.stack([x.sum() for x in reference_log_probs(run, BATCH)])
        loss = -(BATCH.advantages * per_sequence).sum() / BATCH.num_sampled_tokens.sum()
        loss.backward()
        result.losses.append(float(loss))
        result.gradients.append(export(lambda p: p.grad))
        everything = [p for group in groups for p in group["params"]]
        result.grad_norms.append(float(torch.nn.utils.clip_grad_norm_(everything, 0.1)))
        adam.step()
    result.weights = export(lambda p: p)
    return result


def _with_factors(
    model: Any, start: dict[str, Tensor]
) -> tuple[Callable[..., Any], list[dict[str, Any]], Callable[..., dict[str, Tensor]]]:
    """The model with factors, parameter groups, and what gives these by name."""
    model.requires_grad_(False)
    named = dict(model.named_parameters())
    modules = [name.removesuffix(".A") for name in start if name.endswith(".A")]
    # Linear layers that Megatron-core fuses share one A.
    a = {_fused(n): start[f"{n}.A"].double().clone().requires_grad_() for n in modules}
    b = {n: start[f"{n}.B"].double().clone().requires_grad_() for n in modules}

    def run(ids: Tensor) -> Any:
        product = {n: ALPHA / RANK * b[n] @ a[_fused(n)] for n in modules}
        return torch.func.functional_call(model, _merged(named, product), (ids,))

    def export(of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        whole = {f"{n}.A": of(a[_fused(n)]) for n in modules}
        whole |= {f"{n}.B": of(b[n]) for n in modules}
        return {name: one.detach().clone() for name, one in whole.items()}

    return run, [{"params": [*a.values(), *b.values()]}], export


def _fused(name: str) -> str:
    """Name of what shares one A: query, key and value, or gate and up projection."""
    before, _, last = name.rpartition(".")
    kinds = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "fc1"}
    kinds["up_proj"] = "fc1"
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


def by_hf_name(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As on disk: single experts, with separate gate and up projections or, in stacks, without."""
    if any(name.endswith("gate_up_proj_bias") for name in tensors):
        return one_by_one({name: tensor.detach().clone() for name, tensor in tensors.items()})
    result = {}
    for name, tensor in tensors.items():
        prefix, found, last = name.rpartition(".mlp.experts.")
        if not found:
            result[name] = tensor.detach().clone()
            continue
        for expert, whole in enumerate(tensor.detach().clone()):
            at = f"{prefix}{found}{expert}"
            if last == "gate_up_proj":
                gate, up = whole.chunk(2)
                result |= {f"{at}.gate_proj.weight": gate, f"{at}.up_proj.weight": up}
            else:
                result[f"{at}.{last}.weight"] = whole
    return result


# Gradients of norms of heads and latent vectors are small sums of large parts: 8e-6 and 7e-6
# measured, elsewhere 4e-6. Gemma's norms, with weights near 2, make attention sharp: 1.1e-5.
BOUNDS = dict.fromkeys(("gemma3_text", "glm4_moe", "deepseek_v3", "moonlight"), 3e-5)


def check(ranks: list[Report], reference: Expected, case: tuple[str, str]) -> None:
    """Compare the reports of all ranks with the reference: fp32 rounding against float64."""
    is_adapted = case[0] in ADAPTED
    # Measured: 1e-6, and 2e-7 of factors alone.
    rel, bound = (2e-6, 2e-5) if is_adapted else (1e-5, BOUNDS.get(case[0], 1e-5))
    losses = [sum(rank.losses[step] for rank in ranks) for step in range(NUM_UPDATES)]
    atol = 0 if is_adapted else 1e-6  # of all weights the loss may be a small sum of large parts
    assert losses == pytest.approx(reference.losses, rel=rel, abs=atol), case
    for report in ranks:
        assert report.ratio_is_one, case
        assert report.grad_norms == pytest.approx(reference.grad_norms, rel=rel), case
        assert same(report.start, ranks[0].start), case
        assert same(report.resumed, report.weights), case
        assert 0 < report.rounding == ranks[0].rounding < 1e-6 or not is_adapted, case
        for name, values in reference.constants.items():
            assert values.unique().numel() == values.numel(), name
            for weights in (report.weights, report.moved):
                found, bits = weights[name].view(torch.int32), values.view(torch.int32)
                assert torch.equal(found, bits), (case, name)
        for ours, theirs in zip(report.gradients, reference.gradients, strict=True):
            assert ours.keys() == theirs.keys() | reference.constants.keys()
            for name, gradient in theirs.items():
                difference = (ours[name] - gradient).abs().max()
                assert difference <= bound * gradient.abs().max(), (case, name)
        for name, weight in reference.weights.items():
            # Two steps of at most 1e-3, smooth by a large eps: 1e-7 measured.
            for weights in (report.weights, report.moved):
                assert (weights[name] - weight).abs().max() <= 1e-6, (case, name)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
