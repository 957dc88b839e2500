"""Training a model with experts: gradients and updates as in transformers, in any layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from gapo_megatron import checkpoint
from gapo_megatron.learn.forward import Scored
from gapo_megatron.learn.score import log_probs
from gapo_megatron.learn.update import update
from gapo_megatron.policy import destroy
from tests.attempt_setup import make_attempt
from tests.dist import run_distributed
from tests.distributed.checkpoint_setup import make_state
from tests.distributed.conversion_setup import VOCAB_SIZE, save_model
from tests.distributed.policy_setup import (
    CP,
    EP,
    PP,
    SP,
    TP,
    VPP,
    WeightedLoss,
    copies,
    load_policy,
    make_batch,
    make_config,
    reference_log_probs,
)
from tests.learn_setup import gradients

# Per layout of two ranks: [parallel] settings, and the micro-batches of each data parallel rank.
# In the last layout one rank has no backward pass of its own tokens, only of the other's. In this
# order experts are, from one to the next, spread over ranks, or no longer so.
TOGETHER = [[(0, 1, 2, 3), (4, 5, 6, 7)]]
APART = [[(0,), (1, 2, 3)], [(4, 5, 6), (7,)]]
LAYOUTS: dict[str, tuple[dict[str, int], list[list[tuple[int, ...]]]]] = {
    "data": ({}, APART),
    "expert": ({EP: 2}, APART),
    "pipeline": ({PP: 2}, TOGETHER),
    "virtual stages": ({PP: 2, VPP: 2}, TOGETHER),
    "context": ({CP: 2}, TOGETHER),
    "context, expert": ({CP: 2, EP: 2}, TOGETHER),
    "expert, sequence": ({EP: 2, TP: 2, SP: True}, TOGETHER),
    "expert, empty rank": ({EP: 2}, [[(0, 1, 2, 3), (4, 5, 6, 7)], [(), ()]]),
}
# Whether the chosen experts' shares add up to one.
MODELS = {"normalised": True, "as they are": False}
CASES = [("normalised", layout) for layout in LAYOUTS] + [("as they are", "expert")]
SOME = [("normalised", "expert"), ("normalised", "expert, sequence"), ("as they are", "expert")]
NUM_UPDATES = 2
BATCH = make_batch(vocab_size=VOCAB_SIZE)


def update_where_one_loss_has_no_gradient(folder: Path, skip_inactive: bool) -> list[float]:
    """Gradient norms; in the last update no rank's loss has a gradient."""
    config = make_config(folder, parallel={EP: 2})
    policy = load_policy(config)
    microbatches = [policy.pack(BATCH, (policy.groups.dp_rank,))]
    norms = []
    for with_gradient in (0, None):

        def loss(scored: Scored, on: int | None = with_gradient) -> object:
            values = scored.log_probs
            return (values.sum() if policy.groups.dp_rank == on else torch.ones(())), {}

        norms.append(update(policy, microbatches, loss, skip_inactive=skip_inactive).grad_norm)
    destroy()
    return norms


@pytest.mark.parametrize("skip_inactive", [False, True])
def test_a_loss_without_gradient_keeps_no_rank_waiting(tmp_path: Path, skip_inactive: bool) -> None:
    save_model(tmp_path, "qwen3_moe")
    first, second = run_distributed(
        update_where_one_loss_has_no_gradient, 2, tmp_path, skip_inactive
    )
    assert first == second and first[0] > 0 and first[1] == 0


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


def train(hf_dir: Path, run_dir: Path, layout: str, *, before: Path) -> Report:
    parallel, shares = LAYOUTS[layout]
    config = make_config(hf_dir, parallel=parallel)
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


def train_all(root: Path, cases: list[tuple[str, str]]) -> dict[tuple[str, str], Report]:
    reports, before = {}, {}
    for model, layout in cases:
        run_dir = root / f"{model}-{layout}"
        reports[model, layout] = train(
            root / model, run_dir, layout, before=before.get(model, run_dir)
        )
        before[model] = run_dir
    return reports


@dataclass
class Expected:
    """In the form of `Report`."""

    gradients: dict[str, Tensor]
    grad_norms: list[float]
    weights: dict[str, Tensor]


def expected(hf_dir: Path) -> Expected:
    """The same updates by transformers and torch's AdamW, in float64."""
    # The one implementation of the experts that takes float64.
    model = AutoModelForCausalLM.from_pretrained(hf_dir, experts_implementation="eager")
    model = model.double().eval()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        lr=1e-3, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-3,
    )  # fmt: skip
    result = Expected({}, [], {})
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
    """As on disk: single experts, with separate gate and up projections."""
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


@pytest.mark.parametrize(
    "cases", [SOME, pytest.param(CASES, marks=pytest.mark.system)], ids=["some", "every"]
)
def test_layouts_train_as_transformers_does(tmp_path: Path, cases: list[tuple[str, str]]) -> None:
    for model, normalised in MODELS.items():
        save_model(tmp_path / model, "qwen3_moe", norm_topk_prob=normalised)
    ranks = run_distributed(train_all, 2, tmp_path, cases)
    references = {model: expected(tmp_path / model) for model in MODELS}
    for case in cases:
        reference = references[case[0]]
        assert all(norm > 0.1 for norm in reference.grad_norms)  # clipping took part
        for report in (rank[case] for rank in ranks):
            assert report.ratio_is_one, case
            # fp32 rounding against float64: 1e-6 measured, and 2e-6 for gradients.
            assert report.grad_norms == pytest.approx(reference.grad_norms, rel=1e-5), case
            assert report.gradients.keys() == reference.gradients.keys()
            for name, gradient in reference.gradients.items():
                difference = (report.gradients[name] - gradient).abs().max()
                assert difference <= 1e-5 * gradient.abs().max(), (case, name)
                # Two steps of at most 1e-3, smooth by a large eps: 1e-7 measured.
                for weights in (report.weights, report.moved):
                    difference = (weights[name] - reference.weights[name]).abs().max()
                    assert difference <= 1e-6, (case, name)
                assert torch.equal(report.weights[name], report.resumed[name]), (case, name)
