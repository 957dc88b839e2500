#!/usr/bin/env python
"""Plan a run: which layouts fit on N nodes, what a step takes, and how sure that is.

CONFIG is the file a run is started with, section.key=value replaces its settings. Of the model only
config.json has to be there. Without a GPU, in seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

if TYPE_CHECKING:
    from gapo_megatron.ops.plan.calibration import Calibration, Observation

EXAMPLES = """\
layouts, memory and time of a config, here on one node of H200:
  python tools/plan.py configs/qwen_math_1_5b/gapo.toml --nodes 1 --gpu h200
the same with lengths you know, and another model:
  python tools/plan.py CONFIG model.hf_dir=models/Qwen2.5-32B --nodes 4 \\
    --mean-prompt-tokens 150 --mean-response-tokens 900 --active-share 0.6
measure this machine at two sizes, and test what was learned at a third:
  python tools/plan.py configs/demo.toml --gpu cpu --probe --calibration cpu.toml \\
    --size "" --size "batch.rollout_prompts=16 batch.minibatch_prompts=4" \\
    --test-size "batch.rollout_prompts=64 batch.minibatch_prompts=16"
from runs that are there, tested on one that was not fitted:
  python tools/plan.py --gpu h200 --from-run runs/a --from-run runs/b --test-run runs/c \\
    --calibration h200.toml
plan with what was measured:
  python tools/plan.py CONFIG --nodes 4 --gpu h200 --calibration h200.toml
a scaling study, run by run, with figures in runs/studies/scaling_qwen/scaling:
  python tools/plan.py --gpu h200 --measured runs/studies/scaling_qwen
two of its runs alone:
  python tools/plan.py --gpu h200 --output two_runs \\
    --measured runs/studies/scaling_qwen/nodes_1 runs/studies/scaling_qwen/nodes_8

