"""Models with experts through `learn`, and transformers in float64 with the same routes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeForCausalLM,
    Qwen3MoeTopKRouter,
)

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
    with_columns,
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


def with_engines_routes(rollouts: Rollouts, *, num_layers: int = 2) -> Rollouts:
    """Routes that no router would choose, in any order; not of some tokens, of one row none."""
    random = np.random.default_rng(2)
    lengths = rollouts.num_fed_tokens.tolist()
    routes: list[np.ndarray | None] = [
        np.concatenate(
            [random.random((n, NUM_EXPERTS)).argsort(axis=1)[:, :TOP_K] for _ in range(num_layers)],
            axis=1,
        ).astype(np.uint8)
        for n in lengths
    ]
    routes[1] = None
    for row in (2, 5):
        routes[row] = routes[row][: lengths[row] // 2]
    return with_columns(rollouts, routes=routes)


def config_of(folder: Path, *, replayed: str = "trainer", **sections: dict[str, Any]) -> Config:
    """Two mini-batches of two groups; the first update changes routes of the second."""
    batch = {"rollout_prompts": len(VERDICTS), "minibatch_prompts": len(VERDICTS) // 2}
    objective = {"routing_replay": replayed}
    defaults = {"batch": batch, "objective": objective, "optimizer": {"learning_rate": 2e-3}}
    return make_config(folder, **merged(defaults, sections))


def assert_updates(
    reports: Sequence[Report], folder: Path, config: Config, rollouts: Rollouts = ROLLOUTS
) -> None:
    """Loss, ratios and gradients of all ranks together are those of the loop in float64."""
    old = load_model(folder)
    for number, part in enumerate(minibatches(rollouts)):
        update = joined([report.updates[number] for report in reports])
        with following(config.objective.replayed_routes, part):
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
def following(replayed: str, rollouts: Rollouts) -> Iterator[None]:
    """Routers in float64 that choose experts as `objective.routing_replay` says."""
    kept: list[Tensor] = []  # by passes without gradients, for those with them
    known: list[tuple[Tensor, Tensor]] = []  # the engine's, of the layers to come
    predict = Qwen3MoeForCausalLM.forward

    def of_engine(self: Any, input_ids: Tensor, attention_mask: Tensor, **options: Any) -> Any:
        if replayed == "rollout":
            known[:] = _engines_routes(rollouts, input_ids, attention_mask)
        return predict(self, input_ids=input_ids, attention_mask=attention_mask, **options)

    def forward(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = (hidden @ self.weight.T).softmax(dim=-1)
        chosen = scores.topk(self.top_k, dim=-1).indices
        if replayed == "rollout":
            experts, is_known = known.pop(0)
            chosen = torch.where(is_known, experts, chosen)
        elif replayed == "trainer" and torch.is_grad_enabled():
            chosen = kept.pop(0)
        elif replayed == "trainer":
            kept.append(chosen)
        gate = scores.gather(1, chosen)
        if self.norm_topk_prob:
            gate = gate / gate.sum(dim=-1, keepdim=True)
        return scores, gate, chosen

    with (
        patch.object(Qwen3MoeTopKRouter, "forward", forward),
        patch.object(Qwen3MoeForCausalLM, "forward", of_engine),
    ):
        yield
    assert not kept and not known


def _engines_routes(
    rollouts: Rollouts, input_ids: Tensor, attention_mask: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """By layer: experts [tokens, TOP_K] of a padded batch, and of which tokens [tokens, 1]."""
    by_tokens = {
        (*rollouts.prompt_ids[row].tolist(), *rollouts.response_ids[row].tolist()): row
        for row in range(len(rollouts))
    }
    num_layers = int(rollouts.table["num_routes"].max()) // TOP_K
    experts = torch.zeros(*input_ids.shape, num_layers, TOP_K, dtype=torch.int64)
    is_known = torch.zeros(*input_ids.shape, 1, dtype=torch.bool)
    for i, (ids, mask) in enumerate(zip(input_ids, attention_mask, strict=True)):
        routes = rollouts.routes_of(by_tokens[tuple(ids[mask.bool()].tolist())])
        if routes is not None:
            experts[i, : len(routes)].flatten(1)[:] = torch.from_numpy(routes)
            is_known[i, : len(routes)] = True
    return [
        (experts[:, :, layer].flatten(0, 1), is_known.flatten(0, 1)) for layer in range(num_layers)
    ]
