"""Train with GAPO: `python -m gapo_megatron.train CONFIG.toml [section.key=value ...] [--dry-run]`.

The command line, what can be refused before torch is imported, and the loop; the rest is `Run`'s.
"""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from pathlib import Path

from gapo_megatron import rewards
from gapo_megatron.config import Config, load_config
from gapo_megatron.config.rules import check_paths, input_paths
from gapo_megatron.hf.folder import check_replaceable, is_marked
from gapo_megatron.hf.model_folder import check_model_folder
from gapo_megatron.io.run_folder import check_writable, has_finished
from gapo_megatron.models.checks import check_shapes
from gapo_megatron.models.cpu_engine import check_engine_here
from gapo_megatron.run.fail_fast import fail_fast
from gapo_megatron.run.imports import without_garbage_collection
from gapo_megatron.run.metrics import check_sinks
from gapo_megatron.run.processes import choose_cuda_queues, is_first, quiet_libraries, world_size
from gapo_megatron.run.restart import adopt_export, check_not_lost


def train(config: Config, *, keep_weights: bool = True) -> None:
    """Run `config` to its last step, from the newest whole checkpoint of its output folder if any.

    Without one, `checkpoint.branch_from` names that of another run to begin with. Asked to stop, or
    out of the job's time, it saves and ends early, to be started again.

    Args:
        config: of the run.
        keep_weights: False: it is run for its timings, and writes no checkpoint and no model.

    Collectives: creates the process group; every rank runs every stage, in this order.

    Raises:
        GapoError: what a user can get wrong is checked before any model is built.
    """
    check_before_imports(config, keep_weights=keep_weights)
    choose_cuda_queues(ranks_per_layer=config.parallel.ranks_per_layer)
    quiet_libraries()
    # Torch, transformers, Megatron-core, vLLM: seconds that nothing above needs.
    with without_garbage_collection():
        from gapo_megatron.run.run import Run

    with Run.start(config, keep_weights=keep_weights) as run:
        for step in run.steps():  # evaluates and saves where due; ends when asked to
            rollouts = run.collect(step)  # prompts -> responses -> verdicts, as they end
            batch = run.make_batch(rollouts)  # c, k and A of every sequence
            learned = run.learn(batch)  # without A = 0; old log-probs; an update per mini-batch
            synced = run.sync(step, batch)  # weights into the engine, proved by log-probs
            run.log(step, batch, learned, synced)


def check_before_imports(config: Config, *, keep_weights: bool = True) -> None:
    """Refuse what can be told without torch; `Run.start` checks the rest.

    Raises:
        ConfigError: names what cannot be used, is gone, or does not fit the model.
    """
    check_paths(config)
    check_writable(config.run.output_dir, is_first=is_first())
    check_sinks(config.metrics)
    rewards.check(config.reward)
    if keep_weights and is_first():
        _check_export(config)
        check_not_lost(config)
    model = config.model
    facts = check_model_folder(model.hf_dir, weights=not model.megatron_dir, field="model.hf_dir")
    check_shapes(facts, config.parallel, model)
    check_engine_here(facts, field="model.hf_dir", folder=model.hf_dir)


def _check_export(config: Config) -> None:
    """Refuse a run whose trained model would replace something else than the run's last one."""
    run_dir = Path(config.run.output_dir)
    export = run_dir / "hf"
    adopt_export(run_dir)
    # A version that did not mark it made it, if the run was finished.
    is_ours = is_marked(export, made_by="train", or_unmarked=has_finished(run_dir))
    check_replaceable(
        export, field="run.output_dir/hf", inputs=input_paths(config), is_ours=is_ours
    )


def main() -> None:
    """Parse the command line and train; see `fail_fast` for exit codes."""
    arguments = parse_arguments()
    if arguments.dry_run:
        # Another program, with the same command line: training knows nothing of what it needs.
        runpy.run_module("gapo_megatron.ops.dry_run", run_name="__main__", alter_sys=True)
        return
    with fail_fast():
        train(load_config(arguments.config, arguments.overrides))


def parse_arguments() -> argparse.Namespace:
    """Read the command line: `config`, `overrides`, `dry_run` and `rank`, (rank, world size)."""
    parser = argparse.ArgumentParser(
        prog="python -m gapo_megatron.train",
        description="Train by a config, from the newest checkpoint of its output folder if any.",
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
        choices=("plain", "deep"),
        help="print the resolved config and its arithmetic, build nothing, and exit, with 2 where "
        "an input is missing (plain, the default); deep: also build one rank and let it take one "
        "step, on a CPU",
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
        mode = given.pop(at + 1) if given[at + 1 : at + 2] in (["plain"], ["deep"]) else "plain"
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
