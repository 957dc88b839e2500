"""Predict which layouts of a config fit on N nodes, and how long a step takes in each.

CONFIG is the config of the run; section.key=value overrides a setting. Needs no GPU, and only
config.json of the model. Takes seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from gapo_megatron.ops.plan.hardware import GPUS

if TYPE_CHECKING:
    from gapo_megatron.ops.plan.calibration import Calibration
    from gapo_megatron.ops.plan.observation import Observation

_PLAN = """\
layouts, memory and times on one node of H200:
  .venv/bin/python tools/plan.py configs/qwen_math_1_5b/gapo.toml --nodes 1 --gpu h200
with known lengths, and another model:
  .venv/bin/python tools/plan.py CONFIG model.hf_dir=models/Qwen2.5-32B --nodes 4 \\
    --mean-prompt-tokens 150 --mean-response-tokens 900 --active-share 0.6
write the quickest layout as a config to train with:
  .venv/bin/python tools/plan.py configs/qwen2_5_32b/base.toml \\
    batch.max_tokens_per_microbatch=10240 --nodes 2 --gpu h200 \\
    --write configs/qwen2_5_32b/two_nodes.toml
with generation nodes that run one step ahead of training:
  .venv/bin/python tools/plan.py CONFIG --nodes 6 --gpu h200 --max-staleness 1
with measured efficiencies:
  .venv/bin/python tools/plan.py CONFIG --nodes 4 --gpu h200 --calibration h200.toml

.venv/bin/python tools/plan.py calibrate --help   measure the efficiencies behind the times
.venv/bin/python tools/plan.py measure --help     compare finished runs with the predictions

Without --calibration, times rest on assumed efficiencies (gapo_megatron/ops/plan/hardware.py);
docs/scaling.md explains the model. Exit codes: 0 done; 1 nothing fits, or wrong input; 2 usage.
"""
_CALIBRATE = """\
measure this machine at two sizes, and test the fit at a third:
  .venv/bin/python tools/plan.py calibrate configs/demo.toml --gpu cpu --calibration cpu.toml \\
    --size "" --size "batch.rollout_prompts=16 batch.minibatch_prompts=4" \\
    --test-size "batch.rollout_prompts=64 batch.minibatch_prompts=16"
fit finished runs, and test the fit on another one:
  .venv/bin/python tools/plan.py calibrate --gpu h200 --from-run runs/a --from-run runs/b \\
    --test-run runs/c --calibration h200.toml
"""
_MEASURE = """\
all runs of a scaling study; figures go to runs/studies/scaling_qwen/scaling:
  .venv/bin/python tools/plan.py measure runs/studies/scaling_qwen --gpu h200
only two of its runs:
  .venv/bin/python tools/plan.py measure --gpu h200 --output two_runs \\
    runs/studies/scaling_qwen/nodes_1 runs/studies/scaling_qwen/nodes_8
