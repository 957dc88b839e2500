"""Check that both sides of a conversion, Megatron-core's model and transformers', agree in logits.

Each side reads its folder with its own library's loader and computes in float32, so that a wrong
table, layout or config shows in what the model says, not in our bookkeeping.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from gapo_megatron.batching import pack
from gapo_megatron.compat import cpu
from gapo_megatron.config import ParallelConfig
from gapo_megatron.data.tokenizer import open_tokenizer
from gapo_megatron.errors import ConfigError
from gapo_megatron.hf.model_folder import VOCABULARY_FILES
from gapo_megatron.models.checks import check_shapes, num_experts
from gapo_megatron.models.rules import hf_shapes
from gapo_megatron.models.tables import rules_for
from gapo_megatron.ops.convert.progress import size
from gapo_megatron.policy import destroy, initialize
from gapo_megatron.policy.load import find_weights, load_weights
from gapo_megatron.policy.logits import logits
from gapo_megatron.policy.model import build_model, read_hf_config
from gapo_megatron.rollouts import Rollouts

TOLERANCE = 1e-4
"""Largest difference that passes, as a share of the largest logit.

Both sides round to float32 (6e-8), in another order, some hundred times over: 7e-7 was measured on
24 layers of 896 hidden units, and weights with outliers lose more. With the heads of one of those
layers permuted it is 3e-3, with a norm's epsilon of 1e-5 for 1e-6 too, with a rope base of 5e5 for
1e6 1e-2."""

# Text, arithmetic, code, another script: a tokenizer splits some of it finely, some not.
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
    """Distance between the two sides. Differences are absolute, over all positions."""

    max_difference: float
    """Largest difference: in the median sequence if the model has experts, else in the worst: which
    expert is chosen may turn on a rounding error, in one sequence or the other, but not in most."""
    scale: float
    """The largest logit, as an absolute value."""
    num_tokens: int
    greedy_agree: float
    """Share of the positions at which both sides say the same next token."""

    @property
    def agrees(self) -> bool:
        """The difference is one of rounding."""
        # What has overflowed differs by infinity, and so would the bound be.
        return self.max_difference <= TOLERANCE * self.scale < math.inf

    def __str__(self) -> str:
        relative = self.max_difference / (self.scale or 1.0)  # an output layer of zeros
        return (
            f"of {self.num_tokens} tokens differ by at most {relative:.1e} of the largest "
            f"(bound {TOLERANCE:g}); {self.greedy_agree:.0%} say the same next token"
        )


def obstacle(hf_dir: str | Path) -> str | None:
    """Why the logits cannot be compared here, if they cannot.

    The model may be one that converts but that this package does not compute, or its memory be too
    small: one side at a time has to fit in float32, with room for what it computes.
    """
    hf_config = read_hf_config(str(hf_dir))
    try:
        check_shapes(hf_config, ParallelConfig())
    except ConfigError as error:
        return str(error)
    num_parameters = sum(map(math.prod, hf_shapes(rules_for(hf_config)).values()))
    # Merging gate and up projection doubles them while a Megatron folder is loaded.
    needed, free = 4 * num_parameters * 2 + 2**30, _free_bytes()
    if needed > free:
        return f"{size(needed)} of memory are needed for it, {size(free)} are free"
    return None


def compare_logits(
    hf_dir: str | Path, megatron_dir: str | Path, *, dtype: torch.dtype | None = None
) -> LogitsReport:
    """Compute the logits of a few short sequences on both sides.

    Weights of any precision are cast to float32. The sequences are text where the folder has a
    tokenizer, else random tokens.

    Args:
        hf_dir: model folder with its weights.
        megatron_dir: see `policy.load.find_weights`.
        dtype: rounded to first, on both sides: what a conversion that casts has done on one.

    Collectives: none but with itself where no process group is up (one is made, and removed);
    else those of the load and a barrier, on every rank of the default group.

    Raises:
        ConfigError: the model is not one this package computes; no Megatron checkpoint; a tokenizer
            that cannot be loaded, or of a larger vocabulary.
        ConversionError: the Megatron folder does not hold the model, or a file is damaged.
    """
    hf_config = read_hf_config(str(hf_dir))
    check_shapes(hf_config, ParallelConfig())
    sequences = _sequences(Path(hf_dir), hf_config)
    folder = find_weights(megatron_dir, hf_config).root
    ours = _megatron_logits(hf_config, folder, sequences, dtype)
    theirs = _transformers_logits(Path(hf_dir), sequences, dtype)
    # NaN would hide in a comparison.
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
    """A few rows of token ids [T] int64, of two tokens and more."""
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
    """[T, vocabulary] float32 of every sequence, on the CPU."""
    model = AutoModelForCausalLM.from_pretrained(
        hf_dir,
        dtype=torch.float32,
        generation_config=GenerationConfig(),  # nothing is generated: the folder's may be odd
        local_files_only=True,
        trust_remote_code=False,
    )
    model = model.to(_device()).eval()
    _round(model, dtype)
    return [model(ids[None].to(model.device)).logits[0].cpu() for ids in sequences]


def _megatron_logits(
    hf_config: PretrainedConfig,
    folder: Path,
    sequences: list[Tensor],
    dtype: torch.dtype | None,
) -> list[Tensor]:
    """Logits of Megatron-core's model, computed with all sequences packed into one row."""
    microbatch = pack(_to_pack(sequences), range(len(sequences)), device=_device())
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


def _to_pack(sequences: list[Tensor]) -> Rollouts:
    """Prompts of one token; the last token of a response is never fed, so each gets one more."""
    return Rollouts.of(
        prompt_ids=[ids[:1].numpy() for ids in sequences],
        response_ids=[np.append(ids[1:].numpy(), 0) for ids in sequences],
    )


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    """The default process group; one of this process alone where there is none."""
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
    """Free bytes of the GPU if there is one, else of the host's memory as far as allowed here."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    free = next(int(line.split()[1]) * 2**10 for line in lines if line.startswith("MemAvailable"))
    # A job's limit: its control group, or one above.
    own = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()[-1].split(":")[2]
    group = Path("/sys/fs/cgroup") / own.lstrip("/")
    for folder in (group, *group.parents):
        limit = folder / "memory.max"
        if limit.is_file() and (text := limit.read_text().strip()) != "max":
            free = min(free, int(text))
    return free
