"""Check whether this machine can train, and say what is missing.

Checks the program (commit, package versions against requirements/), the libraries with kernels (do
they load?), the kernels that training uses here (updates a tiny model once), the machine (CPUs,
memory, disk, GPUs), Slurm (client, cluster, settings that affect a run) and, if one is given, a
config (model, data, world size). It changes nothing, and needs only Python 3.11 or newer. Attach
its output to bug reports; docs/debugging.md explains it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from gapo_tools.diagnosis.examine import examine
from gapo_tools.diagnosis.finding import Finding

EXAMPLES = """\
on a login node:     .venv/bin/python tools/doctor.py
before a first run:  .venv/bin/python tools/doctor.py configs/ds_r1_1_5b/gapo.toml
on a compute node:   srun -N1 -n1 --gpus-per-node=8 .venv/bin/python tools/doctor.py
before each start:   PREPARE="tools/doctor.py CONFIG.toml" sbatch slurm/gapo_ds_r1.sbatch

ok: fine. warn: works, or is not needed on this machine; read the advice. fail: training cannot run.
Exit codes: 0 no check failed; 1 a check failed; 2 usage.
"""


def main(command_line: Sequence[str] | None = None) -> int:
    """Print the report. Returns 0: no check failed; 1: a check failed; 2: usage."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", help="also check this TOML file; see configs/")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    arguments = parser.parse_args(command_line)
    findings = list(examine(arguments.config, os.environ))
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        _print(findings)
    return int(any(finding.status == "fail" for finding in findings))


def _print(findings: Sequence[Finding]) -> None:
    for section, members in itertools.groupby(findings, key=lambda one: one.section):
        print(f"\n{section}")
        for one in members:
            print(f"{one.status:4}  {one.name:16}  {one.detail}")
            if one.advice:
                print(f"{'':22}  -> {one.advice}")
    warned, failed = (sum(f.status == status for f in findings) for status in ("warn", "fail"))
    print(f"\n{len(findings)} checks: {failed} failed, {warned} warned")


if __name__ == "__main__":
    sys.exit(main())
