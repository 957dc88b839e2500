"""The head operator against its peers: time, extra memory and error as sequences become inactive.

hidden [T, H] and weight [V, H] -> log-prob of each token -> D of each sequence -> clipped GSPO loss
-> gradients of hidden and weight; the same tensors and the same coefficients for everyone.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from head_problem import (
    Batch,
    Problem,
    exact_log_probs,
    gradient_errors,
    gspo_loss,
    make_batch,
    make_problem,
    other_bits,
    sequences_of,
)
from head_providers import PROVIDERS, Head, load_head

GUIDE = """\
First the peers, into a folder of their own (pins: benchmarks/peers.txt), then the benchmark:

  python -m pip install --no-deps -r benchmarks/peers.txt --target /tmp/peers
  PYTHONPATH=/tmp/peers python benchmarks/head.py --shapes 512x1536x32768

Every provider first runs in a process of its own: its errors against float64, and the memory it
takes beyond inputs and outputs. What cannot run here is listed with the reason. The rest are then
timed in this process, in turns. A share f of the sequences is active, that is, their loss has a
gradient; they are picked such that they hold about that share of the tokens. The others are

  clipped    only D tells, so all rows go in and the backward pass alone can save work
  compacted  A = 0 is known before: the caller passes on the active rows alone, to every provider

Exact means: largest error of D at most 1e-6 for float32 inputs, 1e-5 for bfloat16. Those that are
not have a "~". Other bits: share of rows whose log-prob has other bits in another packing.
Samples go to --output as JSON lines while they come.

