"""Broadcast of weights to generation ranks, in buckets and as one plain tensor of equal size.

    OMP_NUM_THREADS=1 python benchmarks/weight_broadcast.py --receivers 2

The names and shapes of Qwen2.5-0.5B in bfloat16, from one process to others of this machine over
gloo, by the groups that `run.bridge` makes. Three ways in turns: a plain broadcast of one tensor of
as many bytes; `rollout.broadcast`; and that once more with receivers that copy every tensor to
where it belongs, as an engine does. The first round is not counted. Seconds are until the slowest
rank has everything; CPU seconds are those of all ranks together, and tell more on a machine that
others use too. Peak memory is the process's own (VmHWM), above what it was before, in buckets: in a
broadcast of its own, after the timed ones, by a rank that has kept none of an earlier one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from transformers import Qwen2Config

from gapo_megatron.compat.torch import OutsideGroup
from gapo_megatron.models.rules import hf_shapes
from gapo_megatron.models.tables import rules_for
from gapo_megatron.rollout import broadcast
from gapo_megatron.rollout.broadcast import BUCKET_BYTES, Route

WAYS = ("plain", "buckets", "buckets, copied")
HOST = torch.device("cpu")


def make_weights(num_layers: int) -> dict[str, Tensor]:
    """Tensors of the model, with every page touched."""
    config = Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=num_layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    shapes = hf_shapes(rules_for(config))
    return {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


class Rank:
    """A process of the benchmark; rank 0 sends."""

    def __init__(self, rank: int, arguments: argparse.Namespace, folder: str) -> None:
        """Join the process group and make the weights."""
        store, size = dist.FileStore(f"{folder}/store"), arguments.receivers + 1
        self.rank = rank
        self.bucket_bytes = arguments.bucket_mib * 2**20
        groups = [
            OutsideGroup(
                dist.PrefixStore(name, store), rank=rank, size=size, device=HOST, timeout_s=600
            )
            for name in ("headers", "payload")
        ]
        self.route = Route(headers=groups[0], payload=groups[1])
        self.weights = make_weights(arguments.layers)
        self.num_bytes = sum(tensor.nbytes for tensor in self.weights.values())

    def plain(self) -> None:
        """Broadcast one tensor of the same size."""
        self.route.payload.broadcast(self.flat, source=0).wait()

    def buckets(self, *, copies: bool) -> None:
        """Broadcast by `rollout.broadcast`; receivers may copy."""
        if self.rank == 0:
            broadcast.send(self.stream(), self.route, bucket_bytes=self.bucket_bytes)
            return
        for name, tensor in broadcast.receive(self.route):
            if copies:
                self.weights[name].copy_(tensor)

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights as a policy exports them."""
        yield from self.weights.items()

    def seconds(self, way: str) -> tuple[float, float]:
        """Seconds until the slowest rank has everything; CPU seconds of this rank."""
        self.route.headers.barrier()
        start, start_cpu = time.perf_counter(), time.process_time()
        if way == "plain":
            self.plain()
        else:
            self.buckets(copies=way.endswith("copied"))
        self.route.headers.barrier()
        return time.perf_counter() - start, time.process_time() - start_cpu

    def extra_bytes(self) -> int:
        """Peak memory of a broadcast in buckets, above that before it."""
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        self.buckets(copies=True)
        return memory("VmHWM") - before

    def run(self, rounds: int, folder: Path) -> None:
        """Time all ways in turns, then measure memory; rank 0 prints."""
        self.flat = torch.ones(self.num_bytes, dtype=torch.uint8)
        taken: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for number in range(rounds + 1):
            for way in WAYS:
                both = self.seconds(way)
                taken[way] += [both] if number else []  # the first round allocates buffers
        del self.flat
        cpu = {way: [seconds for _, seconds in values] for way, values in taken.items()}
        (folder / f"{self.rank}.json").write_text(json.dumps([cpu, self.extra_bytes()]))
        self.route.headers.barrier()
        if self.rank == 0:
            ends = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
            report({way: [seconds for seconds, _ in taken[way]] for way in WAYS}, ends, self)


def report(seconds: dict[str, list[float]], ends: list[Any], rank: Rank) -> None:
    """Print medians, ratios to a plain broadcast, and every single value."""
    of_all = {
        way: [sum(values) for values in zip(*(cpu[way] for cpu, _ in ends), strict=True)]
        for way in WAYS
    }
    for title, values in (("seconds", seconds), ("CPU seconds", of_all)):
        plain = statistics.median(values["plain"])
        for way in WAYS:
            median = statistics.median(values[way])
            shown = " ".join(f"{value:.2f}" for value in values[way])
            print(
                f"{title:11s} {way:16s} {median:.2f}, {rank.num_bytes / median / 1e9:.2f} GB/s, "
                f"{plain / median:.2f} of plain ({shown})"
            )
    extra = [f"{num_bytes / rank.bucket_bytes:.2f}" for _, num_bytes in ends]
    print("peak memory beside the weights, in buckets, by rank:", *extra)


def memory(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def run(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    """One process of the benchmark."""
    Rank(rank, arguments, folder).run(arguments.rounds, Path(folder))


def main() -> None:
    """Start the processes and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--receivers", type=int, default=2, help="ranks that generate")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=BUCKET_BYTES["cpu"] // 2**20)
    arguments = parser.parse_args()
    weights = make_weights(arguments.layers)
    sizes = [tensor.nbytes for tensor in weights.values()]
    print(
        f"{len(sizes)} tensors, {sum(sizes) / 1e9:.2f} GB, largest {max(sizes) / 2**20:.0f} MiB; "
        f"buckets of {arguments.bucket_mib} MiB, {arguments.receivers} receiver(s)",
        flush=True,
    )
    del weights
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (arguments, folder), nprocs=arguments.receivers + 1)


if __name__ == "__main__":
    main()
