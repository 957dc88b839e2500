"""Small random models and batches for the policy's tests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gapo_megatron.batching import pack
from gapo_megatron.config import Config
from gapo_megatron.formats.weights import read_hf
from gapo_megatron.learn.score import Scored
from gapo_megatron.objective import METHODS, policy_loss
from gapo_megatron.policy import ParallelGroups, Policy, initialize
from gapo_megatron.policy.attention import PackedAttention
from gapo_megatron.rollouts import Batch, Rollouts
from gapo_megatron.types import Microbatch
from tests.configs import config_of

TP, PP, VPP, CP, EP, SP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "sequence_parallel",
)
# Odd: with two tensor parallel ranks the vocabulary is padded.
VOCAB_SIZE = 97
MODELS = ("qwen2_tied", "qwen2_untied", "llama_rope_scaling", "qwen3")


def save_model(folder: Path, name: str, *, num_layers: int = 2) -> PreTrainedModel:
    """Write a random model of 64 hidden units; all weights differ from their defaults."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": name == "qwen2_tied",
    }
    if name == "llama_rope_scaling":
        # The original context is short, so that sequences here reach all three frequency bands.
        rope = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
        model = LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope))
    elif name == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=24))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(4.0)  # far from a uniform distribution over tokens
    model.save_pretrained(folder)
    return model.eval()


class SinksInFloat32(PackedAttention):
    """Makes its sinks as Transformer Engine 2.20.2 does: in float32, whatever the model is in.

    To be put in place of `PackedAttention` in `policy.model`.
    """

    def __init__(self, config: Any, *args: Any, **settings: Any) -> None:
        super().__init__(config, *args, **settings)
        if self.softmax_offset is not None:
            self.softmax_offset = nn.Parameter(torch.zeros(len(self.softmax_offset)))


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    return read_hf(folder)


def make_config(folder: Path, **sections: dict[str, Any]) -> Config:
    """fp32 on one rank; an Adam eps that keeps steps proportional to gradients (see the tests)."""
    usual = {
        "model": {"hf_dir": str(folder), "precision": "fp32"},
        "data": {"max_prompt_tokens": 32},
        "rollout": {"max_response_tokens": 64},
        "optimizer": {"learning_rate": 1e-3, "eps": 1e-3, "clip_grad": 0.1},
    }
    return config_of(usual, sections)


def load_policy(config: Config, groups: ParallelGroups | None = None) -> Policy:
    """A policy on the CPU with the weights of its model folder, by default on groups of its own."""
    policy = Policy.build(config, groups or initialize(config.parallel), "cpu")
    policy.load_hf_weights(read_weights(Path(config.model.hf_dir)))
    return policy


def copies(policy: Policy) -> dict[str, Tensor]:
    """Every whole weight by Hugging Face name. Collective."""
    return {name: weight.clone() for name, weight in policy.iterate_hf_weights()}


