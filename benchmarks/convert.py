"""Speed and memory of both conversion tools against `cp` of the same files on the same disk.

A model of random weights in bfloat16, the shapes of Qwen2.5-1.5B with as many layers as it takes,
is written to --dir once. Then, in turns: `cp` of the folder that a tool reads, and the tool, in a
process of its own, with and without its gate. Both sides end when every byte is on disk (fsync).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tools")]  # from a checkout, installed or not

GUIDE = """\
examples:
  python benchmarks/convert.py --dir /data/convert
  python benchmarks/convert.py --dir /data/convert --gigabytes 0.3 --repeats 1   # does it work?

columns:
  s         from start to exit of the process; median of --repeats, and the range
  start-up  of it, what a process takes to import torch and transformers, and to exit
  GB/s      weights over the seconds without start-up
  of cp     the same as a share of cp's GB/s; "all": start-up included
  peak MiB  largest resident set, and how much more that is than after the imports

Before each measurement what is to be read is dropped from the page cache (--warm: read into it),
older output is deleted and the disk is left to write what it still has to. --dir needs space for
three times --gigabytes. With the gate, models that fit into memory compute logits on both sides.
"""
HIDDEN, INTERMEDIATE, KV = 1536, 8960, 256
MOST_VOCAB = 151936


@dataclass(frozen=True)
class Operation:
    """Something that is measured.

    Attributes:
        source: folder it reads, in --dir.
        tool: module of the tool and its option for source and output; None: cp.
        verify: of the tool.
    """

    name: str
    source: str
    tool: tuple[str, str, str] | None = None
    verify: str = ""


TO_MEGATRON = ("convert_hf_to_megatron", "--hf", "--megatron")
TO_HF = ("convert_megatron_to_hf", "--megatron", "--hf")
OPERATIONS = [
    Operation("cp", "hf"),
    Operation("HF to Megatron, --verify none", "hf", TO_MEGATRON, "none"),
    Operation("HF to Megatron", "hf", TO_MEGATRON, "sample"),
    Operation("cp", "megatron"),
    Operation("Megatron to HF, --verify none", "megatron", TO_HF, "none"),
    Operation("Megatron to HF", "megatron", TO_HF, "sample"),
]


@dataclass(frozen=True)
class Sample:
    """One measurement."""

    seconds: float
    work_seconds: float
    """Without starting the process up and ending it."""
    peak_bytes: int = 0
    startup_peak_bytes: int = 0


def main() -> None:
    """Write the model if it is not there, measure in turns, print the table."""
    arguments = parse_arguments()
    if arguments.child:
        run_tool(*json.loads(arguments.child))
        return
    root: Path = arguments.dir
    num_bytes = prepare(root, int(arguments.gigabytes * 1e9))
    samples: dict[Operation, list[Sample]] = {operation: [] for operation in OPERATIONS}
    for repeat in range(arguments.repeats):
        for operation in OPERATIONS:
            sample = measure(operation, root, warm=arguments.warm)
            samples[operation].append(sample)
            print(f"{repeat + 1}: {operation.name} ({operation.source}): {sample}", flush=True)
    shutil.rmtree(root / "output")
    print_table(samples, num_bytes)


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=GUIDE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path("runs/convert"), help="%(default)s")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of weights: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="%(default)s")
    parser.add_argument(
        "--warm", action="store_true", help="sources are in the page cache, not on disk alone"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.gigabytes < 0.2:
        parser.error("--gigabytes must be 0.2 or more: a layer has 0.09")
    return arguments


# --- the model -----------------------------------------------------------------------------------


def prepare(root: Path, wanted_bytes: int) -> int:
    """Make --dir/hf and --dir/megatron, unless they are there; bytes of the weights."""
    hf, megatron = root / "hf", root / "megatron"
    if not hf.exists():
        write_model(hf, wanted_bytes)
    num_bytes = sum(path.stat().st_size for path in weight_files(hf))
    if abs(num_bytes - wanted_bytes) > 0.1 * wanted_bytes:
        raise SystemExit(f"{hf} has {num_bytes / 1e9:.2f} GB of weights: delete {root} first")
    if not megatron.exists():
        subprocess.run(
            command(Operation("", "hf", TO_MEGATRON, "none"), root, megatron), check=True
        )
    if (free := shutil.disk_usage(root).free) < 1.1 * num_bytes:
        raise SystemExit(f"{root} has {free / 1e9:.1f} GB free: too little for one more copy")
    return num_bytes


def write_model(folder: Path, num_bytes: int) -> None:
    """Write random weights: about a quarter in embedding and output layer, the rest in layers."""
    import torch
    from transformers import Qwen2Config

    from gapo_megatron.hf.folder import new_folder
    from gapo_megatron.hf.weights import write_hf_weights
    from gapo_megatron.models.rules import Place, Rule
    from gapo_megatron.models.tables import rules_for

    layer_bytes = 2 * HIDDEN * (2 * HIDDEN + 2 * KV + 3 * INTERMEDIATE)
    num_layers = 3 * num_bytes // 4 // layer_bytes
    vocab = min(MOST_VOCAB, (num_bytes - num_layers * layer_bytes) // (2 * 2 * HIDDEN))
    config = Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=num_layers,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    rules = rules_for(config)

    def read(rule: Rule, _: Place) -> torch.Tensor:
        return torch.empty(rule.full_shape, dtype=torch.bfloat16).normal_(std=0.02)

    with new_folder(folder, num_bytes=num_bytes) as temporary:
        config.save_pretrained(temporary)
        dtypes = {rule.megatron: torch.bfloat16 for rule in rules}
        limit = max(num_bytes // 4, 2 * vocab * HIDDEN)
        write_hf_weights(read, rules, dtypes=dtypes, output_dir=temporary, max_shard_bytes=limit)


def weight_files(folder: Path) -> list[Path]:
    """Files that hold the weights, in either format."""
    return [p for p in folder.rglob("*") if p.suffix in (".safetensors", ".distcp")]


# --- measuring -----------------------------------------------------------------------------------


def measure(operation: Operation, root: Path, *, warm: bool) -> Sample:
    """Run an operation once, from a known state of disk and page cache."""
    source, output = root / operation.source, root / "output"
    shutil.rmtree(output, ignore_errors=True)
    subprocess.run(["sync", "-f", root], check=True)
    for path in weight_files(source):
        set_cached(path, warm=warm)
    start = time.perf_counter()
    if operation.tool is None:
        subprocess.run(["cp", "-r", source, output], check=True)
        subprocess.run(["sync", *files_of(output)], check=True)
        seconds = time.perf_counter() - start
        return Sample(seconds, work_seconds=seconds)
    done = subprocess.run(command(operation, root, output), capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{operation.name} failed:\n{done.stdout}\n{done.stderr}")
    return Sample(seconds, **json.loads(done.stdout.splitlines()[-1]))


def files_of(folder: Path) -> Iterator[Path]:
    """Every file and folder, for cp has to make the names last, too."""
    yield folder
    yield from folder.rglob("*")


def set_cached(path: Path, *, warm: bool) -> None:
    """Have all or nothing of a file in the page cache."""
    with open(path, "rb", buffering=0) as file:
        if warm:
            while file.read(2**24):
                pass
        else:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def command(operation: Operation, root: Path, output: Path) -> list[str]:
    """This script as the process that runs a tool."""
    assert operation.tool is not None
    module, source_option, output_option = operation.tool
    folders = [source_option, str(root / operation.source), output_option, str(output)]
    task = [module, *folders, "--verify", operation.verify]
    return [sys.executable, __file__, "--child", json.dumps(task)]


def run_tool(module: str, *command_line: str) -> None:
    """Call a tool's `main`; print the seconds it took and the peaks of memory as JSON."""
    importlib.import_module("gapo_megatron.ops.convert.directions")
    importlib.import_module("transformers").AutoConfig.for_model("qwen2")  # imports some more
    main = importlib.import_module(module).main
    startup_peak, start = peak_bytes(), time.perf_counter()
    if code := main(command_line):
        sys.exit(code)
    seconds = time.perf_counter() - start
    found = {
        "work_seconds": seconds,
        "peak_bytes": peak_bytes(),
        "startup_peak_bytes": startup_peak,
    }
    print(json.dumps(found))


