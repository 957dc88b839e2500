"""Check that Megatron-core's model and transformers' compute the same logits after a conversion.

Each side loads its folder with its own library's loader and computes in float32, so that a wrong
table, layout or config shows in the logits, independent of our bookkeeping.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from gapo_megatron.batching import pack
from gapo_megatron.compat import cpu
from gapo_megatron.config import ParallelConfig
from gapo_megatron.data.tokenizer import open_tokenizer
from gapo_megatron.errors import ConfigError
from gapo_megatron.formats.model_folder import VOCABULARY_FILES
from gapo_megatron.formats.weights import read_hf
from gapo_megatron.io.host_memory import available_bytes
from gapo_megatron.models.checks import check_shapes, num_experts
from gapo_megatron.models.quantization import FP8, quantization_of
from gapo_megatron.models.rules import hf_shapes
from gapo_megatron.models.tables import architecture_of, rules_for
from gapo_megatron.policy import destroy, initialize
from gapo_megatron.policy.load import find_weights, load_weights
from gapo_megatron.policy.model import build_model, read_hf_config
from gapo_megatron.rollouts import Rollouts
from gapo_tools.conversion.full_logits import logits
from gapo_tools.conversion.report import size

TOLERANCE = 1e-4
"""Largest difference that passes, as a share of the largest logit.

