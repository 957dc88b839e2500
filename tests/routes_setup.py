"""Models with experts through `learn`, and transformers in float64 with the same routes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from gapo_megatron.config import Config
from gapo_megatron.rollouts import Rollouts
from tests.configs import merged
from tests.distributed import conversion_setup
from tests.distributed.policy_setup import VOCAB_SIZE
from tests.distributed.training_setup import by_hf_name
from tests.learn_setup import (
    Report,
    Seen,
    assert_update,
    expected_update,
    make_config,
    make_judged,
    minibatches,
)

NUM_EXPERTS, TOP_K = 8, 3
VERDICTS = ("cwww", "ccwc", "cwcw", "ccww")
ROLLOUTS = make_judged(VERDICTS, seed=6)


def save_model(folder: Path, *, num_layers: int = 2, **changes: Any) -> None:
    """A random model of qwen3_moe with the sizes of these tests."""
    sizes: dict[str, Any] = {
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "num_hidden_layers": num_layers,
        "vocab_size": VOCAB_SIZE,
    }
    conversion_setup.save_model(folder, "qwen3_moe", **sizes | changes)


def config_of(folder: Path, *, replays: bool, **sections: dict[str, Any]) -> Config:
    """Two mini-batches of two groups; the first update changes routes of the second."""
    batch = {"rollout_prompts": len(VERDICTS), "minibatch_prompts": len(VERDICTS) // 2}
    objective = {"routing_replay": "trainer" if replays else "none"}
    defaults = {"batch": batch, "objective": objective, "optimizer": {"learning_rate": 2e-3}}
    return make_config(folder, **merged(defaults, sections))


def assert_updates(
    reports: Sequence[Report], folder: Path, config: Config, rollouts: Rollouts = ROLLOUTS
) -> None:
    """Loss, ratios and gradients of all ranks together are those of the loop in float64."""
    old = load_model(folder)
    for number, part in enumerate(minibatches(rollouts)):
        update = joined([report.updates[number] for report in reports])
        with routers(replay=config.objective.replayed_routes != "none"):
            model = load_model(folder, update.weights)
            expected = expected_update(model, part, old=old, config=config)
        expected.gradients = by_hf_name(expected.gradients)
        assert not all(expected.clipped.values())
        # 1.6e-7 of a loss measured on one rank.
        assert_update(update, expected, start=number * len(part), bound=3e-5)


def joined(updates: Sequence[Seen]) -> Seen:
    """One update as all ranks saw it; data parallel ranks have a share of it each."""
    first = updates[0]
    ratios = {i: ratio for update in updates for i, ratio in update.ratios.items()}
    clipped = {i: flag for update in updates for i, flag in update.clipped.items()}
    loss = sum(update.loss for update in updates)
    return Seen(first.weights, first.gradients, loss=loss, ratios=ratios, clipped=clipped)


def load_model(folder: Path, weights: dict[str, Tensor] | None = None) -> nn.Module:
    """The model of transformers in `folder`, at other weights, by their names on disk, if given."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
    if weights is not None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(_whole(name, parameter, weights))
    return model


def _whole(name: str, parameter: Tensor, weights: dict[str, Tensor]) -> Tensor:
    prefix, found, last = name.rpartition(".mlp.experts.")
    if not found:
        return weights[name]
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    return torch.stack(
        [
            torch.cat([weights[f"{prefix}{found}{expert}.{part}.weight"] for part in parts])
            for expert in range(len(parameter))
        ]
    )


@contextmanager
def routers(*, replay: bool) -> Iterator[None]:
    """Routers in float64 that keep the routes of passes without gradients for those with them."""
    kept: list[Tensor] = []

    def forward(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = (hidden @ self.weight.T).softmax(dim=-1)
        if replay and torch.is_grad_enabled():
            chosen = kept.pop(0)
        else:
            chosen = scores.topk(self.top_k, dim=-1).indices
            if not torch.is_grad_enabled():
                kept.append(chosen)
        gate = scores.gather(1, chosen)
        if self.norm_topk_prob:
            gate = gate / gate.sum(dim=-1, keepdim=True)
        return scores, gate, chosen

    with patch.object(Qwen3MoeTopKRouter, "forward", forward):
        yield
    assert not (replay and kept)
