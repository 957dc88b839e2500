"""Count the machine instructions of the log-prob head's Triton kernels; needs no GPU.

    python benchmarks/head_instructions.py                 (half a minute)

Compiles the kernels for compute capability 9.0 and disassembles them with the tools of Triton's
wheel. Counts are of instructions that each warp issues, for a tile of 128 rows and 256 columns:

- step: in the loop through H, per step of 64 elements;
- tile: beside those steps, for all 128 numbers of a thread. "Least" takes every branch past
  instructions: a whole tile without a label, all of whose rows have a gradient, at temperature 1.
  "Most" takes none. The columns after them divide "least" by kind.

How long a GPU takes for them, and what overlaps, is not measured here.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from tests.triton_setup import compile_for_hopper

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
KINDS = {
    "exp": {"MUFU"},
    "float": {"FADD", "FMUL", "FFMA"},
    "select": {"FSEL", "FMNMX", "FSETP", "ISETP", "PLOP3", "SEL", "P2R", "R2P"},
    "convert": {"F2F", "F2FP", "HADD2", "PRMT", "SHF", "SHL"},
    "shared": {"LDS", "STS", "STSM", "SHFL", "REDUX"},
    "barrier": {"BAR", "SYNCS", "DEPBAR", "FENCE"},
    "memory": {"UTMALDG", "UTMASTG", "LDG", "STG"},
    "matrix": {"HGMMA", "WARPGROUP"},
}
"""Opcodes by kind; the others are "other": integers, addresses, moves."""


class Instruction(NamedTuple):
    address: int
    is_predicated: bool
    opcode: str
    target: int | None
    """Address that a branch goes to."""


class Count(NamedTuple):
    """A kernel's instructions by opcode: per step, and per tile beside the steps."""

    step: Counter[str]
    least: Counter[str]
    most: Counter[str]


def disassemble(compiled: Any) -> list[Instruction]:
    """Instructions of a compiled kernel, by address."""
    line = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ +)?([A-Z]\w*)([^;]*);")
    found = []
    for address, predicate, opcode, operands in line.findall(_cuobjdump(compiled, "-sass")):
        jump = re.search(r"0x([0-9a-f]+)", operands) if opcode == "BRA" else None
        target = None if jump is None else int(jump[1], 16)
        found.append(Instruction(int(address, 16), bool(predicate), opcode, target))
    return found


def usage(compiled: Any) -> dict[str, int]:
    """Resources of a compiled kernel: REG (of a thread), STACK, SHARED (static), LOCAL."""
    numbers = re.findall(r"\b([A-Z]+):(\d+)", _cuobjdump(compiled, "-res-usage"))
    return {name: int(number) for name, number in numbers}


def count(instructions: list[Instruction]) -> Count:
    """Count what a warp issues for one tile.

    The loop through H is the shortest with matrix instructions. A tile is one pass of the loop
    around it or, where there is none, the program.

    Raises:
        ValueError: a jump within a tile that is not past a few instructions.
    """
    # Waiting loops lie behind the last exit.
    end = max(i.address for i in instructions if i.opcode == "EXIT" and not i.is_predicated)
    program = [i for i in instructions if i.address <= end]
    loops = []
    for i in program:
        if i.target is not None and i.target < i.address:
            body = [j for j in program if i.target <= j.address <= i.address]
            if any(j.opcode == "HGMMA" for j in body):
                loops.append(body)
    loops.sort(key=len)
    step = loops[0]
    tile = [i for i in (loops[1] if len(loops) > 1 else program) if i not in step]

    skipped = set()
    for i in tile:
        if i.target is None or not i.address < i.target <= tile[-1].address:
            continue
        past = [j for j in tile if i.address < j.address < i.target]
        if not i.is_predicated or i.address < step[0].address <= i.target:
            raise ValueError(f"a jump from {i.address:#x} to {i.target:#x} is not past a branch")
        skipped.update(past)
    return Count(*(Counter(i.opcode for i in part) for part in (step, set(tile) - skipped, tile)))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16")
    dtype = parser.parse_args().dtype
    header = ["kernel", "registers", "spilled", "shared, B", "step", "tile: least", "most", *KINDS]
    print(f"{dtype}, Triton {triton.__version__}\n")
    print("| " + " | ".join([*header, "other"]) + " |")
    print("|---" * (len(header) + 1) + "|")
    for name in ("_stats_kernel", "_grad_kernel"):
        for with_entropy in (False, True):
            compiled = compile_for_hopper(name, dtype, with_entropy=with_entropy)
            step, least, most = count(disassemble(compiled))
            kinds = [sum(least[opcode] for opcode in opcodes) for opcodes in KINDS.values()]
            used = usage(compiled)
            cells = [
                name.strip("_").removesuffix("_kernel") + (", entropy" if with_entropy else ""),
                used["REG"],
                used["STACK"] + used["LOCAL"],
                compiled.metadata.shared,
                *(part.total() for part in (step, least, most)),
                *kinds,
                least.total() - sum(kinds),
            ]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def _cuobjdump(compiled: Any, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
