"""What parts share: sizes, a policy with random weights, batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gapo_megatron.config import Config
from gapo_megatron.learn.score import Scored
from gapo_megatron.models.published import shipped_fields
from gapo_megatron.models.rules import hf_shapes
from gapo_megatron.models.tables import rules_for
from gapo_megatron.policy import ParallelGroups, Policy, initialize
from gapo_megatron.rollouts import Batch, Rollouts
from gapo_megatron.types import Episode, Microbatch, Prompt
from tests.batches import make_batch
from tests.configs import config_of

_TINY = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


class Setting:
    """Where a part runs, and at which sizes: those of Qwen2-1.5B by default, or tiny ones."""

    def __init__(self, device: torch.device | str, *, tiny: bool, folder: Path) -> None:
        self.device, self.tiny, self.folder = torch.device(device), tiny, folder
        self._groups: ParallelGroups | None = None
        self.fields = shipped_fields("Qwen2.5-Math-1.5B") | (_TINY if tiny else {})
        """Of the model's config.json."""

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def precision(self) -> str:
        return "bf16" if self.is_cuda else "fp32"

    def tokens(self, number: int) -> int:
        """So many tokens, or a few in their place."""
        return max(number // 256, 2) if self.tiny else number

    def config(self, **sections: dict[str, Any]) -> Config:
        """Of a run with this model: its folder holds config.json alone.

        A micro-batch of 8192 tokens keeps about 2.6 MB of activations a token, 21 GB, for the
        backward pass; weights, gradients and optimizer of 1.5B parameters take 28 GB.
        """
        hf_dir = self.folder / "model"
        hf_dir.mkdir(exist_ok=True)
        fields = self.fields | {"max_position_embeddings": 32768, "eos_token_id": 0}
        (hf_dir / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        usual = {
            "run": {"output_dir": str(self.folder / "run")},
            "model": {"hf_dir": str(hf_dir), "precision": self.precision},
            "data": {"max_prompt_tokens": self.tokens(512)},
            "rollout": {"max_response_tokens": self.tokens(2048)},
            "batch": {"max_tokens_per_microbatch": self.tokens(8192)},
        }
        return config_of(usual, sections)

    def policy(self, config: Config) -> Policy:
        """With random weights: matrices of deviation 0.02, norms of ones, the same every time."""
        self._groups = self._groups or initialize(config.parallel)
        policy = Policy.build(config, self._groups, self.device)
        generator = torch.Generator(self.device).manual_seed(0)
        dtype = policy.stages[0].config.params_dtype

        def tensor(name: str, shape: Sequence[int]) -> Tensor:
            if "norm" in name:
                return torch.ones(shape)
            drawn = torch.randn(shape, generator=generator, device=self.device, dtype=dtype)
            return (0.02 * drawn).cpu()

        shapes = hf_shapes(rules_for(policy.hf_config))
        policy.load_hf_weights((name, tensor(name, shape)) for name, shape in shapes.items())
        return policy

    def prompts(self, config: Config, number: int, *, seed: int = 0) -> list[Prompt]:
        """Random ones."""
        random, vocab = np.random.default_rng(seed), self.vocab_size(config)
        longest = config.data.max_prompt_tokens
        lengths = random.integers(1, longest + 1, number)
        return [
            Prompt(f"p{i}", tuple(random.integers(1, vocab, n).tolist()), answer="")
            for i, n in enumerate(lengths)
        ]

    def batch(self, config: Config, *, num_prompts: int, seed: int = 0) -> Batch:
        """Random prompts and responses of all lengths; verdicts that leave no group without A."""
        random, vocab = np.random.default_rng(seed), self.vocab_size(config)
        group_size = config.batch.rollouts_per_prompt

        def episode(prompt: Prompt, sample: int) -> Episode:
            length = random.integers(1, config.rollout.max_response_tokens + 1)
            ids = random.integers(1, vocab, length).astype(np.int32)
            return Episode(prompt, sample, ids, np.zeros(length, dtype=np.float32))

        groups = [
            tuple(episode(prompt, sample) for sample in range(group_size))
            for prompt in self.prompts(config, num_prompts, seed=seed)
        ]
        num_correct = [1 + n % (group_size - 1) for n in range(num_prompts)]
        verdicts = [("c" * c).ljust(group_size, "w") for c in num_correct]
        return make_batch(groups, verdicts, config.objective.resolve())

    def rows_of(self, policy: Policy, *, num_tokens: int, length: int) -> Microbatch:
        """A micro-batch of `num_tokens` in sequences of `length`, nearly all of them scored."""
        random, vocab = np.random.default_rng(0), policy.hf_config.vocab_size
        count = num_tokens // length
        prompts = [random.integers(1, vocab, 1).astype(np.int32) for _ in range(count)]
        responses = [random.integers(1, vocab, length).astype(np.int32) for _ in range(count)]
        return policy.pack(Rollouts.of(prompts, responses), range(count))

    def vocab_size(self, config: Config) -> int:
        fields = json.loads((Path(config.model.hf_dir) / "config.json").read_text("utf-8"))
        return int(fields["vocab_size"])


@dataclass
class MeanLogProb:
    """A loss: minus the mean log-prob of so many rows; keeps what it was given."""

    num_rows: int

    def __post_init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one micro-batch."""
        self.seen.append(scored.log_probs.detach().clone())
        return -scored.log_probs.sum() / max(self.num_rows, 1), {}
