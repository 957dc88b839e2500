"""Updates of a policy in any layout beside transformers' and torch's AdamW in float64."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from gapo_megatron import checkpoint
from gapo_megatron.learn.score import log_probs
from gapo_megatron.learn.update import update
from gapo_megatron.policy import destroy
from tests.attempt_setup import make_attempt
from tests.convert_setup import one_by_one
from tests.distributed.checkpoint_setup import make_state
from tests.distributed.conversion_setup import VOCAB_SIZE
from tests.distributed.policy_setup import (
    WeightedLoss,
    copies,
    gradients,
    load_policy,
    make_batch,
    make_config,
    reference_log_probs,
)

# Micro-batches of each data parallel rank.
TOGETHER = [[(0, 1, 2, 3), (4, 5, 6, 7)]]
APART = [[(0,), (1, 2, 3)], [(4, 5, 6), (7,)]]
NUM_UPDATES = 2
BATCH = make_batch(vocab_size=VOCAB_SIZE)
Layout = tuple[dict[str, Any], list[list[tuple[int, ...]]]]
"""Config sections `parallel` and `model`, and the micro-batches of each data parallel rank."""


@dataclass
class Report:
    """Results of one rank."""

    gradients: dict[str, Tensor]
    """Of the first update, whole, by Hugging Face name."""
    grad_norms: list[float]
    ratio_is_one: bool
    weights: dict[str, Tensor]
    """After the last update."""
    resumed: dict[str, Tensor]
    """The same, if the run is resumed from a checkpoint after the first update."""
    moved: dict[str, Tensor]
    """The same, from the checkpoint of the layout before this one."""


def train(hf_dir: Path, run_dir: Path, layout: Layout, *, before: Path) -> Report:
    """Two updates on this rank; `before` has a checkpoint after the first of another layout."""
    sections, shares = layout
    config = make_config(hf_dir, **sections)
    policy = load_policy(config)
    microbatches = [policy.pack(BATCH, indices) for indices in shares[policy.groups.dp_rank]]
    seen: list[dict[str, Tensor]] = []
    prepare = policy.optimizer.prepare_grads

    def watched() -> bool:
        seen.append(gradients(policy))
        return prepare()

    grad_norms, equal = [], True
    with patch.object(policy.optimizer, "prepare_grads", watched):
        for step in range(NUM_UPDATES):
            old = log_probs(policy, microbatches)
            loss = WeightedLoss(BATCH, microbatches)
            grad_norms.append(update(policy, microbatches, loss).grad_norm)
            equal &= all(torch.equal(a, b) for a, b in zip(old, loss.seen, strict=False))
            if step == 0:
                checkpoint.save(
                    run_dir,
                    make_state(1),
                    policy=policy,
                    config=config,
                    attempt=make_attempt(run_dir),
                )
    weights = copies(policy)

    def go_on_from(folder: Path) -> dict[str, Tensor]:
        resumed = load_policy(config, policy.groups)
        assert checkpoint.load_latest(folder, policy=resumed, config=config)
        for _ in range(NUM_UPDATES - 1):
            update(resumed, microbatches, WeightedLoss(BATCH, microbatches))
        return copies(resumed)

    resumed, moved = go_on_from(run_dir), go_on_from(before)
    destroy()
    return Report(seen[0], grad_norms, equal, weights, resumed, moved)


def train_all(
    root: Path, cases: list[tuple[str, str]], layouts: dict[str, Layout]
) -> dict[tuple[str, str], Report]:
    """Train (model below `root`, layout) one after the other in the same processes."""
    reports, before = {}, {}
    for model, layout in cases:
        run_dir = root / f"{model}-{layout}"
        reports[model, layout] = train(
            root / model, run_dir, layouts[layout], before=before.get(model, run_dir)
        )
        before[model] = run_dir
    return reports


@dataclass
class Expected:
    """In the form of `Report`."""

    gradients: dict[str, Tensor]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    constants: dict[str, Tensor]
    """Corrections of experts' loads, which no training changes."""


def expected(hf_dir: Path) -> Expected:
    """The same updates by transformers and torch's AdamW, in float64."""
    # The one implementation of the experts that takes float64.
    model = AutoModelForCausalLM.from_pretrained(hf_dir, experts_implementation="eager")
    model = model.double().eval()
    decayed, others = [], []
    for name, p in model.named_parameters():  # biases of experts are stacked
        (decayed if p.dim() > 1 and not name.endswith("_bias") else others).append(p)
    adam = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        lr=1e-3, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-3,
    )  # fmt: skip
    buffers = {n: b.float() for n, b in model.named_buffers() if n.endswith("correction_bias")}
    result = Expected({}, [], {}, buffers)
    for step in range(NUM_UPDATES):
        adam.zero_grad()
        # Our objective and nothing beside it: no loss that balances the experts.
        per_sequence = torch.stack([x.sum() for x in reference_log_probs(model, BATCH)])
        (-(BATCH.advantages * per_sequence).sum() / BATCH.num_sampled_tokens.sum()).backward()
        if step == 0:
            result.gradients = by_hf_name({n: p.grad for n, p in model.named_parameters()})
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        result.grad_norms.append(float(norm))
        adam.step()
    result.weights = by_hf_name(dict(model.named_parameters()))
    return result


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


def check_report(
    report: Report, reference: Expected, case: tuple[str, str], *, bound: float = 1e-5
) -> None:
    """Compare with the reference; fp32 rounding against float64, of gradients within `bound`."""
    assert report.ratio_is_one, case
    # 1e-6 measured, and 2e-6 for gradients.
    assert report.grad_norms == pytest.approx(reference.grad_norms, rel=1e-5), case
    assert report.gradients.keys() == reference.gradients.keys() | reference.constants.keys()
    for name, values in reference.constants.items():
        assert values.unique().numel() == values.numel(), name
        for weights in (report.weights, report.resumed, report.moved):
            found, bits = weights[name].view(torch.int32), values.view(torch.int32)
            assert torch.equal(found, bits), (case, name)
    for name, gradient in reference.gradients.items():
        difference = (report.gradients[name] - gradient).abs().max()
        assert difference <= bound * gradient.abs().max(), (case, name)
        # Two steps of at most 1e-3, smooth by a large eps: 1e-7 measured.
        for weights in (report.weights, report.moved):
            difference = (weights[name] - reference.weights[name]).abs().max()
            assert difference <= 1e-6, (case, name)
        assert torch.equal(report.weights[name], report.resumed[name]), (case, name)
