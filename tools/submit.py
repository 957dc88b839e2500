"""Submit a run or a study to Slurm, run it on this machine, or show the status of runs.

A study (configs/studies/) becomes one job array, or one for each set of resources that its runs ask
for. Runs that are queued or running are left alone. Code and config are copied into each run's
folder, so that later edits of the checkout do not change queued jobs. Resources are taken from
these options, then the run, then the study's [resources], then SBATCH_* of the environment (source
slurm/site.sh), then the defaults.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from submitit.core.utils import FailedJobError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from gapo_megatron.errors import CheckpointError, ConfigError
from gapo_megatron.io.run_folder import find_runs
from gapo_megatron.io.toml_tree import to_toml
from gapo_megatron.launch.freeze import freeze, repository
from gapo_tools.jobs.local import gpu_shares, run_locally
from gapo_tools.jobs.status import (
    Status,
    live_table,
    read_statuses,
    status_table,
)
from gapo_tools.jobs.submit import Submission, generation_nodes, world_sizes

if TYPE_CHECKING:
    from gapo_tools.jobs.study import Run, Study

_LONGEST_CHAIN = 1000

console = Console(markup=False)
if not console.is_terminal:
    console.width = 160


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns 0: done (--wait, --local: all finished); 1: failed; 2: usage; 130: interrupted."""
    arguments = _parse(command_line)
    try:
        if arguments.status is not None:
            return _show(arguments.status)
        return _submit(arguments)
    except (ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FailedJobError as error:  # sbatch's own words
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; submitted jobs keep running", file=sys.stderr)
        return 130


def _submit(arguments: argparse.Namespace) -> int:
    from gapo_megatron.launch.prepare import check_before_nodes
    from gapo_tools.jobs.study import Resources, read_study, unfinished  # and so pydantic

    given = {name: getattr(arguments, name) for name in Resources.model_fields}
    overrides = [*arguments.overrides, *generation_nodes()]
    study = read_study(arguments.config, overrides).asking(
        {name: value for name, value in given.items() if value is not None},
        default={"tasks_per_node": 1} if arguments.local else {},
    )
    runs, run_dirs = unfinished(study), [run.run_dir for run in study.runs]
    num_finished = len(study.runs) - len(runs)

    # Check everything before any code is frozen.
    _check(arguments, runs)
    # Of all runs of the study: the unfinished ones alone may happen to ask for equal nodes.
    ranks = world_sizes([run.resources for run in study.runs])
    world_size = dict(zip([run.name for run in study.runs], ranks, strict=True))
    for run in runs:
        try:
            check_before_nodes(
                run.config,
                world_size=world_size[run.name],
                ranks_per_node=run.resources.tasks_per_node,
            )
        except (ConfigError, CheckpointError) as error:
            raise type(error)(f"run {run.name}: {error}") from None
    if not (arguments.local or arguments.dry_run):
        runs = _idle(runs)
    submissions = _submissions(arguments, study, runs)
    if not arguments.local:
        for _, submission in submissions:
            submission.check()

    # Submit, or run here.
    if arguments.dry_run:
        print("\n".join(script for _, one in submissions for script in one.scripts()), end="")
        return 0
    if not arguments.local:
        _to_slurm(submissions)
    elif submissions:
        for members, submission in submissions:
            _freeze(members, submission)
        arrays = [one for _, one in submissions]
        parallel = min(arguments.parallel or 1, len(runs))
        run_locally(arrays, console, title=study.name, parallel=parallel)
    if num_finished:
        console.print(f"{num_finished} of {len(study.runs)} runs had finished already")

    # Show the status.
    if arguments.local:
        statuses = read_statuses(run_dirs)
        if num_finished:  # otherwise the last live table showed all runs
            console.print(status_table(statuses, title=str(study.folder)))
        return _exit_code(statuses)
    if not arguments.wait:
        console.print(status_table(read_statuses(run_dirs), title=str(study.folder)))
        command = ".venv/bin/python tools/submit.py"
        console.print(f"to see their status: {command} --status {study.folder}")
        return 0
    return _wait(run_dirs, title=str(study.folder))


def _wait(run_dirs: Sequence[Path], *, title: str) -> int:
    with live_table(console, title=title) as show:
        while True:
            statuses = read_statuses(run_dirs)
            show(statuses)
            if not any(status.is_active for status in statuses):
                return _exit_code(statuses)
            time.sleep(5)


def _idle(runs: Sequence[Run]) -> list[Run]:
    """The runs that have no queued, held or running job."""
    statuses = read_statuses([run.run_dir for run in runs])
    idle = [run for run, status in zip(runs, statuses, strict=True) if not status.is_active]
    if len(idle) < len(runs):
        console.print(
            f"{len(runs) - len(idle)} of {len(runs)} runs are queued, held or running already",
        )
    return idle


def _submissions(
    arguments: argparse.Namespace, study: Study, runs: Sequence[Run]
) -> list[tuple[list[Run], Submission]]:
    """One submission for each set of resources, in the order of the runs."""
    name = f"submitted-{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}"
    alike: dict[str, list[Run]] = {}
    for run in runs:  # only fields that were set: SBATCH_* may set the others
        alike.setdefault(run.resources.model_dump_json(exclude_unset=True), []).append(run)
    return [
        (
            members,
            Submission(
                name=study.name,
                folder=study.folder / "submitit",
                codes=[run.run_dir / "code" / name for run in members],
                resources=members[0].resources,
                parallel=arguments.parallel or len(members),
                chain=arguments.chain,
            ),
        )
        for members in alike.values()
    ]


def _freeze(runs: Sequence[Run], submission: Submission) -> None:
    for run, code in zip(runs, submission.codes, strict=True):
        freeze(repository(), code, config=to_toml(run.config))


def _to_slurm(submissions: Sequence[tuple[Sequence[Run], Submission]]) -> None:
    for number, (members, submission) in enumerate(submissions):
        _freeze(members, submission)
        try:
            submission.submit()
        except FailedJobError:
            left = [run.name for runs, _ in submissions[number:] for run in runs]
            before = f"submitted before it: {number}" if number else "nothing was submitted"
            print(
                f"Slurm rejected array {number + 1} of {len(submissions)}; {before}. Runs not "
                f"submitted: {', '.join(left)}",
                file=sys.stderr,
            )
            raise


def _show(folder: Path) -> int:
    run_dirs = find_runs(folder.absolute())
    if not run_dirs:
        raise ConfigError(f"--status {folder}: there is no run in this folder")
    console.print(status_table(read_statuses(run_dirs), title=str(folder)))
    return 0


def _exit_code(statuses: list[Status]) -> int:
    return 0 if all(status.state == "finished" for status in statuses) else 1


def _check(arguments: argparse.Namespace, runs: Sequence[Run]) -> None:
    if not 1 <= arguments.chain <= _LONGEST_CHAIN:
        raise ConfigError(f"--chain ({arguments.chain}) must be from 1 to {_LONGEST_CHAIN}")
    if arguments.parallel is not None and arguments.parallel < 1:
        raise ConfigError(f"--parallel ({arguments.parallel}) must be at least 1")
    if arguments.local:
        asked = {"--chain": arguments.chain}
        asked |= {f"run {run.name}: nodes": run.resources.nodes for run in runs}
        for name, value in asked.items():
            if value != 1:
                raise ConfigError(f"{name} ({value}) must be 1 with --local (one machine)")
        if arguments.dry_run or arguments.wait:
            raise ConfigError("--local (which always waits) excludes --dry-run and --wait")
        most = max((run.resources.num_gpus_per_node for run in runs), default=0)
        gpu_shares(most, number=min(arguments.parallel or 1, max(len(runs), 1)))
    elif not arguments.dry_run and shutil.which("sbatch") is None:
        raise ConfigError(
            "sbatch was not found: use --local to run on this machine, or --dry-run to print the "
            "batch script"
        )


def _parse(command_line: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n")[1]
    )
    parser.add_argument("config", nargs="?", help="TOML file of a run or a study; see configs/")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="override a setting in every run"
    )
    parser.add_argument("--status", type=Path, metavar="DIR", help="show the runs in DIR, and exit")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        default=os.environ.get("DRY_RUN") == "1",
        help="print the batch scripts, and exit (also: DRY_RUN=1 in the environment)",
    )
    parser.add_argument("--wait", action="store_true", help="show the runs until they end")
    parser.add_argument("--local", action="store_true", help="run on this machine, without Slurm")
    parser.add_argument(
        "--parallel",
        type=int,
        metavar="N",
        help="runs of an array at the same time (default: all; --local: 1)",
    )
    parser.add_argument(
        "--chain",
        type=int,
        default=1,
        metavar="N",
        help="jobs of a run, one after another (default: 1)",
    )
    resources = parser.add_argument_group("resources of each run")
    for option, shown in {
        "--nodes": "default: 1",
        "--tasks-per-node": "ranks per node (default: 8; --local: 1)",
        "--gpus-per-node": "default: one per rank; 0 trains on CPUs",
        "--cpus-per-task": "default: 12",
    }.items():
        resources.add_argument(option, type=int, metavar="N", help=shown)
    resources.add_argument(
        "--time", help="time limit of a job, as for sbatch (default: 1-00:00:00)"
    )
    resources.add_argument(
        "--exclusive", action=argparse.BooleanOptionalAction, help="ask for whole nodes (default)"
    )
    resources.add_argument("--partition")
    resources.add_argument("--account")
    arguments = parser.parse_intermixed_args(command_line)
    if (arguments.config is None) == (arguments.status is None):
        parser.error("give either a config or --status DIR")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
