"""Predict which layouts of a config fit on N nodes, and how long a step takes in each.

CONFIG is the config of the run; section.key=value overrides a setting. Needs no GPU, and only
config.json of the model. Takes seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from gapo_tools.arguments import positive
from gapo_tools.planner.hardware import CPU, CPU_NAME, GPUS, find_gpu

_PLAN = """\
layouts, memory and times on one node of H200:
  .venv/bin/python tools/plan.py configs/qwen_math_1_5b/gapo.toml --nodes 1 --gpu h200
with known lengths, and another model:
  .venv/bin/python tools/plan.py CONFIG model.hf_dir=models/Qwen2.5-32B --nodes 4 \\
    --mean-prompt-tokens 150 --mean-response-tokens 900 --active-share 0.6
with generation nodes that run one step ahead of training:
  .venv/bin/python tools/plan.py CONFIG --nodes 6 --gpu h200 \\
    rollout.generation_nodes=3 rollout.max_staleness=1

.venv/bin/python tools/plan.py measure --help     throughput and MFU of finished runs

Times rest on assumed efficiencies (tools/planner/hardware.py); docs/scaling.md explains
the model. Exit codes: 0 done; 1 nothing fits, or wrong input; 2 usage.
"""
_MEASURE = """\
all runs of a scaling study; figures go to runs/studies/scaling_qwen/scaling:
  .venv/bin/python tools/plan.py measure runs/studies/scaling_qwen --gpu h200 \\
    --mean-prompt-tokens 150
only two of its runs:
  .venv/bin/python tools/plan.py measure --gpu h200 --output two_runs \\
    runs/studies/scaling_qwen/nodes_1 runs/studies/scaling_qwen/nodes_8
"""


def main(command_line: Sequence[str] | None = None) -> int:
    """Plan or measure. Returns 0: done; 1: nothing fits, or wrong input; 2: usage."""
    arguments = _parse(command_line)
    from gapo_megatron.errors import GapoError

    console = Console(markup=False)
    if not (console.is_terminal or "COLUMNS" in os.environ):
        console.width = 180
    try:
        exit_code: int = arguments.act(arguments, console)
        return exit_code
    except GapoError as error:
        Console(stderr=True, markup=False).print(f"error: {error}", highlight=False, soft_wrap=True)
        return 1


def _plan(arguments: argparse.Namespace, console: Console) -> int:
    from gapo_megatron.config import load_config
    from gapo_tools.planner.plans import plan, read_model
    from gapo_tools.planner.tables import print_plan
    from gapo_tools.planner.workload import default_workload

    config = load_config(arguments.config, arguments.overrides)
    hf_config, note = read_model(config)
    gpu = find_gpu(arguments.gpu)
    if arguments.gpus_per_node:
        gpu = dataclasses.replace(gpu, gpus_per_node=arguments.gpus_per_node)
    workload = default_workload(
        config,
        mean_prompt_tokens=arguments.mean_prompt_tokens,
        mean_response_tokens=arguments.mean_response_tokens,
        active_share=arguments.active_share,
    )
    result = plan(hf_config, config, num_nodes=arguments.nodes, gpu=gpu, workload=workload)
    if note:
        console.print(note, highlight=False, soft_wrap=True)
    print_plan(console, result, config, workload)
    return 0 if result.ranked else 1


def _measure(arguments: argparse.Namespace, console: Console) -> int:
    from gapo_tools.planner.tables import print_whole
    from gapo_tools.reporting.scaling import (
        read_runs,
        scaling_rows,
        scaling_tables,
        write_scaling,
    )

    folder = arguments.output or arguments.runs[0] / "scaling"
    gpu = CPU if arguments.gpu == CPU_NAME else find_gpu(arguments.gpu)
    found, left_out = read_runs(arguments.runs, mean_prompt_tokens=arguments.mean_prompt_tokens)
    rows = scaling_rows(found, gpu=gpu)
    paths = write_scaling(found, rows, gpu=gpu, folder=folder)
    for table in scaling_tables(rows, gpu=gpu):
        print_whole(console, table)
    for line in left_out:
        console.print(line, highlight=False, soft_wrap=True)
    console.print("Figure and data:", *paths, sep="\n  ", highlight=False, soft_wrap=True)
    return 0


def _parse(command_line: Sequence[str] | None) -> argparse.Namespace:
    words = list(sys.argv[1:] if command_line is None else command_line)
    if words[:1] == ["measure"]:
        parser = _measure_parser()
        arguments = parser.parse_intermixed_args(words[1:])
        if len(arguments.runs) > 1 and not arguments.output:
            parser.error("several RUNs need --output DIR for the figures")
        return arguments
    parser = _plan_parser()
    arguments = parser.parse_intermixed_args(words[1:] if words[:1] == ["plan"] else words)
    if "=" in arguments.config:
        parser.error(f"CONFIG comes first, before {arguments.config}")
    return arguments


def _parser(name: str, description: str, examples: str, **defaults: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"tools/plan.py {name}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(**defaults)
    return parser


def _plan_parser() -> argparse.ArgumentParser:
    parser = _parser("[plan]", str(__doc__), _PLAN, act=_plan)
    add = parser.add_argument
    add("config", metavar="CONFIG", help="TOML file; see configs/")
    add("overrides", nargs="*", metavar="section.key=value", help="override a setting of the file")
    add("--nodes", type=positive, default=1, metavar="N", help="number of full nodes (default: 1)")
    add("--gpu", default="h200", help=f"{', '.join(GPUS)} (default: h200)")
    add("--gpus-per-node", type=positive, metavar="N", help="default: 8")
    for option, metavar, shown in (
        ("--mean-prompt-tokens", "N", "default: 1/10 of data.max_prompt_tokens"),
        ("--mean-response-tokens", "N", "default: 1/3 of rollout.max_response_tokens"),
        ("--active-share", "SHARE", "share of sequences with A != 0 (default: 0.67)"),
    ):
        add(option, type=float, metavar=metavar, help=shown)
    return parser


def _measure_parser() -> argparse.ArgumentParser:
    description = "Throughput, MFU and scaling efficiency of finished runs, in tables and figures."
    parser = _parser("measure", description, _MEASURE, act=_measure)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or of several runs")
    add("--gpu", required=True, help=f"the device of the runs: {', '.join(GPUS)} or cpu")
    shown = "folder for the figures (default: RUN/scaling; required for several RUNs)"
    add("--output", type=Path, metavar="DIR", help=shown)
    add("--mean-prompt-tokens", type=float, metavar="N", help="needed for MFU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
