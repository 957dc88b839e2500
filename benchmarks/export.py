"""Seconds and collectives until every rank has seen every weight: the trainer's half of a sync.

    OMP_NUM_THREADS=1 python benchmarks/export.py --experts 128 --parallel expert_model=2

Random weights of a small Qwen2, or with `--experts` of a small Qwen3 with experts, on ranks of this
machine over gloo. What a tensor costs beside its bytes shows here; the bandwidth of links does not.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from gapo_megatron.config import parse_config
from gapo_megatron.models.rules import hf_shapes
from gapo_megatron.models.tables import rules_for
from gapo_megatron.policy import Policy, initialize

COLLECTIVES = ("broadcast", "all_gather", "all_gather_into_tensor")


def hf_config(arguments: argparse.Namespace) -> PretrainedConfig:
    """A model of the sizes asked for."""
    sizes = {
        "vocab_size": 1024,
        "hidden_size": arguments.hidden,
        "intermediate_size": 4 * arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    }
    if not arguments.experts:
        return Qwen2Config(**sizes, architectures=["Qwen2ForCausalLM"])
    return Qwen3MoeConfig(
        **sizes,
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=arguments.experts,
        num_experts_per_tok=8,
        moe_intermediate_size=arguments.hidden // 2,
        norm_topk_prob=True,
    )


def run(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    """Export again and again on one rank; rank 0 prints what it took, the first left out."""
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=arguments.ranks,
        store=dist.FileStore(f"{folder}/store", arguments.ranks),
    )
    sizes = dict(one.split("=") for one in arguments.parallel)
    tree: dict[str, Any] = {
        "run": {"output_dir": "unused", "num_steps": 1},
        "model": {"hf_dir": folder, "precision": "bf16"},
        "parallel": {f"{name}_parallel_size": int(size) for name, size in sizes.items()},
        "data": {"train_path": "unused"},
        "rollout": {"max_response_tokens": 8},
        "reward": {"kind": "exact"},
    }
    config = parse_config(tree, source="benchmark")
    policy = Policy.build(config, initialize(config.parallel), "cpu")
    shapes = hf_shapes(rules_for(policy.hf_config))
    torch.manual_seed(0)
    policy.load_hf_weights((name, torch.randn(shape)) for name, shape in shapes.items())
    calls: Counter[str] = Counter()
    for name in COLLECTIVES:
        setattr(dist, name, counted(name, getattr(dist, name), calls))
    seconds = []
    for _ in range(arguments.repeats + 1):
        dist.barrier()
        calls.clear()
        start = time.perf_counter()
        num_tensors = sum(1 for _ in policy.iterate_hf_weights())
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        median, best = statistics.median(seconds[1:]), min(seconds[1:])
        num_calls = sum(calls.values())
        print(f"{num_tensors} tensors: {median:.3f} s (best {best:.3f}), {num_calls} collectives")


def counted(name: str, collective: Any, calls: Counter[str]) -> Any:
    """`collective`, each call of which counts."""

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return collective(*args, **kwargs)

    return call


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parallel", nargs="*", default=[], help="e.g. expert_model=2")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        hf_config(arguments).save_pretrained(Path(folder))
        mp.spawn(run, args=(arguments, folder), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
