"""Providers that benchmarks/head.py compares.

A peer is imported when it is loaded, so a missing one does not affect the others.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from head_problem import CLIP, Batch, Problem

from gapo_megatron.logprob import token_log_probs
from gapo_megatron.logprob.implementation import Name, choose_implementation

PROVIDERS = [
    "ours",
    "ours-torch",
    "ours-main-grad",
    "naive",
    "naive-rounded",
    "torch",
    "torch-large-chunk",
    "liger",
    "liger-tp",
    "liger-grpo",
    "cce",
    "cce-filter",
    "verl",
    "verl-triton",
]


@dataclass(frozen=True)
class Head:
    """A loaded provider: log-probs [R] of (hidden, weight, labels), or a fused `loss`."""

    log_probs: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    note: str
    loss: Callable[[torch.Tensor, torch.Tensor, Batch], torch.Tensor] | None = None
    main_grad: torch.Tensor | None = None


def load_head(name: str, problem: Problem) -> Head:
    """Import a provider; raises what its import raises, or RuntimeError if it cannot run here."""
    cuda, weight = problem.weight.is_cuda, problem.weight
    if name in ("cce-filter", "verl-triton") and not cuda:
        raise RuntimeError("its Triton kernels need a CUDA device")
    if name == "naive-rounded" and weight.dtype == torch.float32:
        raise RuntimeError("with float32 inputs it is naive")
    if name == "ours":
        code = choose_implementation(weight.device, weight.dtype)
        return Head(ours, code.__name__.split(".")[-1])
    if name == "ours-torch":
        return Head(functools.partial(ours, implementation="torch"), "tiles")
    if name == "ours-main-grad":
        main_grad = torch.empty_like(weight, dtype=torch.float32, requires_grad=False).zero_()
        score = functools.partial(ours, main_grad=main_grad)
        return Head(score, "dweight added to a float32 buffer", None, main_grad)
    if name == "naive":
        return Head(lambda h, w, y: pick(h.float() @ w.float().T, y), "logits in float32")
    if name == "naive-rounded":
        return Head(lambda h, w, y: pick((h @ w.T).float(), y), f"logits in {weight.dtype}")
    if name.startswith("torch"):
        large: dict[str, Any] = (
            {"batch_chunk_size": 4096, "chunking_method": None} if "large" in name else {}
        )
        options = torch.nn.LinearCrossEntropyOptions(**large)
        return Head(
            lambda h, w, y: -F.linear_cross_entropy(h, w, y, reduction="none", options=options),
            "chunks of 4096 rows" if large else "default options",
        )
    if name == "liger":
        liger = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
        function = liger.LigerFusedLinearScaledCrossEntropyFunction
        path = liger._resolve_implementation(weight.device).__name__
        return Head(lambda h, w, y: -function.apply(h, w, y, 1.0, -100, 1, False), path)
    if name == "liger-tp":
        return load_liger_tp(problem)
    if name == "liger-grpo":
        return load_liger_grpo(problem)
    if name.startswith("cce"):
        cce = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        how: dict[str, Any] = {"impl": "cce" if cuda else "torch_compile", "reduction": "none"}
        how["filter_eps"] = "high" if name == "cce-filter" else None
        return Head(lambda h, w, y: -cce(h, w, y, **how), how["impl"])
    enter_packages("verl", "utils", "utils/experimental", "utils/kernel", "plugin")
    if name == "verl":
        verl = importlib.import_module("verl.utils.experimental.torch_functional")
        return Head(lambda h, w, y: verl.FusedLinearForPPO()(h, w, y)[0], "torch, 512-row chunks")
    kernel = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    return Head(lambda h, w, y: kernel.linear_cross_entropy(h, w, y, 1.0, "none")[0], "Triton")


def ours(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    main_grad: torch.Tensor | None = None,
    implementation: Name = "auto",
) -> torch.Tensor:
    """The operator, log-probs alone."""
    log_probs = token_log_probs(
        hidden, weight, labels, main_grad=main_grad, implementation=implementation
    )
    assert isinstance(log_probs, torch.Tensor)
    return log_probs


def load_liger_tp(problem: Problem) -> Head:
    """Liger's tensor-parallel kernels on a group of one rank; not its fallback.

    Not yet run on a GPU: written for 0.8.5 of liger-kernel and liger-cute-kernels.
    """
    if not problem.weight.is_cuda:
        raise RuntimeError("its CUTLASS and NVSHMEM kernels need a CUDA device")
    lck = importlib.import_module("liger_cute_kernels")
    if dist.is_initialized():
        importlib.import_module("liger_cute_kernels.nvshmem").pool_clear_all()  # they cannot grow
    else:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    sizes = (*problem.hidden.shape, len(problem.weight))
    lck.configure(flsce=lck.FusedLinearCrossEntropyConfig(*sizes), device=problem.weight.device)
    name = "fused_linear_scaled_cross_entropy"
    if not importlib.import_module(f"liger_kernel.ops.cute.{name}_tp").is_available():
        raise RuntimeError("its native kernels do not load, and it would fall back to torch")
    liger = importlib.import_module(f"liger_kernel.ops.{name}")
    function = liger.LigerFusedLinearScaledCrossEntropyTPFunction
    return Head(lambda h, w, y: -function.apply(h, w, y, dist.group.WORLD), "CUTLASS, one rank")


def load_liger_grpo(problem: Problem) -> Head:
    """Liger's GRPO loss at sequence level: rows padded to [B, L], gradients in its forward pass."""
    chunked = importlib.import_module("liger_kernel.chunked_loss")
    base = importlib.import_module("liger_kernel.chunked_loss.fused_linear_ppo")
    fused = chunked.LigerFusedLinearGRPOLoss(
        beta=0.0,
        compiled=problem.weight.is_cuda,
        use_ref_model=False,
        epsilon_low=CLIP,
        epsilon_high=CLIP,
        loss_type="grpo",
        importance_sampling_level="sequence",
    )

    def loss(hidden: torch.Tensor, weight: torch.Tensor, batch: Batch) -> torch.Tensor:
        ids, counts = batch.sequence_ids, batch.counts
        places = torch.arange(len(ids), device=ids.device) - (counts.cumsum(0) - counts)[ids]

        def pad(values: torch.Tensor) -> torch.Tensor:
            padded = values.new_zeros(len(counts), int(counts.max()), *values.shape[1:])
            return padded.index_put((ids, places), values)

        mask, old = pad(torch.ones_like(batch.old_log_probs)), pad(batch.old_log_probs)
        inputs = (pad(hidden), weight, pad(batch.labels), mask, batch.advantages)
        return fused(*inputs, old_per_token_logps=old)[0]

    def log_probs(h: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return base.LigerFusedLinearPPOBase.chunk_forward(h[None], w, y[None])[0]

    padded = len(problem.counts) * int(problem.counts.max()) / len(problem.labels)
    return Head(log_probs, f"gradients in forward; padded to {padded:.1f} T rows", loss)


def enter_packages(root: str, *folders: str) -> None:
    """Make a package's folders importable without their __init__, which would import a trainer."""
    if root in sys.modules:
        return
    spec = importlib.util.find_spec(root)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named '{root}'")
    for folder in ("", *folders):
        module = types.ModuleType(".".join([root, *folder.split("/")]).rstrip("."))
        module.__path__ = [str(Path(spec.origin).parent / folder)]
        sys.modules[module.__name__] = module


def pick(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probs of the labels from logits."""
    return torch.log_softmax(logits, 1).gather(1, labels[:, None])[:, 0]
