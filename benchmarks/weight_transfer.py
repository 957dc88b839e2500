"""Weights from trainers to ranks that only generate: sharded, against one sender's broadcasts.

    OMP_NUM_THREADS=1 python benchmarks/weight_transfer.py --trainers 2 --receivers 2

The names and shapes of Qwen2.5-0.5B in bfloat16, between processes of this machine over gloo. In
turns:

    broadcast    torch.distributed's broadcast of one tensor of as many bytes from trainer 0
    one sender   trainer 0 broadcasts everything bucket by bucket into new memory, two at a time
    sharded      `rollout.transfer`, every trainer a tensor parallel rank

The first round is not counted. Seconds are until the slowest rank has everything; CPU seconds are
those of all ranks together, and tell more on a machine that others use too. Before one sender can
send, all trainers gather whole tensors: that is in neither of the first two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from transformers import Qwen2Config

from gapo_megatron.compat.torch_groups import OutsideGroup
from gapo_megatron.models.tables import rules_for
from gapo_megatron.policy.export import Exported, buckets
from gapo_megatron.rollout import transfer
from gapo_megatron.rollout.transfer import TRANSFER_BYTES, Route

WAYS = ("broadcast", "one sender", "sharded")
TIMEOUT_S = 600
HOST = torch.device("cpu")


def exported_by(num_trainers: int, num_layers: int) -> Exported:
    """The model, with the trainers as tensor parallel ranks."""
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
    layers = [[range(num_layers)]]
    return Exported(rules_for(config), layers, num_trainers, 1, num_trainers, torch.bfloat16)


class Rank:
    """A process of the benchmark; the trainers come first."""

    def __init__(self, rank: int, arguments: argparse.Namespace, folder: str) -> None:
        """Join the groups and make the weights."""
        store, trainers = dist.FileStore(f"{folder}/store"), arguments.trainers
        size, bucket_bytes = trainers + arguments.receivers, arguments.bucket_mib * 2**20
        self.rank, self.trainers = rank, trainers
        place = f"file://{folder}/world"
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=size)
        receivers = list(range(trainers, size))
        self.plain = [0, *receivers]
        self.world = dist.new_group(self.plain)

        def group(name: str, members: list[int]) -> OutsideGroup | None:
            if rank not in members:
                return None
            own, place = dist.PrefixStore(name, store), members.index(rank)
            return OutsideGroup(
                own, rank=place, size=len(members), device=HOST, timeout_s=TIMEOUT_S
            )

        self.sender = group("sender", self.plain)
        everyone = [group(name, [*range(size)]) for name in ("texts", "pieces")]
        assert everyone[0] is not None and everyone[1] is not None
        between = group("receivers", receivers)
        self.route = Route(everyone[0], everyone[1], between, bucket_bytes)
        self.exported = exported_by(trainers, arguments.layers)
        whole = buckets(exported_by(1, arguments.layers), bucket_bytes=bucket_bytes)
        self.sizes = [one.shard_numel for one in whole]
        self.flat = torch.zeros(sum(self.sizes) if rank in self.plain else 0, dtype=torch.bfloat16)
        self.num_bytes = 2 * sum(self.sizes)
        self.shards: dict[str, Tensor] = {}
        if rank < trainers:
            for bucket in buckets(self.exported, bucket_bytes=bucket_bytes):
                for (rule, place), shape in zip(bucket.parts, bucket.shapes, strict=True):
                    self.shards[rule.megatron_name(place)] = torch.zeros(
                        shape, dtype=torch.bfloat16
                    )

    def move(self, way: str) -> None:
        """One transfer, by this rank's part in it."""
        if way == "broadcast" and self.rank in self.plain:
            dist.broadcast(self.flat, src=0, group=self.world)
        elif way == "one sender" and self.sender is not None:
            self.broadcast_buckets(self.sender)
        elif way == "sharded" and self.rank < self.trainers:
            transfer.send(self.exported, self.shards.__getitem__, self.route)
        elif way == "sharded":
            for _ in transfer.receive(self.exported, self.route):
                pass

    def broadcast_buckets(self, group: OutsideGroup) -> None:
        """Send or receive one bucket after the other, two at a time."""
        under_way: deque[tuple[list[dist.Work], Tensor]] = deque()
        for part in self.flat.split(self.sizes):
            content = part if self.rank == 0 else torch.empty_like(part)
            under_way.append(([group.broadcast(content, source=0)], content))
            del content
            if len(under_way) == 2:
                group.finish(under_way.popleft()[0])
        while under_way:
            group.finish(under_way.popleft()[0])

    def run(self, rounds: int, folder: Path) -> None:
        """Time all ways in turns; rank 0 prints."""
        taken: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for number in range(rounds + 1):
            for way in WAYS:
                dist.barrier()
                start, start_cpu = time.perf_counter(), time.process_time()
                self.move(way)
                dist.barrier()
                both = time.perf_counter() - start, time.process_time() - start_cpu
                taken[way] += [both] if number else []  # the first round allocates buffers
        (folder / f"{self.rank}.json").write_text(json.dumps(taken))
        dist.barrier()
        if self.rank == 0:
            report([json.loads(path.read_text()) for path in folder.glob("*.json")], self.num_bytes)
        dist.barrier()
        dist.destroy_process_group()


def report(ranks: list[dict[str, list[list[float]]]], num_bytes: int) -> None:
    """Print medians, ratios to the broadcast, and every single value."""
    seconds = {way: [both[0] for both in ranks[0][way]] for way in WAYS}
    cpu = {
        way: [sum(both[1] for both in one) for one in zip(*(r[way] for r in ranks), strict=True)]
        for way in WAYS
    }
    print(f"{num_bytes / 1e9:.2f} GB")
    for title, values in (("seconds", seconds), ("CPU seconds", cpu)):
        plain = statistics.median(values["broadcast"])
        for way in WAYS:
            median = statistics.median(values[way])
            shown = " ".join(f"{value:.2f}" for value in values[way])
            rate, share = num_bytes / median / 1e9, plain / median
            print(f"{title:11s} {way:10s} {median:.2f}, {rate:.2f} GB/s, {share:.2f} ({shown})")


def run(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    """One process of the benchmark."""
    torch.set_num_threads(1)
    Rank(rank, arguments, folder).run(arguments.rounds, Path(folder))


def main() -> None:
    """Start the processes and wait for them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--receivers", type=int, default=2, help="ranks that generate")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=TRANSFER_BYTES["cpu"] // 2**20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = arguments.trainers + arguments.receivers
        mp.spawn(run, (arguments, folder), nprocs=size)


if __name__ == "__main__":
    main()
