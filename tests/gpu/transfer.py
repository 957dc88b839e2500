"""Part: weights from a process that trains to one that only generates, each on a device of its own.

NCCL refuses two ranks on one GPU, so one GPU cannot run it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig

from gapo_megatron.compat.torch_groups import OutsideGroup
from gapo_megatron.models.tables import rules_for
from gapo_megatron.policy.export import Exported, buckets
from gapo_megatron.rollout import transfer
from gapo_megatron.rollout.transfer import TRANSFER_BYTES, Route
from tests.gpu.report import Report
from tests.gpu.setting import Setting

_TIMEOUT_S = 120.0
_ROUNDS = 3
"""The first allocates and connects, and is not counted."""


def to_a_second_process(setting: Setting, report: Report) -> None:
    """Weights as the trainer has them, sent through NCCL (gloo on a CPU), and compared."""
    hf_dir = setting.config().model.hf_dir
    arguments = str(setting.folder), hf_dir, setting.device.type, setting.precision
    torch.multiprocessing.spawn(_run, arguments, nprocs=2)
    sent, received = (
        json.loads((setting.folder / f"{rank}.json").read_text("utf-8")) for rank in range(2)
    )
    differing = sorted(
        name
        for name in {*sent["sums"], *received["sums"]}
        if sent["sums"].get(name) != received["sums"].get(name)
    )
    report.claim("parameters that differ", ", ".join(differing) or 0, "none", holds=not differing)
    report.claim("parameters", len(sent["sums"]), "some", holds=len(sent["sums"]) > 0)
    seconds = min(received["seconds"][1:])
    report.figure("size", sent["num_bytes"] / 1e9, "GB")
    report.figure("from one trainer to one receiver", seconds, "s")
    report.figure("from one trainer to one receiver", sent["num_bytes"] / 1e9 / seconds, "GB/s")


def _run(rank: int, folder: str, hf_dir: str, device_type: str, precision: str) -> None:
    """Rank 0 trains, rank 1 receives."""
    device, host = torch.device(device_type, rank), torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        device = host
    store = dist.FileStore(f"{folder}/store")

    def group(name: str, place: int, size: int, where: torch.device) -> OutsideGroup:
        own = dist.PrefixStore(name, store)
        return OutsideGroup(own, rank=place, size=size, device=where, timeout_s=_TIMEOUT_S)

    route = Route(
        group("texts", rank, 2, host),
        group("pieces", rank, 2, device),
        group("receivers", 0, 1, device) if rank else None,
        TRANSFER_BYTES[device_type],
    )
    config = AutoConfig.from_pretrained(hf_dir)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    exported = Exported(rules_for(config), [[range(config.num_hidden_layers)]], 1, 1, 1, dtype)
    shards = {} if rank else _shards(exported, device)
    seconds, sums = list[float](), {name: _sum(shard) for name, shard in shards.items()}
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        if rank == 0:
            transfer.send(exported, shards.__getitem__, route)
        else:
            for rule, place, whole in transfer.receive(exported, route):
                sums[rule.megatron_name(place)] = _sum(whole)
        seconds.append(time.perf_counter() - start)
    num_bytes = sum(shard.nbytes for shard in shards.values())
    found = {"seconds": seconds, "sums": sums, "num_bytes": num_bytes}
    Path(folder, f"{rank}.json").write_text(json.dumps(found), "utf-8")


def _shards(exported: Exported, device: torch.device) -> dict[str, Tensor]:
    """Random parameters, by Megatron name."""
    generator = torch.Generator(device).manual_seed(0)
    return {
        rule.megatron_name(place): torch.randn(
            shape, generator=generator, device=device, dtype=exported.dtype_of(rule)
        )
        for bucket in buckets(exported, bucket_bytes=TRANSFER_BYTES[device.type])
        for (rule, place), shape in zip(bucket.parts, bucket.shapes, strict=True)
    }


def _sum(tensor: Tensor) -> int:
    """A sum of the bits, each weighted by where it is."""
    words = tensor.contiguous().view(torch.uint8).flatten().long()
    where = torch.arange(1, len(words) + 1, device=words.device) % 65521
    return int((words * where).sum())