@torch.no_grad()
def join_gradients(policy: Policy) -> None:
    """Complete every gradient buffer: a data parallel rank has the sum of its own shard only.

    Collective.
    """
    for model in policy.model:
        for buffer in (*model.buffers, *model.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shards = list(bucket.grad_data.chunk(group.size()))
                dist.all_gather(shards, shards[group.rank()].clone(), group=group)


Exported = TypeVar("Exported")


@torch.no_grad()
def gradients(policy: Policy, export: Callable[[Policy], Exported] = copies) -> Exported:
    """Every whole gradient, exported in the weights' place. Collective."""
    join_gradients(policy)
    parameters: list[Any] = [p for stage in policy.stages for p in stage.parameters()]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    kept = [parameter.detach().clone() for parameter in trained]
    for parameter in trained:
        parameter.copy_(parameter.main_grad)
    result = export(policy)
    for parameter, weight in zip(trained, kept, strict=True):
        parameter.copy_(weight)
    return result


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """The same names with the same bits."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def make_batch(
    num_sequences: int = 8,
    *,
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
    conversations: Mapping[int, Sequence[int]] = {},
) -> Batch:
    """Random sequences of 1-6 prompt and 1-60 response tokens.

    Some are of several `conversations`, which take turns: the number of each turn's.
    """
    random = np.random.default_rng(seed)

    def tokens(longest: int) -> list[np.ndarray]:
        return [
            random.integers(0, vocab_size, random.integers(1, longest + 1)).astype(np.int32)
            for _ in range(num_sequences)
        ]

    zeros = torch.zeros(num_sequences, dtype=torch.int64)
    responses = tokens(60)
    log_probs = [np.zeros(len(ids), dtype=np.float32) for ids in responses]
    numbers, masks = [None] * num_sequences, [None] * num_sequences
    for i, turns in conversations.items():
        turn = np.arange(len(responses[i])) * len(turns) // len(responses[i])
        numbers[i] = np.array(turns, np.int32)[turn]
        # The environment's tokens: those that open a conversation, and some others.
        masks[i] = random.random(len(responses[i])) < 0.8
        masks[i][np.unique(numbers[i], return_index=True)[1][1:]] = False
    rollouts = Rollouts.of(
        tokens(6), responses, log_probs, response_masks=masks, conversations=numbers
    )
    return Batch(
        rollouts.table,
        rollouts.tokens,
        advantages=torch.linspace(-1, 1, num_sequences, dtype=torch.float64),
        num_correct=zeros,
        group_size=zeros,
        valid=torch.ones(num_sequences, dtype=torch.bool),
    )


def pack_all(
    batch: Batch, microbatches: Sequence[Sequence[int]], *, align: int = 1
) -> list[Microbatch]:
    return [pack(batch, indices, align=align, device="cpu") for indices in microbatches]


class WeightedLoss:
    """Sum over tokens of -A log p, divided by the batch's number of tokens."""

    def __init__(self, batch: Batch, microbatches: Sequence[Microbatch]) -> None:
        self.batch = batch
        self.microbatches = microbatches
        self.seen: list[Tensor] = []

    def __call__(self, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        log_probs = scored.log_probs
        self.seen.append(log_probs.detach())
        microbatch = self.microbatches[scored.index]
        advantages = microbatch.advantages.float()[microbatch.sequence_ids]
        loss = -(advantages * log_probs).sum() / self.batch.num_sampled_tokens.sum()
        return loss, {"loss": loss.detach()}


def reference_log_probs(model: Callable[..., Any], batch: Rollouts) -> list[Tensor]:
    """transformers, one conversation at a time: log-probs of sampled tokens, with autograd."""

    def scored(ids: np.ndarray) -> Tensor:
        tokens = torch.from_numpy(ids).long()
        logits = model(tokens[None]).logits[0, :-1]
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
        return scores.gather(1, tokens[1:, None])[:, 0]

    result = []
    for i in batch.rows_here:
        prompt, response = batch.prompt_ids[i], batch.response_ids[i]
        numbers, values = batch.conversations_of(i), {}
        for number in range(batch.table["num_conversations"][i]):
            places = np.flatnonzero(numbers == number)
            before = [] if number else prompt
            found = scored(np.concatenate([before, response[places]]))
            # A conversation of its own opens with a token that nothing predicts.
            values |= zip(places[1:] if number else places, found[-len(places) :], strict=False)
        sampled = np.flatnonzero(batch.is_sampled(i)).tolist()
        result.append(torch.stack([values[place] for place in sampled]))
    return result


class ClippedLoss:
    """GAPO's loss of changed log-probs; those of `clipped` sequences are beyond the clip."""

    def __init__(
        self, batch: Batch, microbatches: Sequence[Microbatch], clipped: Collection[int]
    ) -> None:
        self.batch = batch
        self.microbatches = microbatches
        self.clipped = clipped

    def __call__(self, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        log_probs = scored.log_probs
        microbatch = self.microbatches[scored.index]
        advantages = microbatch.advantages
        # The clips are 3e-3 and 5e-3 wide, and cut off what has moved as the advantage wants it.
        size = [2e-2 if index in self.clipped else 1e-3 for index in microbatch.indices]
        moved = torch.tensor(size, dtype=torch.float64) * advantages.sign()
        result = policy_loss(
            log_probs,
            log_probs.detach().double() - moved[microbatch.sequence_ids],
            sequence_ids=microbatch.sequence_ids,
            advantages=advantages,
            num_correct=torch.ones_like(advantages, dtype=torch.int64),
            group_size=4,
            num_tokens_global=int(self.batch.num_sampled_tokens.sum()),
            method=METHODS["gapo"],
        )
        assert result.clipped.tolist() == [index in self.clipped for index in microbatch.indices]
        return result.loss, {"loss": result.loss.detach()}


def count_backward(policy: Policy) -> list[Tensor]:
    """A list that grows by one gradient with every backward pass of the stage's first layer."""
    gradients: list[Tensor] = []

    def watch(_: Any, __: Any, output: tuple[Tensor, Any]) -> None:
        if output[0].requires_grad:
            output[0].register_hook(gradients.append)

    policy.stages[0].decoder.layers[0].register_forward_hook(watch)
    return gradients


def always_back(*_: Any, **__: Any) -> bool:
    """`learn.update._has_backward` that skips no backward pass."""
    return True