Times without --calibration rest on assumed efficiencies (gapo_megatron/ops/plan/efficiency.py);
docs/scaling.md says how times are made. --calibration is written by --probe and --from-run, and
read otherwise. Exit codes: 0; 1 when nothing fits or an input is wrong; 2 usage.
"""


_TOP = 5
"""Layouts to show."""


def main(command_line: Sequence[str] | None = None) -> int:
    """Plan, calibrate or compare; 0 done, 1 nothing fits or wrong input, 2 usage."""
    arguments = _parse(command_line)
    from gapo_megatron.errors import GapoError

    console = Console()
    if not console.is_terminal:
        console.width = 180
    try:
        if arguments.probe or arguments.from_run:
            return _calibrate(arguments, console)
        if arguments.measured:
            return _show_measured(arguments, console)
        return _plan(arguments, console)
    except GapoError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1


def _plan(arguments: argparse.Namespace, console: Console) -> int:
    from gapo_megatron.config import load_config
    from gapo_megatron.ops.plan import tables
    from gapo_megatron.ops.plan.planner import leave_out, overrides, plan, read_model
    from gapo_megatron.ops.plan.workload import default_workload

    config = load_config(arguments.config, arguments.overrides)
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
    top = arguments.top or _TOP
    result = plan(
        hf_config,
        config,
        num_nodes=arguments.nodes or 1,
        gpu=found.gpu,
        workload=workload,
        efficiency=found.efficiency,
    )
    if arguments.json:
        values = tables.to_json(result, config, workload, found.efficiency, top=top, note=note)
        print(json.dumps(values, indent=2, allow_nan=False))
        return 0 if result.ranked else 1
    if note:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"A step: {config.batch.rollout_prompts} prompts of {workload.mean_prompt_tokens:g} tokens "
        f"x {config.batch.rollouts_per_prompt} responses of {workload.mean_response_tokens:g} "
        f"(longest {workload.longest_response_tokens:,}), {workload.active_share:.0%} with A != 0. "
        + tables.times_rest_on(found),
        markup=False,
        highlight=False,
    )
    if caveat := tables.fp8_caveat(config):
        console.print(caveat, markup=False, highlight=False)
    console.print(tables.layouts_table(result, config, top=top))
    console.print(tables.memory_table(result, top=top))
    if result.current_refusal:
        console.print(f"* The config's own does not run: {result.current_refusal}", markup=False)
    if result.refusals:
        console.print(tables.refusals_table(result))
    if not result.ranked:
        console.print(tables.nothing_fits(result, config))
        return 1
    best = " ".join(overrides(result.ranked[0]))
    console.print(f"The quickest, as overrides: {best}", markup=False, soft_wrap=True)
    if names := leave_out(config):
        listed = " and ".join(names)
        console.print(f"Its stages are equal: leave {listed} out of the config.", soft_wrap=True)
    return 0


def _calibration(arguments: argparse.Namespace) -> Calibration:
    """Of the file given, else the defaults on the device named."""
    import dataclasses

    from gapo_megatron.errors import ConfigError
    from gapo_megatron.ops.plan.calibration import Calibration
    from gapo_megatron.ops.plan.calibration_file import read_calibration
    from gapo_megatron.ops.plan.efficiency import Efficiency
    from gapo_megatron.ops.plan.hardware import find_gpu

    if arguments.calibration:
        found = read_calibration(arguments.calibration)
        if found.gpu.name != arguments.gpu:
            raise ConfigError(
                f"--calibration {arguments.calibration} was measured on {found.gpu.name}, not on "
                f"--gpu {arguments.gpu}"
            )
    else:
        found = Calibration(find_gpu(arguments.gpu), Efficiency(), {})
    if arguments.gpus_per_node is not None:
        gpu = dataclasses.replace(found.gpu, gpus_per_node=arguments.gpus_per_node)
        found = dataclasses.replace(found, gpu=gpu)
    return found


def _calibrate(arguments: argparse.Namespace, console: Console) -> int:
    from gapo_megatron.errors import ConfigError
    from gapo_megatron.ops.plan.calibration import fit, worst_misses
    from gapo_megatron.ops.plan.calibration_file import check_calibration, write_calibration
    from gapo_megatron.ops.plan.hardware import find_gpu
    from gapo_megatron.ops.plan.tables import comparison_table, efficiencies_table

    if arguments.calibration and not arguments.calibration.parent.is_dir():
        raise ConfigError(
            f"--calibration ({arguments.calibration}): no folder {arguments.calibration.parent}"
        )
    if arguments.calibration:
        check_calibration(arguments.calibration)
    gpu = find_gpu(arguments.gpu)
    with tempfile.TemporaryDirectory(prefix="gapo_probe_") as scratch:
        observed = _probed(arguments, Path(scratch)) if arguments.probe else _finished(arguments)
    found = fit([one for one, is_fitted in observed if is_fitted], gpu)
    console.print(comparison_table(observed, gpu=gpu, efficiency=found.efficiency))
    console.print(efficiencies_table(found))
    tested = [one for one, is_fitted in observed if not is_fitted]
    if tested:
        worst = worst_misses(tested, gpu, found.efficiency)
        console.print(f"Largest miss where nothing was fitted: {worst['total']:.0%} of the step")
    if arguments.calibration:
        write_calibration(found, arguments.calibration)
        console.print(f"calibration: {arguments.calibration}", markup=False)
    return 0


def _probed(arguments: argparse.Namespace, scratch: Path) -> list[tuple[Observation, bool]]:
    from gapo_megatron.config import load_config
    from gapo_megatron.ops.plan.hardware import CPU_NAME, find_gpu
    from gapo_megatron.ops.plan.probe import default_sizes, probe

    config = load_config(arguments.config, arguments.overrides)
    sizes = [size.split() for size in arguments.size] or default_sizes(config)
    tests = [size.split() for size in arguments.test_size]
    processes = arguments.processes
    if processes is None:
        name = arguments.gpu
        processes = 1 if name == CPU_NAME else find_gpu(name).gpus_per_node
    observations = probe(
        arguments.config,
        arguments.overrides,
        sizes=[*sizes, *tests],
        scratch=scratch,
        num_steps=arguments.probe_steps,
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
    from gapo_megatron.ops.plan.calibration import read_observation
    from gapo_megatron.ops.plan.probe import mean_prompt_tokens

    prompt = arguments.mean_prompt_tokens
    return read_observation(
        folder,
        mean_prompt_tokens=mean_prompt_tokens if prompt is None else prompt,
        world_size=arguments.processes,
        name=name,
    )


def _show_measured(arguments: argparse.Namespace, console: Console) -> int:
    from gapo_megatron.ops.plan.tables import times_rest_on
    from gapo_megatron.ops.report.scaling import observe, scaling_rows, scaling_tables
    from gapo_megatron.ops.report.scaling_figures import check_scaling, write_scaling

    folder = arguments.output or arguments.measured[0] / "scaling"
    check_scaling(folder)
    found = _calibration(arguments)
    observed, left_out = observe(
        arguments.measured, lambda folder, name: _observe(arguments, folder, name=name)
    )
    rows = scaling_rows(observed, gpu=found.gpu, efficiency=found.efficiency)
    for table in scaling_tables(rows, gpu=found.gpu):
        console.print(table)
    for line in (times_rest_on(found), *left_out):
        console.print(line, markup=False, highlight=False)
    for exhibit, paths in write_scaling(observed, rows, gpu=found.gpu, folder=folder):
        console.print("\n" + " ".join([exhibit.aid, *exhibit.notes]), markup=False, highlight=False)
        for path in paths:
            console.print(f"  {path}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of 1 or more")
    return int(text)


def _parse(command_line: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("config", nargs="?", help="TOML file; see configs/")
    add(
        "overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's"
    )
    add("--nodes", type=_positive, metavar="N", help="full nodes to plan for (default: 1)")
    add("--gpu", help="h100, h200 (default of a plan), h20, or cpu: this machine")
    add(
        "--gpus-per-node",
        type=_positive,
        metavar="N",
        help="default: 8; of cpu: 1, a process is a device",
    )
    add("--top", type=_positive, metavar="N", help=f"layouts to show (default: {_TOP})")
    add("--json", action="store_true", help="print plain values instead of tables")
    lengths = parser.add_argument_group("lengths of a step (assumed where not given)")
    for option, metavar, shown in (
        (
            "--mean-prompt-tokens",
            "N",
            "default: a tenth of data.max_prompt_tokens; of runs: counted in the data",
        ),
        ("--mean-response-tokens", "N", "default: a third of rollout.max_response_tokens"),
        ("--active-share", "SHARE", "of the sequences with A != 0 (default: 0.67)"),
    ):
        lengths.add_argument(option, type=float, metavar=metavar, help=shown)
    measured = parser.add_argument_group("calibration")
    measured.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="written by --probe and --from-run, read otherwise",
    )
    measured.add_argument(
        "--probe",
        action="store_true",
        help="train a few steps of CONFIG at several sizes and fit them; takes a few megabytes in "
        "TMPDIR (default: /tmp), for no weights are saved",
    )
    measured.add_argument(
        "--probe-steps",
        type=_positive,
        default=8,
        metavar="N",
        help="steps of each size, the first two not counted (default: 8)",
    )
    measured.add_argument(
        "--processes",
        type=_positive,
        metavar="N",
        help="of a probe: default 1 on cpu, else those of a node; of --from-run: as they logged",
    )
    for option, metavar, shown in (
        (
            "--size",
            "OVERRIDES",
            "a size of the probe (default: CONFIG's own, and half its prompts)",
        ),
        ("--test-size", "OVERRIDES", "a size that is measured and predicted, but not fitted"),
        ("--from-run", "RUN", "a run's folder to fit"),
        ("--test-run", "RUN", "a run's folder to predict, but not to fit"),
    ):
        measured.add_argument(
            option, action="append", default=[], metavar=metavar, help=f"{shown}; may be repeated"
        )
    add(
        "--measured",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="what these runs reached, beside the prediction; a RUN may be a folder of runs",
    )
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="for the figures of --measured (default: RUN/scaling; of several RUNs: needed)",
    )
    arguments = parser.parse_intermixed_args(command_line)
    tasks = {
        "--probe": arguments.probe,
        "--from-run": bool(arguments.from_run),
        "--measured": bool(arguments.measured),
    }
    chosen = [name for name, is_chosen in tasks.items() if is_chosen]
    if len(chosen) > 1:
        parser.error(f"{' and '.join(chosen)} are one at a time")
    for name in ("nodes", "top", "json", "mean_response_tokens", "active_share"):
        given = getattr(arguments, name)
        if chosen and given is not None and given is not False:
            parser.error(f"--{name.replace('_', '-')} is for plans, not for {chosen[0]}")
    if arguments.config and chosen not in ([], ["--probe"]):
        parser.error(f"{chosen[0]} takes no CONFIG ({arguments.config})")
    if not arguments.config and chosen in ([], ["--probe"]):
        parser.error("CONFIG is missing (only --from-run and --measured go without)")
    if arguments.config and "=" in arguments.config:
        parser.error(f"CONFIG comes first, before {arguments.config}")
    if arguments.gpu is None and chosen:
        parser.error(f"{chosen[0]} needs --gpu: the device that is measured")
    arguments.gpu = arguments.gpu or "h200"
    if (arguments.size or arguments.test_size) and not arguments.probe:
        parser.error("--size and --test-size go with --probe")
    if arguments.test_run and not arguments.from_run:
        parser.error("--test-run goes with --from-run")
    if arguments.processes and chosen not in (["--probe"], ["--from-run"]):
        parser.error("--processes goes with --probe and --from-run: other runs have logged theirs")
    if arguments.output and not arguments.measured:
        parser.error("--output goes with --measured")
    if arguments.measured and len(arguments.measured) > 1 and not arguments.output:
        parser.error("--measured of several RUNs needs --output: a folder for the figures")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
