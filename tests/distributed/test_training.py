"""Every architecture trains as in transformers in any layout: gradients, norms, steps, resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gapo_megatron.learn.score import Scored
from gapo_megatron.learn.update import update
from gapo_megatron.policy import destroy
from tests.dist import SOAK, run_distributed
from tests.distributed.policy_setup import CP, EP, PP, SP, TP, VPP, load_policy, make_config
from tests.distributed.training_setup import (
    ADAPTED,
    APART,
    BATCH,
    EMPTY,
    EXPERTS_ALONE,
    LORA,
    MODELS,
    TOGETHER,
    WITH_EXPERTS,
    Layout,
    check,
    expected,
    name_of,
    save_models,
    train_all,
)

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}
BOTH: dict[str, Layout] = {
    "data": ({}, APART),
    "data, overlapped reduction": ({"parallel": {"overlap_grad_reduce": True}}, APART),
    "pipeline": ({"parallel": {PP: 2}}, TOGETHER),
    "virtual stages": ({"parallel": {PP: 2, VPP: 2}}, TOGETHER),
    "sequence, full recomputation": ({"parallel": {TP: 2, SP: True}, "model": FULL}, TOGETHER),
    "context": ({"parallel": {CP: 2}}, TOGETHER),
    "context, selective recomputation": ({"parallel": {CP: 2}, "model": SELECTIVE}, TOGETHER),
}
DENSE = BOTH | {
    "data, empty rank": ({}, EMPTY),
    "tensor": ({"parallel": {TP: 2}}, TOGETHER),
    "virtual stages, full recomputation": ({"parallel": {PP: 2, VPP: 2}, "model": FULL}, TOGETHER),
    "uneven stages": ({"parallel": {PP: 2, LAST: 1}}, TOGETHER),
}
# One rank of the last has no backward pass of its own tokens, only of the other's. In this order
# experts are, from one to the next, spread over ranks, or no longer so.
EXPERTS = BOTH | {
    "expert": ({"parallel": {EP: 2}}, APART),
    "sequence": ({"parallel": {TP: 2, SP: True}}, TOGETHER),
    "expert, sequence": ({"parallel": {EP: 2, TP: 2, SP: True}}, TOGETHER),
    "expert, sequence, full recomputation": (
        {"parallel": {EP: 2, TP: 2, SP: True}, "model": FULL},
        TOGETHER,
    ),
    "context, expert": ({"parallel": {CP: 2, EP: 2}}, TOGETHER),
    "expert, full recomputation": ({"parallel": {EP: 2}, "model": FULL}, APART),
    "expert, empty rank": ({"parallel": {EP: 2}}, EMPTY),
}
# Megatron-core's schedule wants a multiple of as many micro-batches as there are stages.
DEEP: dict[str, Layout] = {
    "uneven, virtual stages": ({"parallel": {PP: 2, FIRST: 4, VPP: 2}}, TOGETHER),
    "four, virtual stages": (
        {"parallel": {PP: 4, VPP: 2}},
        [[(0,), (1, 2, 3), (4, 5), (6,), (7,)]],
    ),
}
LAYOUTS = DENSE | EXPERTS | DEEP
# Every kind of parallelism, and of layer where the most can go wrong.
SOME = [
    *(("qwen2", "data"), ("qwen2", "data, empty rank"), ("qwen2", "uneven stages")),
    *(("llama", "tensor"), ("llama", "pipeline"), ("qwen3", "virtual stages")),
    ("mistral", "context"),
    ("qwen2 of six layers", "uneven, virtual stages"),
    *(("phi3", "sequence, full recomputation"), ("phi3", "context, selective recomputation")),
    *(("seed_oss", "sequence, full recomputation"), ("olmo2", "sequence, full recomputation")),
    *(("olmo2", "context, selective recomputation"), ("gemma3_text", "pipeline")),
    ("gemma3_text", "sequence, full recomputation"),
    ("gemma3_text", "context, selective recomputation"),
    *(("qwen3_moe", "expert"), ("qwen3_moe, not normalised", "expert")),
    *(("glm4_moe", "virtual stages"), ("gpt_oss", "expert, sequence")),
    ("gpt_oss", "context, selective recomputation"),
    ("deepseek_v3", "expert, sequence, full recomputation"),
    (f"qwen2{LORA}", "sequence, full recomputation"),
    (f"qwen2{LORA}", "virtual stages, full recomputation"),
    *((f"qwen3_moe{LORA}", "expert, sequence"), (EXPERTS_ALONE, "expert, sequence")),
]
EVERY = [
    (model, layout)
    for model in (*MODELS, f"qwen2{LORA}", f"qwen3_moe{LORA}")
    if " layers" not in model
    for layout in (EXPERTS if model.startswith(WITH_EXPERTS) else DENSE)
]
EVERY += [
    (model, layout)
    for model in ADAPTED
    if model.startswith(WITH_EXPERTS) and model != f"qwen3_moe{LORA}"
    for layout in ("expert, sequence", "virtual stages", "context, expert")
]
# As many as two cores get through before ranks are taken to hang.
PARTS = [EVERY[i : i + 40] for i in range(0, len(EVERY), 40)]


@pytest.mark.parametrize(
    ("cases", "world_size"),
    [
        (SOME, 2),
        pytest.param([("qwen2 of eight layers", "four, virtual stages")], 4, marks=SOAK[:1]),
        *(pytest.param(part, 2, marks=SOAK) for part in PARTS),
    ],
    ids=["some", "four", *map(str, range(len(PARTS)))],
)
def test_layouts_train_as_transformers_does(
    tmp_path: Path, cases: list[tuple[str, str]], world_size: int
) -> None:
    save_models(tmp_path, [model for model, _ in cases])
    ranks = run_distributed(train_all, world_size, tmp_path, cases, LAYOUTS)
    for model in dict.fromkeys(model for model, _ in cases):
        of_model = [case for case in cases if case[0] == model]
        start = ranks[0][of_model[0]].start if model in ADAPTED else None
        reference = expected(tmp_path / name_of(model), start)
        assert all(norm > 0.1 for norm in reference.grad_norms)  # clipping took part
        for case in of_model:
            check([rank[case] for rank in ranks], reference, case)


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
    save_models(tmp_path, ["qwen3_moe"])
    first, second = run_distributed(
        update_where_one_loss_has_no_gradient, 2, tmp_path / "qwen3_moe", skip_inactive
    )
    assert first == second and first[0] > 0 and first[1] == 0
