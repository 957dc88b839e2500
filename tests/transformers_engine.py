"""An engine for tests: transformers' own model, without a cache, on one rank.

What a second implementation of `rollout.engine.Engine` has to do, in its plainest form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gapo_megatron.errors import RolloutError, WeightSyncError
from gapo_megatron.rollout.engine import Completion, Request
from gapo_megatron.rollout.replicas import Replicas
from gapo_megatron.rollouts import Rollouts
from tests.scripted_engine import LoneReplicas


@dataclass
class _Open:
    request: Request
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    alternatives: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)


class TransformersEngine:
    """Samples from the model's logits in float32; all requests run at a time.

    Args:
        returns_routes: return the experts that the routers of the model chose.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_id: int,
        replicas: Replicas | None = None,
        verify_bound: float = 1e-5,
        returns_routes: bool = False,
    ) -> None:
        self.replicas = replicas or LoneReplicas()
        self.policy_version = 0
        self.max_sequence_tokens: int = model.config.max_position_embeddings
        self.vocab_size: int = model.config.vocab_size
        self.verify_bound = verify_bound
        self._model = model.eval()
        self._eos = eos_token_id
        self._awake = True
        self._open: dict[str, _Open] = {}
        self._chosen: list[Tensor] = []
        if returns_routes:
            for module in model.modules():
                if type(module).__name__.endswith("TopKRouter"):
                    module.register_forward_hook(self._keep_chosen)

    def add(self, request: Request) -> None:
        self._require_awake("generate")
        generator = torch.Generator().manual_seed(request.seed)
        self._open[request.name] = _Open(request, generator)

    def poll(self) -> list[Completion]:
        ended = []
        for name, one in list(self._open.items()):
            token, log_prob = self._sample(one)
            one.tokens.append(token)
            one.log_probs.append(log_prob)
            if token == self._eos or token in one.request.stop_ids:
                ended.append(self._end(name, "stop"))
            elif len(one.tokens) == one.request.max_tokens:
                ended.append(self._end(name, "length"))
        return ended

    def abort(self) -> list[Completion]:
        return [self._end(name, "abort") for name in list(self._open)]

    def num_requests(self) -> tuple[int, int]:
        return len(self._open), 0

    def score(self, rollouts: Rollouts) -> list[np.ndarray]:
        self._require_awake("score")
        scored = []
        for i in range(len(rollouts)):
            prompt, response = rollouts.prompt_ids[i], rollouts.response_ids[i]
            tokens = torch.from_numpy(np.concatenate([prompt, response])).long()
            log_probs = self._logits(tokens.tolist()).log_softmax(-1)
            rows = torch.arange(len(prompt) - 1, len(tokens) - 1)
            scored.append(log_probs[rows, tokens[rows + 1]].numpy()[rollouts.is_sampled(i)])
        return scored

    def update_weights(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        policy_version: int,
        on_received: Callable[[], None] = lambda: None,
    ) -> None:
        self._require_awake("update_weights")
        self.policy_version = -1
        missing = dict(on_disk(self._model))
        for name, tensor in tensors:
            if name not in missing:
                raise WeightSyncError(f"weight sync, version {policy_version}: {name} is extra")
            missing.pop(name).copy_(tensor)
        if missing:
            raise WeightSyncError(f"weight sync, version {policy_version}: missing {[*missing]}")
        on_received()
        self.policy_version = policy_version

    def sleep(self) -> None:
        self._awake = False

    def wake(self) -> None:
        self._awake = True

    def _sample(self, one: _Open) -> tuple[int, float]:
        request = one.request
        given = [*request.prompt_ids, *request.response_ids.tolist(), *one.tokens]
        log_probs = (self._logits(given)[-1] / request.temperature).log_softmax(-1)
        if self._chosen:
            num_known = request.num_routed + sum(map(len, one.routes))
            chosen = torch.stack(self._chosen, dim=1).to(torch.uint8)
            one.routes.append(chosen[num_known:].numpy())
        ordered, order = log_probs.sort(descending=True)
        before = ordered.exp().cumsum(0) - ordered.exp()
        log_probs[order[before >= request.top_p]] = -torch.inf
        log_probs = log_probs.log_softmax(-1)
        token = int(torch.multinomial(log_probs.exp(), 1, generator=one.generator))
        if request.num_alternatives:
            theirs, ids = log_probs.topk(request.num_alternatives)
            one.alternatives.append((ids.int().numpy(), theirs.numpy()))
        return token, float(log_probs[token])

    def _keep_chosen(self, _: Any, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._chosen.append(output[2])

    def _logits(self, tokens: list[int]) -> Tensor:
        self._chosen.clear()
        with torch.no_grad():
            logits: Tensor = self._model(torch.tensor([tokens])).logits[0].float()
        return logits

    def _end(self, name: str, reason: Any) -> Completion:
        one = self._open.pop(name)
        tokens, log_probs = np.array(one.tokens, np.int32), np.array(one.log_probs, np.float32)
        routes = np.concatenate(one.routes) if one.routes else None
        ended = Completion(name, tokens, log_probs, reason, routes=routes)
        if not one.alternatives:
            return ended
        ids, theirs = (np.stack(rows) for rows in zip(*one.alternatives, strict=True))
        return replace(ended, alternative_ids=ids, alternative_log_probs=theirs)

    def _require_awake(self, action: str) -> None:
        if not self._awake:
            raise RolloutError(f"{action} needs an engine that is awake")


def on_disk(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters by their names on disk, where every expert has its own."""
    for name, parameter in model.named_parameters():
        prefix, found, last = name.rpartition(".mlp.experts.")
        if not found:
            yield name, parameter.detach()
            continue
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
        for number, expert in enumerate(parameter.detach()):
            for part, tensor in zip(parts, expert.chunk(len(parts)), strict=True):
                yield f"{prefix}{found}{number}.{part}.weight", tensor