Both sides round to float32 (6e-8) some hundred times, in different orders: 7e-7 was measured on 24
layers of 896 hidden units, and weights with outliers lose more. Permuting the heads of one of those
layers gives 3e-3, a norm epsilon of 1e-5 instead of 1e-6 also 3e-3, a rope base of 5e5 instead of
1e6 gives 1e-2."""

# Text, arithmetic, code, another script: a tokenizer splits them into short and long tokens.
_PROMPTS = (
    "The three primary colours are red, yellow and blue. Mixing two of them gives",
    "Question: What is 12 * (3 + 4)? Answer: Let us compute step by step. First, 3 + 4 = 7, then",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +",
    "\u5317\u4eac\u662f\u4e2d\u56fd\u7684\u9996\u90fd\u3002\u5df4\u9ece\u662f",
)
_MOST_TOKENS = 64
_RANDOM_LENGTHS = (5, 17, 24, 33)


@dataclass(frozen=True, slots=True)
class LogitsReport:
    """Distance between the logits of both sides, over all positions."""

    max_difference: float
    """Largest absolute difference in the worst sequence; with experts, in the median one, because
    rounding may change the choice of an expert in a few sequences, but not in most."""
    scale: float
    """The largest absolute logit."""
    num_tokens: int
    greedy_agree: float
    """Share of the positions at which both sides predict the same next token."""

    @property
    def agrees(self) -> bool:
        """Whether the difference can be rounding."""
        # After an overflow both the difference and the bound are infinite.
        return self.max_difference <= TOLERANCE * self.scale < math.inf

    def __str__(self) -> str:
        relative = self.max_difference / (self.scale or 1.0)  # an output layer of zeros
        return (
            f"{self.num_tokens} tokens, largest difference {relative:.1e} of the largest logit "
            f"(bound {TOLERANCE:g}); same next token at {self.greedy_agree:.0%} of them"
        )


def obstacle(hf_dir: str | Path) -> str | None:
    """The reason why logits cannot be compared here; None if they can.

    This package may convert the model but not compute it, or memory may be too small: one side at
    a time must fit in float32, with its activations.
    """
    hf_config = read_hf_config(str(hf_dir))
    try:
        check_shapes(hf_config, ParallelConfig())
    except ConfigError as error:
        return str(error)
    num_parameters = sum(map(math.prod, hf_shapes(rules_for(hf_config)).values()))
    # Loading a Megatron folder needs twice the weights while it merges gate and up projections.
    needed, free = 4 * num_parameters * 2 + 2**30, _free_bytes()
    if needed > free:
        return f"it needs {size(needed)} of memory, and {size(free)} are free"
    return None


def compare_logits(
    hf_dir: str | Path, megatron_dir: str | Path, *, dtype: torch.dtype | None = None
) -> LogitsReport:
    """Compute the logits of a few short sequences on both sides.

    Weights of any precision are cast to float32. The sequences are text if the folder has a
    tokenizer, otherwise random tokens.

    Args:
        hf_dir: model folder with its weights.
        megatron_dir: see `policy.load.find_weights`.
        dtype: both sides first round their weights to it, as a conversion that casts did to one.

    Collectives: those of the load and a barrier, on every rank of the default process group; if
    there is none, a group of this process alone is created for the call.

    Raises:
        ConfigError: this package does not compute the model; there is no Megatron checkpoint; the
            tokenizer cannot be loaded, or has a larger vocabulary.
        ConversionError: the Megatron folder does not hold the model, or a file is damaged.
    """
    hf_config = read_hf_config(str(hf_dir))
    check_shapes(hf_config, ParallelConfig())
    sequences = _sequences(Path(hf_dir), hf_config)
    folder = find_weights(megatron_dir, hf_config).root
    ours = _megatron_logits(hf_config, folder, sequences, dtype)
    theirs = _transformers_logits(Path(hf_dir), sequences, dtype)
    # Comparisons with NaN are false, so it counts as infinite.
    differences = [
        float((a - b).abs().nan_to_num(nan=torch.inf).max())
        for a, b in zip(ours, theirs, strict=True)
    ]
    same = [a.argmax(-1) == b.argmax(-1) for a, b in zip(ours, theirs, strict=True)]
    summary = statistics.median_low if num_experts(hf_config) else max
    return LogitsReport(
        max_difference=summary(differences),
        scale=max(float(values.abs().max()) for values in theirs),
        num_tokens=sum(map(len, same)),
        greedy_agree=float(torch.cat(same).float().mean()),
    )


def _sequences(hf_dir: Path, hf_config: PretrainedConfig) -> list[Tensor]:
    """A few rows of token ids [T] int64, with T >= 2."""
    if any((hf_dir / name).is_file() for name in VOCABULARY_FILES):
        tokenizer = open_tokenizer(hf_dir, hf_config.vocab_size)
        texts = [tokenizer.encode(prompt)[:_MOST_TOKENS] for prompt in _PROMPTS]
        if known := [torch.tensor(ids) for ids in texts if len(ids) > 1]:
            return known
    random = torch.Generator().manual_seed(0)
    return [
        torch.randint(hf_config.vocab_size, (length,), generator=random)
        for length in _RANDOM_LENGTHS
    ]


@torch.no_grad()
def _transformers_logits(
    hf_dir: Path, sequences: list[Tensor], dtype: torch.dtype | None
) -> list[Tensor]:
    """Logits [T, vocabulary] float32 of every sequence, on the CPU."""
    hf_config, kind = read_hf_config(str(hf_dir)), AutoModelForCausalLM
    source: dict[str, Any] = {"pretrained_model_name_or_path": hf_dir}
    if quantization_of(hf_config) == FP8:
        # Our reader's weights: transformers 5.19 fails where the last block of a weight is smaller.
        del hf_config.quantization_config
        kind = getattr(transformers, architecture_of(hf_config).hf_class)
        weights = dict(read_hf(hf_dir))
        source = {"pretrained_model_name_or_path": None, "config": hf_config, "state_dict": weights}
    if num_experts(hf_config):
        # Its default, a grouped product, needs widths that are multiples of 16 bytes.
        source["experts_implementation"] = "eager"
    model = kind.from_pretrained(
        **source,
        dtype=torch.float32,
        generation_config=GenerationConfig(),  # the folder's own may be invalid, and is not used
        local_files_only=True,
        trust_remote_code=False,
    )
    # transformers makes bfloat16 of quantized weights, whatever it is asked for.
    model = model.to(_device(), torch.float32).eval()
    _round(model, dtype)
    return [model(ids[None].to(model.device)).logits[0].cpu() for ids in sequences]


def _megatron_logits(
    hf_config: PretrainedConfig,
    folder: Path,
    sequences: list[Tensor],
    dtype: torch.dtype | None,
) -> list[Tensor]:
    """The same of Megatron-core's model, with all sequences packed into one row."""
    batch = Rollouts.of(  # prompts of one token; a response's last token is never an input
        prompt_ids=[ids[:1].numpy() for ids in sequences],
        response_ids=[np.append(ids[1:].numpy(), 0) for ids in sequences],
    )
    microbatch = pack(batch, range(len(sequences)), device=_device())
    with _process_group():
        groups = initialize(ParallelConfig())
        try:
            with cpu.device_scope():
                (stage,) = build_model(hf_config, groups, _device(), precision="fp32")
            load_weights(stage, folder)
            _round(stage, dtype)
            values = logits(stage, groups, microbatch)
        finally:
            destroy()
    assert values is not None
    return list(values.cpu().split([len(ids) for ids in sequences]))


@torch.no_grad()
def _round(model: nn.Module, dtype: torch.dtype | None) -> None:
    if dtype is not None:
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    """Use the default process group; if there is none, create one of this process alone."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _free_bytes() -> int:
    """Free bytes of the GPU; without one, of host memory."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    return available_bytes()
