"""Train a policy: `python -m gapo_megatron.train CONFIG.toml [section.key=value ...] [--dry-run]`.

The loop, the checks that need no torch, and the command line; the stages are methods of `Run`.
"""

from __future__ import annotations

import argparse
import re
import runpy
import sys

from gapo_megatron.config import Config, load_config
from gapo_megatron.run.early_checks import check_before_imports
from gapo_megatron.run.fail_fast import fail_fast
from gapo_megatron.run.imports import without_garbage_collection
from gapo_megatron.run.processes import choose_cuda_queues, quiet_libraries, world_size

DRY_RUNS = ("plain", "data", "settings", "deep")


def train(config: Config) -> None:
    """Train to the last step, from the newest whole checkpoint of the run's folder, if any.

    Without one it begins with the checkpoint that `checkpoint.branch_from` names, or anew. When a
    stop is asked for, or the job's time runs out, it saves and ends; the next start resumes.

    Args:
        config: the run's settings.

    Collectives: creates the process group; every rank runs every stage, in this order.

    Raises:
        GapoError: what a user can get wrong is checked before any model is built.
    """
    check_before_imports(config)
    choose_cuda_queues(ranks_per_layer=config.parallel.ranks_per_layer)
    quiet_libraries()
    # Torch, transformers, Megatron-core, vLLM: seconds that nothing above needs.
    with without_garbage_collection():
        from gapo_megatron.run.run import GenerationSide, Run

    run = Run.start(config)
    if isinstance(run, GenerationSide):  # this rank only generates
        return run.serve()
    if run is None:  # finished already
        return
    with run:
        for step in run.steps():  # ends when asked to
            run.evaluate_if_due(step)
            rollouts = run.collect(step)  # prompts -> responses -> verdicts, as they end
            batch = run.make_batch(rollouts)  # c, k and A of every sequence; who computes what
            run.save_ahead_if_due()  # the last step's checkpoint, if it has to hold this batch
            learned = run.learn(batch)  # without A = 0; old log-probs; an update per mini-batch
            synced = run.sync(step, batch)  # weights into the engine, verified by log-probs
            run.sample_ahead(step)  # on generation ranks, meanwhile
            run.log(step, batch, learned, synced)
            run.save_if_due()
        run.evaluate_if_due(config.run.num_steps)


def main() -> None:
    """Parse the command line and train; see `fail_fast` for exit codes."""
    arguments = parse_arguments()
    if arguments.dry_run:
        # Another program, with the same command line: training knows nothing of what it needs.
        runpy.run_module("gapo_tools.dry_run.command", run_name="__main__", alter_sys=True)
        return
    with fail_fast():
        train(load_config(arguments.config, arguments.overrides))


def parse_arguments() -> argparse.Namespace:
    """Read the command line: `config`, `overrides`, `dry_run` and `rank`, (rank, world size)."""
    parser = argparse.ArgumentParser(
        prog="python -m gapo_megatron.train",
        description="Train a policy with GAPO or a baseline. Resumes the newest checkpoint of "
        "run.output_dir, if there is one.",
    )
    parser.add_argument("config", help="TOML file; see configs/")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="settings that replace those of the file, e.g. objective.method=gspo run.seed=1",
    )
    parser.add_argument(
        "--dry-run",
        nargs="?",
        choices=DRY_RUNS,
        help="say whether the run would start, what it would find and what its config leads to, "
        "build nothing, and exit, with 2 where it would not start (plain, the default: reads the "
        "first rows of each file); data: read all rows; settings: print every setting as TOML; "
        "deep: also build one rank and let it take one step, on a CPU",
    )
    parser.add_argument(
        "--rank",
        type=_rank_of,
        metavar="RANK/WORLD_SIZE",
        help="of a dry run: how many processes, and which of them a deep one builds, e.g. 37/128",
    )
    given = sys.argv[1:]
    if "--dry-run" in given:  # else it would take the config that follows it for its value
        at = given.index("--dry-run")
        mode = given.pop(at + 1) if {*given[at + 1 : at + 2]} & {*DRY_RUNS} else "plain"
        given[at] = f"--dry-run={mode}"
    arguments = parser.parse_intermixed_args(given)
    if arguments.rank and not arguments.dry_run:
        parser.error("--rank goes with --dry-run")
    arguments.rank = arguments.rank or (0, world_size())
    return arguments


def _rank_of(text: str) -> tuple[int, int]:
    """Read `RANK/WORLD_SIZE`."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not int(found[1]) < int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} must be RANK/WORLD_SIZE, RANK the smaller one")
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    main()
