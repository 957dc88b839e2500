"""Parts: memory, time, and what of it is waiting."""

from __future__ import annotations

import collections
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

from gapo_megatron import checkpoint
from gapo_megatron.compat import cpu
from gapo_megatron.learn.score import log_probs
from gapo_megatron.policy import Policy
from gapo_megatron.run.memory import DeviceMemory, device_reader
from gapo_tools.planner.flops import Shape, forward_flops
from gapo_tools.planner.hardware import GPUS
from tests.attempt_setup import make_attempt
from tests.gpu.report import Report
from tests.gpu.setting import Setting
from tests.gpu.training import run_update

GIB = 2**30
SYNCHRONISATIONS = "synchronisations (not torch.cuda.synchronize, nor waits for events)"
"""What `torch.cuda.set_sync_debug_mode` sees."""


def memory(setting: Setting, report: Report) -> None:
    """Memory over four cycles of update, make_room and the weights' leave; all is offloaded."""
    config = setting.config(optimizer={"offload": "all"})
    policy = setting.policy(config)
    read = device_reader(setting.device)
    length = setting.tokens(4096)
    packed = [setting.rows_of(policy, num_tokens=2 * length, length=length)]
    num_bytes = sum(one.nbytes for stage in policy.stages for one in stage.parameters())
    report.figure("weights", num_bytes / GIB, "GiB")

    def seen(when: str, *, peak: bool = False) -> DeviceMemory | None:
        if found := read(peak):
            for name, value in found._asdict().items():
                report.figure(f"{when}: {name}", value / GIB, "GiB")
        return found

    left = []
    for cycle in range(4):
        with cpu.device_scope():
            policy.begin_update()
        seen(f"cycle {cycle}, begin_update")
        run_update(policy, packed)
        seen(f"cycle {cycle}, most in an update", peak=True)
        (before,) = log_probs(policy, packed)
        policy.make_room()
        with_weights = seen(f"cycle {cycle}, make_room")
        policy.make_room_of_weights()
        without = seen(f"cycle {cycle}, make_room_of_weights")
        policy.begin_pass()
        (after,) = log_probs(policy, packed)
        differing = int((before != after).sum())
        report.claim(
            f"cycle {cycle}: rows that differ once the weights are back", differing, "none",
            holds=differing == 0,
        )  # fmt: skip
        if with_weights and without:
            grown = without.free - with_weights.free
            report.claim(
                f"cycle {cycle}: free memory grown without the weights", grown,
                f"at least their {num_bytes} bytes", holds=grown >= num_bytes, unit="bytes",
            )  # fmt: skip
            left.append(with_weights.allocated)
    if left:
        grown = left[-1] - left[1]  # the first cycle makes Adam's moments
        report.claim("bytes left behind by two cycles", grown, "none", holds=grown == 0)


def speed(setting: Setting, report: Report) -> None:
    """10k tokens in one micro-batch, and 32k in four; no activation is computed again."""
    policy = setting.policy(setting.config(model={"recompute": "none"}))
    _measure(setting, report, policy, num_tokens=10240, num_microbatches=1, length=2048)
    _measure(setting, report, policy, num_tokens=32768, num_microbatches=4, length=4096)
    _count_waits(setting, report, policy)


def speed_recomputed(setting: Setting, report: Report) -> None:
    """32k tokens in one micro-batch; every layer is computed again, which does not count."""
    policy = setting.policy(setting.config(model={"recompute": "full"}))
    _measure(setting, report, policy, num_tokens=32768, num_microbatches=1, length=8192, mfu=0.3)


def _measure(
    setting: Setting,
    report: Report,
    policy: Policy,
    *,
    num_tokens: int,
    num_microbatches: int,
    length: int,
    mfu: float = 0.45,
) -> None:
    """Time of an update, MFU, and how long the device idles in a profiled one."""
    what = f"{num_tokens} tokens in {num_microbatches} micro-batches of sequences of {length}"
    length, each = setting.tokens(length), setting.tokens(num_tokens) // num_microbatches
    packed = [setting.rows_of(policy, num_tokens=each, length=length)] * num_microbatches
    try:
        for _ in range(2):  # compiles, plans, allocates
            norm = run_update(policy, packed)
        seconds = min(seconds_of(lambda: run_update(policy, packed)) for _ in range(3))
    except torch.OutOfMemoryError as error:
        report.claim(what, "out of memory", str(error).splitlines()[0], holds=False)
        return
    is_real = math.isfinite(norm) and norm > 0
    report.claim(f"{what}: gradient norm", norm, "finite, not 0", holds=is_real)
    fed = num_microbatches * packed[0].tokens.shape[1]
    forward = forward_flops(
        Shape.of(policy.hf_config),
        num_tokens=fed,
        mean_squared_length=float(length) ** 2,
        num_sequences=fed / length,
    )
    report.figure(f"{what}: seconds", seconds, "s")
    report.figure(f"{what}: tokens/s", fed / seconds, "tokens/s")
    rate = 3 * forward.total / seconds
    report.figure(f"{what}: model TFLOP/s", rate / 1e12, "TFLOP/s")
    peak = peak_flops(setting)
    if peak is None:
        report.figure(
            f"{what}: MFU", "not known: tools/planner/hardware.py does not list this device"
        )
    else:
        report.goal(what, rate / peak, "MFU", at_least=mfu)
    waits = count_waits(setting, lambda: run_update(policy, packed))
    report.figure(f"{what}: {SYNCHRONISATIONS}", sum(waits.values()))
    busy, wall, kernels = profile(setting, lambda: run_update(policy, packed))
    idle = "idle: share without a kernel between the first and the last of a profiled update"
    report.figure(f"{what}: {idle}", 1 - busy / max(wall, 1e-9))
    report.figure(f"{what}: most of the time", kernels)