def peak_bytes() -> int:
    """Largest resident set of this process; `ru_maxrss` would begin with the parent's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/self/status has no VmHWM")


def print_table(samples: dict[Operation, list[Sample]], num_bytes: int) -> None:
    """Print markdown."""
    print(f"\n{num_bytes / 1e9:.2f} GB\n")
    print("| what | s | start-up, s | GB/s | of cp | of cp, all | peak MiB (after start-up) |")
    print("|---|---|---|---|---|---|---|")
    cp_seconds = 0.0
    for operation, of in samples.items():
        seconds = [sample.seconds for sample in of]
        work = statistics.median(sample.work_seconds for sample in of)
        all_of_it = statistics.median(seconds)
        cells = [f"{all_of_it:.1f} ({min(seconds):.1f} to {max(seconds):.1f})"]
        if operation.tool is None:
            cp_seconds = work
            cells += ["", f"{num_bytes / 1e9 / work:.2f}", "", "", ""]
        else:
            peak = max(sample.peak_bytes for sample in of)
            added = max(sample.peak_bytes - sample.startup_peak_bytes for sample in of)
            cells += [
                f"{statistics.median(sample.seconds - sample.work_seconds for sample in of):.1f}",
                f"{num_bytes / 1e9 / work:.2f}",
                f"{cp_seconds / work:.0%}",
                f"{cp_seconds / all_of_it:.0%}",
                f"{peak / 2**20:.0f} ({added / 2**20:.0f})",
            ]
        name = f"cp of the {operation.source} folder" if operation.tool is None else operation.name
        print(f"| {' | '.join([name, *cells])} |")


if __name__ == "__main__":
    main()