"""


def main(command_line: Sequence[str] | None = None) -> int:
    """Plan, calibrate or measure. Returns 0: done; 1: nothing fits, or wrong input; 2: usage."""
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
    from gapo_megatron.ops.plan import tables
    from gapo_megatron.ops.plan.planner import (
        check_layout_file,
        plan,
        quickest_with_room,
        read_model,
        write_layout,
    )
    from gapo_megatron.ops.plan.tables import print_plan
    from gapo_megatron.ops.plan.workload import default_workload

    # What is planned.
    config = load_config(arguments.config, arguments.overrides)
    if arguments.write:
        check_layout_file(arguments.write)
    hf_config, note = read_model(config)
    found = _calibration(arguments)
    workload = default_workload(
        config,
        spread=found.spread,
        clipped_share=found.clipped_share,
        mean_prompt_tokens=arguments.mean_prompt_tokens,
        mean_response_tokens=arguments.mean_response_tokens,
        active_share=arguments.active_share,
    )
    result = plan(
        hf_config,
        config,
        num_nodes=arguments.nodes,
        gpu=found.gpu,
        workload=workload,
        efficiency=found.efficiency,
        max_staleness=arguments.max_staleness,
    )

    # The result: a file, JSON or tables.
    if arguments.write:
        write_layout(
            quickest_with_room(result),
            arguments.write,
            gpu=found.gpu,
            base=Path(arguments.config),
            settings=arguments.overrides,
        )
    if arguments.json:
        values = tables.to_json(
            result, config, workload, found.efficiency, top=arguments.top, note=note
        )
        print(json.dumps(values, indent=2, allow_nan=False))
    else:
        print_plan(console, result, config, workload, found, note=note, top=arguments.top)
    return 0 if result.best else 1


def _calibration(arguments: argparse.Namespace) -> Calibration:
    """The calibration of --calibration, or default efficiencies on --gpu."""
    import dataclasses

    from gapo_megatron.errors import ConfigError
    from gapo_megatron.ops.plan.calibration import Calibration, read_calibration
    from gapo_megatron.ops.plan.hardware import Efficiency, find_gpu

    if arguments.calibration:
        found = read_calibration(arguments.calibration)
        if found.gpu.name != arguments.gpu:
            raise ConfigError(
                f"--calibration ({arguments.calibration}) was measured on {found.gpu.name}, but "
                f"--gpu is {arguments.gpu}"
            )
    else:
        found = Calibration(find_gpu(arguments.gpu), Efficiency(), {})
    if arguments.gpus_per_node is not None:
        gpu = dataclasses.replace(found.gpu, gpus_per_node=arguments.gpus_per_node)
        found = dataclasses.replace(found, gpu=gpu)
    return found


def _calibrate(arguments: argparse.Namespace, console: Console) -> int:
    from gapo_megatron.errors import ConfigError
    from gapo_megatron.io.whole_table import print_whole
    from gapo_megatron.ops.plan.calibration import (
        check_calibration,
        comparison_table,
        efficiencies_table,
        fit,
        worst_misses,
        write_calibration,
    )
    from gapo_megatron.ops.plan.hardware import find_gpu

    if arguments.calibration and not arguments.calibration.parent.is_dir():
        raise ConfigError(
            f"--calibration ({arguments.calibration}): there is no folder "
            f"{arguments.calibration.parent}"
        )
    if arguments.calibration:
        check_calibration(arguments.calibration)

    # Measure, and fit.
    gpu = find_gpu(arguments.gpu)
    with tempfile.TemporaryDirectory(prefix="gapo_trial_") as scratch:
        observed = _tried(arguments, Path(scratch)) if arguments.config else _finished(arguments)
    found = fit([one for one, is_fitted in observed if is_fitted], gpu)

    # Show how well it fits, and write it.
    print_whole(console, comparison_table(observed, gpu=gpu, efficiency=found.efficiency))
    print_whole(console, efficiencies_table(found))
    tested = [one for one, is_fitted in observed if not is_fitted]
    if tested:
        worst = worst_misses(tested, gpu, found.efficiency)
        console.print(f"Largest error on the test runs: {worst['total']:.0%} of the step time")
    if arguments.calibration:
        write_calibration(found, arguments.calibration)
        console.print(f"calibration: {arguments.calibration}")
    return 0


def _tried(arguments: argparse.Namespace, scratch: Path) -> list[tuple[Observation, bool]]:
    from gapo_megatron.config import load_config
    from gapo_megatron.ops.plan.hardware import CPU_NAME, find_gpu
    from gapo_megatron.ops.plan.trial import default_sizes, run_trials

    config, name = load_config(arguments.config, arguments.overrides), arguments.gpu
    sizes = [size.split() for size in arguments.size] or default_sizes(config)
    tests = [size.split() for size in arguments.test_size]
    processes = arguments.processes
    if processes is None:
        processes = 1 if name == CPU_NAME else find_gpu(name).gpus_per_node
    observations = run_trials(
        arguments.config,
        arguments.overrides,
        sizes=[*sizes, *tests],
        scratch=scratch,
        num_steps=arguments.steps,
        world_size=processes,
        prompt_tokens=arguments.mean_prompt_tokens,
    )
    return [(one, place < len(sizes)) for place, one in enumerate(observations)]


def _finished(arguments: argparse.Namespace) -> list[tuple[Observation, bool]]:
    return [
        (_observe(arguments, Path(folder)), is_fitted)
        for folders, is_fitted in ((arguments.from_run, True), (arguments.test_run, False))
        for folder in folders
    ]


def _observe(arguments: argparse.Namespace, folder: Path, *, name: str = "") -> Observation:
    from gapo_megatron.ops.plan.observation import read_observation
    from gapo_megatron.ops.plan.trial import mean_prompt_tokens

    prompt = arguments.mean_prompt_tokens
    return read_observation(
        folder,
        mean_prompt_tokens=mean_prompt_tokens if prompt is None else prompt,
        world_size=arguments.processes,
        name=name,
    )


def _show_measured(arguments: argparse.Namespace, console: Console) -> int:
    from gapo_megatron.io.whole_table import print_whole
    from gapo_megatron.ops.plan.calibration import times_rest_on
    from gapo_megatron.ops.report.scaling import observe, scaling_rows, scaling_tables
    from gapo_megatron.ops.report.scaling_figures import check_scaling, write_scaling

    folder = arguments.output or arguments.runs[0] / "scaling"
    check_scaling(folder)
    found = _calibration(arguments)
    observed, left_out = observe(
        arguments.runs, lambda folder, name: _observe(arguments, folder, name=name)
    )
    rows = scaling_rows(observed, gpu=found.gpu, efficiency=found.efficiency)
    for table in scaling_tables(rows, gpu=found.gpu):
        print_whole(console, table)
    for line in (times_rest_on(found), *left_out):
        console.print(line, highlight=False, soft_wrap=True)
    for exhibit, paths in write_scaling(observed, rows, gpu=found.gpu, folder=folder):
        console.print("\n" + " ".join([exhibit.aid, *exhibit.notes]), highlight=False)
        for path in paths:
            console.print(f"  {path}", highlight=False, soft_wrap=True)
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of 1 or more")
    return int(text)


def _not_negative(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of 0 or more")
    return int(text)


def _parse(command_line: Sequence[str] | None) -> argparse.Namespace:
    words = list(sys.argv[1:] if command_line is None else command_line)
    tasks = {"plan": _plan_parser, "calibrate": _calibrate_parser, "measure": _measure_parser}
    task = words.pop(0) if words and words[0] in tasks else "plan"
    parser = tasks[task]()
    arguments = parser.parse_intermixed_args(words)
    if task == "measure":
        if len(arguments.runs) > 1 and not arguments.output:
            parser.error("several RUNs need --output DIR for the figures")
        return arguments
    if arguments.config and "=" in arguments.config:
        parser.error(f"CONFIG comes first, before {arguments.config}")
    if task == "calibrate":
        if bool(arguments.config) == bool(arguments.from_run):
            parser.error("give either CONFIG or --from-run RUN: the steps to fit")
        if arguments.from_run and (arguments.size or arguments.test_size):
            parser.error("--size and --test-size go with CONFIG, not with --from-run")
        if arguments.config and arguments.test_run:
            parser.error("--test-run goes with --from-run")
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
    add("--nodes", type=_positive, default=1, metavar="N", help="number of full nodes (default: 1)")
    add("--gpu", default="h200", help=f"{', '.join(GPUS)} (default: h200), or cpu: this machine")
    _add_device(parser)
    shown = "steps that generation nodes may run ahead (default: rollout.max_staleness of CONFIG)"
    add("--max-staleness", type=_not_negative, metavar="K", help=shown)
    add("--top", type=_positive, default=5, metavar="N", help="layouts to show (default: 5)")
    add("--json", action="store_true", help="print the plan as JSON instead of tables")
    shown = "write a config: CONFIG with the quickest layout that leaves 5 %% of a GPU free"
    add("--write", type=Path, metavar="FILE", help=shown)
    for option, metavar, shown in (
        ("--mean-prompt-tokens", "N", "default: 1/10 of data.max_prompt_tokens"),
        ("--mean-response-tokens", "N", "default: 1/3 of rollout.max_response_tokens"),
        ("--active-share", "SHARE", "share of sequences with A != 0 (default: 0.67)"),
    ):
        add(option, type=float, metavar=metavar, help=shown)
    return parser


def _calibrate_parser() -> argparse.ArgumentParser:
    description = (
        "Fit the efficiencies behind the predicted times: to some steps of CONFIG, trained here\n"
        "at several sizes, or to finished runs."
    )
    parser = _parser("calibrate", description, _CALIBRATE, act=_calibrate)
    add = parser.add_argument
    add(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="TOML file to train (logs go to TMPDIR)",
    )
    add("overrides", nargs="*", metavar="section.key=value", help="override a setting of the file")
    add("--gpu", required=True, help=f"the measured device: {', '.join(GPUS)} or cpu")
    add("--calibration", type=Path, metavar="FILE", help="file to write, for plan and measure")
    for option, metavar, shown in (
        ("--size", "OVERRIDES", "a size to fit (default: CONFIG's own, and half its prompts)"),
        ("--test-size", "OVERRIDES", "a size to measure and predict, but not to fit"),
        ("--from-run", "RUN", "folder of a finished run to fit, instead of CONFIG"),
        ("--test-run", "RUN", "folder of a finished run to predict, but not to fit"),
    ):
        shown = f"{shown}; may be repeated"
        add(option, action="append", default=[], metavar=metavar, help=shown)
    shown = "steps of each size, of which the first two are ignored (default: 8)"
    add("--steps", type=_positive, default=8, metavar="N", help=shown)
    shown = "processes (default: CONFIG: 1 on cpu, else one per GPU of a node; runs: as logged)"
    add("--processes", type=_positive, metavar="N", help=shown)
    add("--mean-prompt-tokens", type=float, metavar="N", help="default: counted in the data")
    return parser


def _measure_parser() -> argparse.ArgumentParser:
    description = "Compare finished runs with their predictions, in tables and figures."
    parser = _parser("measure", description, _MEASURE, act=_show_measured, processes=None)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or of several runs")
    add("--gpu", required=True, help=f"the device of the runs: {', '.join(GPUS)} or cpu")
    _add_device(parser)
    shown = "folder for the figures (default: RUN/scaling; required for several RUNs)"
    add("--output", type=Path, metavar="DIR", help=shown)
    add("--mean-prompt-tokens", type=float, metavar="N", help="default: counted in the data")
    return parser


def _add_device(parser: argparse.ArgumentParser) -> None:
    shown = "default: 8; cpu: 1, since a process counts as a device"
    parser.add_argument("--gpus-per-node", type=_positive, metavar="N", help=shown)
    shown = "efficiencies written by tools/plan.py calibrate"
    parser.add_argument("--calibration", type=Path, metavar="FILE", help=shown)


if __name__ == "__main__":
    sys.exit(main())