def seconds_of(work: Callable[[], Any]) -> float:
    """Wall-clock seconds, the device's included."""
    _wait()
    start = time.perf_counter()
    work()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_flops(setting: Setting) -> float | None:
    """Of the GPU in the planner's table, by the name it calls itself; None if it is not there."""
    if not setting.is_cuda:
        return None
    names = torch.cuda.get_device_name().lower().replace("-", " ").split()
    if {"pcie", "nvl"} & set(names):  # of less power than the modules that the table has
        return None
    known = [gpu for name, gpu in GPUS.items() if name in names]
    return known[0].flops(setting.precision) if known else None


def profile(setting: Setting, work: Callable[[], Any]) -> tuple[float, float, str]:
    """Seconds that the device computed, seconds from first to last of it, and what took longest."""
    # The device alone: to record every operator of the host slows the host, and shows as idleness.
    activity = torch.profiler.ProfilerActivity
    kind = activity.CUDA if setting.is_cuda else activity.CPU
    with torch.profiler.profile(activities=[kind]) as found:
        work()
        _wait()
    of = DeviceType.CUDA if setting.is_cuda else DeviceType.CPU
    events = [
        event
        for event in found.events()
        # An annotation spans the gaps between what it annotates.
        if event.device_type == of and not event.is_user_annotation
    ]
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    by_name: collections.Counter[str] = collections.Counter()
    for event in events:
        by_name[event.name[:60]] += event.time_range.end - event.time_range.start
    longest = ", ".join(f"{name} {us / 1e3:.1f} ms" for name, us in by_name.most_common(8))
    busy, wall = covered(spans)
    return busy / 1e6, wall / 1e6, longest


def covered(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Length of the union of spans, and from their first start to their last end."""
    busy, first, last = 0.0, math.inf, -math.inf
    for start, end in sorted(spans):
        busy += max(end - max(start, last), 0)
        first, last = min(first, start), max(last, end)
    return busy, max(last - first, 0)


def _count_waits(setting: Setting, report: Report, policy: Policy) -> None:
    """Where the host waits for the device, by two and by four micro-batches."""
    length = setting.tokens(1024)
    packed = setting.rows_of(policy, num_tokens=length, length=length)
    found = [count_waits(setting, lambda n=n: run_update(policy, [packed] * n)) for n in (2, 4)]
    few, many = (sum(one.values()) for one in found)
    report.figure(f"update of 2 micro-batches: {SYNCHRONISATIONS}", few)
    each = (many - few) / 2
    report.claim("synchronisations per micro-batch", each, "none", holds=each == 0)
    for place, count in itertools.islice(found[1].most_common(), 12):
        report.figure(f"synchronisations at {place}", count)


def count_waits(setting: Setting, work: Callable[[], Any]) -> collections.Counter[str]:
    """Calls that made the host wait, by the line of Python that made them; see SYNCHRONISATIONS."""
    _wait()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if setting.is_cuda:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            if setting.is_cuda:
                torch.cuda.set_sync_debug_mode("default")
    places: collections.Counter[str] = collections.Counter()
    for one in said:
        if "synchronizing CUDA operation" in str(one.message):
            places["/".join(Path(one.filename).parts[-2:]) + f":{one.lineno}"] += 1
    return places


def save_and_load(setting: Setting, report: Report) -> None:
    """Save, move on, load: what was saved is back, bit for bit."""
    config = setting.config()
    policy = setting.policy(config)
    length = setting.tokens(1024)
    packed = [setting.rows_of(policy, num_tokens=length, length=length)]
    run_update(policy, packed)
    run_dir = setting.folder / "run"
    attempt = make_attempt(run_dir)
    source = {"epoch": 0, "remaining": [], "dataset": {"rows": "test-gpu"}}
    state = checkpoint.State(step=1, source=source)

    def save() -> None:
        checkpoint.save(run_dir, state, policy=policy, config=config, attempt=attempt)

    seconds = seconds_of(save)
    num_bytes = sum(path.stat().st_size for path in run_dir.rglob("*") if path.is_file())
    report.figure("size", num_bytes / 1e9, "GB")
    report.figure("save", seconds, "s")
    report.figure("save", num_bytes / 1e9 / seconds, "GB/s")
    saved = {name: weight.cpu().clone() for name, weight in policy.iterate_hf_weights()}
    first = run_update(policy, packed)
    seconds = seconds_of(lambda: checkpoint.load_latest(run_dir, policy=policy, config=config))
    report.figure("load, digests compared", seconds, "s")
    report.figure("load", num_bytes / 1e9 / seconds, "GB/s")
    differing = [
        name
        for name, weight in policy.iterate_hf_weights()
        if not torch.equal(weight.cpu(), saved[name])
    ]
    report.claim("weights that differ", differing, "none", holds=not differing)
    again = run_update(policy, packed)
    report.claim(
        "gradient norm of the next update", again, f"{first!r} to 1e-3",
        holds=abs(again - first) <= 1e-3 * first,
    )  # fmt: skip
    report.goal("it has the same bits", float(again == first), "", at_least=1)