providers:
  ours               token_log_probs; dweight fresh, in the weight's dtype, as of all others
  ours-torch         the same operator, its inner code in torch
  ours-main-grad     the same, dweight added to a float32 buffer (Megatron-core's main_grad)
  naive              all logits, products of float32 factors
  naive-rounded      all logits, in the inputs' dtype, then a float32 softmax
  torch              F.linear_cross_entropy in chunks, default options
  torch-large-chunk  the same, 4096 rows a chunk
  liger              fused linear scaled cross entropy (CuTe on Hopper, else torch)
  liger-tp           its tensor-parallel kernels (liger-cute-kernels), on a group of one rank
  liger-grpo         fused linear GRPO loss, importance_sampling_level="sequence"
  cce, cce-filter    cut cross entropy without and with its filter; torch.compile on a CPU
  verl, verl-triton  FusedLinearForPPO; linear_cross_entropy
"""
HEADS = ("1536x151936", "3072x128256", "3584x152064", "8192x152064")
SHAPES = {
    "cpu": ["512x1536x32768", "2048x1536x151936"],
    "cuda": [f"{tokens}x{head}" for head in HEADS for tokens in (16384, 32768, 65536)],
}
EXACT = {"float32": 1e-6, "bfloat16": 1e-5}
GSPO_CLIP = 3e-4
LIGER = ("liger-kernel", "liger-cute-kernels", "nvidia-cutlass-dsl")
NO_COMPUTATION = {
    f"aten::{name}"
    for name in ("alias", "as_strided", "detach", "empty", "empty_strided", "resize_", "view")
}
"""Operators that launch no kernel on a GPU: views and allocations."""


def main() -> None:
    """Measure, and print a line for each provider and point."""
    arguments = parse_arguments()
    if arguments.child:
        task = json.loads(arguments.child)
        torch.set_num_threads(task["threads"])
        print(json.dumps(check_alone(task)))
        return
    output: Path = arguments.output
    output.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    with output.open("w") as lines:
        write(lines, environment(arguments))
        for shape in arguments.shapes:
            for dtype in arguments.dtype:
                measure(arguments, shape, dtype, lines)
    print(f"samples: {output}")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line; some defaults depend on the device."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=GUIDE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=found, help="%(default)s")
    parser.add_argument("--shapes", nargs="+", metavar="TxHxV", help=f"here: {SHAPES[found]}")
    parser.add_argument("--dtype", nargs="+", choices=EXACT, help="both; on a GPU bfloat16")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=PROVIDERS, help="all")
    shares = [1, 0.75, 0.5, 0.25, 0]
    parser.add_argument(
        "--active", nargs="+", type=float, metavar="F", default=shares, help=f"{shares}; 1 always"
    )
    parser.add_argument("--clipped-only", action="store_true", help="leave out compacted")
    parser.add_argument(
        "--data", choices=["peaked", "random"], default="peaked", help="%(default)s"
    )
    parser.add_argument("--repeats", type=int, help="samples of each; 5 on a CPU, 30 on a GPU")
    parser.add_argument(
        "--patience-s",
        type=float,
        default=60,
        help="a provider that has taken this long at one f is not sampled again there: %(default)s",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="on a CPU: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("runs/head.jsonl"), help="%(default)s")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cuda = arguments.device == "cuda"
    arguments.shapes = arguments.shapes or SHAPES[arguments.device]
    arguments.dtype = arguments.dtype or (["bfloat16"] if cuda else list(EXACT))
    arguments.active = sorted({1, *arguments.active}, reverse=True)
    arguments.repeats = arguments.repeats or (30 if cuda else 5)
    return arguments


def measure(arguments: argparse.Namespace, shape: str, dtype: str, lines: TextIO) -> None:
    """Measure all providers at one shape and dtype: each alone, then every f in turns."""
    key = {"shape": shape, "dtype": dtype, "data": arguments.data, "device": arguments.device}
    # With A = 0 known and all or no sequence active, compacting changes or leaves nothing.
    points = [("clipped", f) for f in arguments.active]
    if not arguments.clipped_only:
        points += [("compacted", f) for f in arguments.active if 0 < f < 1]
    problem = make_problem(*key.values())
    exact, log_sum = exact_log_probs(problem)
    heads: dict[str, Head] = {}
    with tempfile.TemporaryDirectory() as folder:
        task = key | {"threads": arguments.threads, "exact": f"{folder}/exact.pt"}
        torch.save((exact, log_sum), task["exact"])
        for name in arguments.providers:
            found = run_alone(task | {"provider": name})
            write(lines, {"kind": "alone", "provider": name} | key | found)
            if "failed" in found:
                said = f"not run: {found['failed']}"
            else:
                heads[name] = load_head(name, problem)
                said = f"D error {found['d_error_max']:.1e}, other bits {found['other_bits']:.1%}"
                said += f", dhidden error {found['dhidden_error']:.1e}"
                said += f", dweight error {found['dweight_error']:.1e}"
                said += f", {found['extra_bytes'] >> 20} MiB ({found['note']})"
            mark = "" if found.get("exact", True) else "~ "
            print(f"{shape} {dtype} {mark}{name}: {said}", flush=True)
    batch = make_batch(problem, exact, 1.0, "clipped")
    for name in list(heads):
        try:
            for _ in range(5 if arguments.device == "cuda" else 1):
                sample(heads[name], problem, batch, arguments.device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            write_failed(lines, name, key, error)
            del heads[name]
    for mode, f in points:
        batch = make_batch(problem, exact, f, mode)
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in heads}
        for _ in range(arguments.repeats):
            for name in list(heads):
                if sum(map(sum, samples[name])) >= arguments.patience_s:
                    continue
                try:
                    samples[name].append(sample(heads[name], problem, batch, arguments.device))
                except RuntimeError as error:
                    write_failed(lines, name, key, error)
                    del heads[name], samples[name]
        for name, pairs in samples.items():
            forward_s, backward_s = zip(*pairs, strict=True)
            timed = {"forward_s": forward_s, "backward_s": backward_s}
            point = {"kind": "time", "provider": name, "mode": mode, "active": f}
            share = {"active_tokens": batch.num_active_tokens / len(problem.labels)}
            write(lines, point | share | key | timed)
        medians = (f"{n} {statistics.median(map(sum, p)):.3g}" for n, p in samples.items())
        print(f"{shape} {dtype} {mode} f={f:g}, seconds:", ", ".join(medians), flush=True)


def run_alone(task: dict[str, Any]) -> dict[str, Any]:
    """Run `check_alone` in a new process; returns its result, or {"failed": its last line}."""
    command = [sys.executable, __file__, "--child", json.dumps(task)]
    threads = {"OMP_NUM_THREADS": str(task["threads"])}
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | threads, check=False
    )
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    said = [line for line in done.stderr.splitlines() if line.strip()]
    killed = f"killed by signal {-done.returncode}" if done.returncode < 0 else "no message"
    return {"failed": killed if done.returncode < 0 or not said else said[-1]}


def environment(arguments: argparse.Namespace) -> dict[str, Any]:
    """Machine, versions and command."""
    versions: dict[str, str | None] = {}
    for package in ("torch", "triton", "cut-cross-entropy", "verl", *LIGER):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    if arguments.device == "cuda":
        machine = torch.cuda.get_device_name()
    else:
        machine = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        machine += f", {arguments.threads} threads"
    return {"kind": "run", "machine": machine, "versions": versions, "command": sys.argv}


def write(lines: TextIO, record: dict[str, Any]) -> None:
    """Write one JSON line and flush it."""
    lines.write(json.dumps(record) + "\n")
    lines.flush()


def write_failed(lines: TextIO, name: str, key: dict[str, Any], error: RuntimeError) -> None:
    """Record a provider that fails among the others; the rest continue."""
    said = (str(error).splitlines() or [type(error).__name__])[0][:300]
    write(lines, {"kind": "alone", "provider": name, "failed": said} | key)


def forward(head: Head, problem: Problem, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Loss, and log-probs if the provider returns them."""
    hidden = problem.hidden if batch.rows is None else problem.hidden[batch.rows]
    if head.loss is not None:
        return head.loss(hidden, problem.weight, batch), None
    log_probs = head.log_probs(hidden, problem.weight, batch.labels)
    return gspo_loss(log_probs, batch), log_probs.detach()


def seconds(device: str, step: Callable[[], Any]) -> tuple[float, Any]:
    """Time of a step and its result; CUDA events on a GPU."""
    if device == "cpu":
        start = time.perf_counter()
        result = step()
        return time.perf_counter() - start, result
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    result = step()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / 1e3, result


def sample(head: Head, problem: Problem, batch: Batch, device: str) -> tuple[float, float]:
    """Seconds of one forward and one backward pass, from a cold L2 cache on a GPU."""
    problem.hidden.grad = problem.weight.grad = None
    if device == "cuda":
        torch.empty(2**28, dtype=torch.uint8, device=device).zero_()
    forward_s, (loss, _) = seconds(device, lambda: forward(head, problem, batch))
    backward_s, _ = seconds(device, loss.backward)
    return forward_s, backward_s


def peak_bytes(device: str, *, reset: bool = False) -> int:
    """Peak resident set (on a GPU: allocated memory) since the last reset."""
    if device == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if reset:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def count_launches(head: Head, problem: Problem, batch: Batch, device: str) -> int:
    """Kernels of one forward and backward pass; on a CPU operators that compute and call none."""
    on_gpu = device == "cuda"
    kind = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiler:
        sample(head, problem, batch, device)
    events = profiler.events() or []
    if on_gpu:
        return sum(event.device_type == DeviceType.CUDA for event in events)
    leaves = [event.name for event in events if not event.cpu_children]
    return sum(name.startswith("aten::") and name not in NO_COMPUTATION for name in leaves)


def check_alone(task: dict[str, Any]) -> dict[str, Any]:
    """Errors and extra memory of one provider at f = 1, in this process of its own."""
    device, settings = task["device"], (task["dtype"], task["data"], task["device"])
    tiny = make_problem("64x128x512", *settings)
    tiny_batch = make_batch(tiny, exact_log_probs(tiny)[0], 1.0, "clipped")
    sample(load_head(task["provider"], tiny), tiny, tiny_batch, device)  # libraries, compilers
    problem = make_problem(task["shape"], *settings)
    exact, log_sum = torch.load(task["exact"], map_location=device)
    batch = make_batch(problem, exact, 1.0, "clipped")
    head = load_head(task["provider"], problem)
    before = peak_bytes(device, reset=True)
    loss, log_probs = forward(head, problem, batch)
    loss.backward()
    peak = peak_bytes(device) - before
    gradients = (problem.hidden.grad, problem.weight.grad)
    peak -= sum(t.nbytes for t in gradients if t is not None)
    if log_probs is None:
        with torch.no_grad():
            log_probs = head.log_probs(problem.hidden, problem.weight, batch.labels)
    error = sequences_of(batch).log_ratio(log_probs, exact).abs()
    total = head.main_grad if head.main_grad is not None else problem.weight.grad
    gradient_error = gradient_errors(problem, total, batch, exact, log_sum)
    return {
        "note": head.note,
        "extra_bytes": peak,
        "d_error_rms": float(error.square().mean().sqrt()),
        "d_error_max": float(error.max()),
        "beyond_gspo_clip": float((error > GSPO_CLIP).double().mean()),
        "exact": float(error.max()) <= EXACT[task["dtype"]],
        "other_bits": other_bits(head.log_probs, problem),
        "launches": count_launches(head, problem, batch, device),
    } | gradient_error


if __name__ == "__main__":
    main()
