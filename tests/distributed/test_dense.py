"""Training dense models with layers of their own kind as in transformers, in any layout.

test_policy.py has the plain ones, Qwen and Llama.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from gapo_megatron.learn.score import log_probs
from gapo_megatron.policy import destroy
from tests.dist import SOAK, run_distributed, single_rank
from tests.distributed.conversion_setup import save_model
from tests.distributed.policy_setup import (
    CP,
    PP,
    SP,
    TP,
    load_policy,
    make_config,
    reference_log_probs,
)
from tests.distributed.training_setup import (
    APART,
    BATCH,
    TOGETHER,
    Layout,
    check_report,
    expected,
    train_all,
)

FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}
LAYOUTS: dict[str, Layout] = {
    "data": ({}, APART),
    "tensor": ({"parallel": {TP: 2}}, TOGETHER),
    "tensor, sequence, full recomputation": (
        {"parallel": {TP: 2, SP: True}, "model": FULL},
        TOGETHER,
    ),
    "pipeline": ({"parallel": {PP: 2}}, TOGETHER),
    "context, selective recomputation": ({"parallel": {CP: 2}, "model": SELECTIVE}, TOGETHER),
}
MODELS = ("phi3", "seed_oss", "olmo2", "gemma3_text")
# Gemma's norms, with weights near 2, make attention sharp: 1.1e-5 measured, elsewhere 4e-6.
BOUNDS = {"gemma3_text": 3e-5}
# The first stage has the layouts in which the most can go wrong.
SOME = [
    (model, layout)
    for model in MODELS
    for layout in ("tensor, sequence, full recomputation", "context, selective recomputation")
]
# Windows by the number of a layer in the whole model.
SOME.append(("gemma3_text", "pipeline"))
CASES = [(model, layout) for model in MODELS for layout in LAYOUTS]


@pytest.mark.parametrize(
    "cases",
    [SOME, pytest.param(CASES, marks=SOAK)],
    ids=["some", "every"],
)
def test_layouts_train_as_transformers_does(tmp_path: Path, cases: list[tuple[str, str]]) -> None:
    for model in MODELS:
        save_model(tmp_path / model, model)
    ranks = run_distributed(train_all, 2, tmp_path, cases, LAYOUTS)
    for model in MODELS:
        reference = expected(tmp_path / model)
        assert all(norm > 0.1 for norm in reference.grad_norms)  # clipping took part
        for case in cases:
            if case[0] == model:
                for rank in ranks:
                    check_report(rank[case], reference, case, bound=BOUNDS.get(model, 1e-5))


@pytest.mark.parametrize("model", [*MODELS, "glm4_moe"])
def test_factors_are_those_of_the_hugging_face_layers(model: str, tmp_path: Path) -> None:
    """LoRA beside Megatron-core's fused layers, and merged into transformers' own."""
    save_model(tmp_path, model)
    adapter = {"kind": "lora", "rank": 3, "alpha": 6.0}
    with single_rank():
        policy = load_policy(make_config(tmp_path, adapter=adapter))
        base = log_probs(policy, [policy.pack(BATCH, range(len(BATCH)))])
        for low_rank in policy.stages[0].adapter:
            low_rank.lora_b.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
        found = log_probs(policy, [policy.pack(BATCH, range(len(BATCH)))])
        factors = [
            (name, a.detach().clone(), b.detach().clone())
            for name, a, b in policy.adapter.whole_factors(policy.stages)
        ]
        destroy()
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    weights = dict(reference.named_parameters())
    with torch.no_grad():
        for name, a, b in factors:
            weights[f"{name}.weight"].add_(b @ a, alpha=2.0)
        expected = torch.cat(reference_log_probs(reference, BATCH))
    # fp32 rounding beside log-probs of down to -30; without factors, whole units.
    assert (torch.cat(found) - expected).abs().max() < 1e-3
    assert (torch.cat(base) - expected).abs().max() > 1
