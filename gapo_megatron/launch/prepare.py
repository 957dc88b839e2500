"""Check a job before its nodes are used: `python -m gapo_megatron.launch.prepare CONFIG ...`.

slurm/launch.sh calls it. It prints four lines: the run folder, the folder with the job's frozen
code and config, `finished` or `unfinished`, and how many of the ranks only generate.
"""

from __future__ import annotations

import argparse
import os
from datetime import UTC, datetime
from pathlib import Path

from gapo_megatron.config import Config, load_config
from gapo_megatron.config.counts import num_generation_ranks, split_ranks, usual_ranks_per_node
from gapo_megatron.config.rules import check_paths
from gapo_megatron.errors import ConfigError
from gapo_megatron.io.files import real
from gapo_megatron.io.run_folder import check_ours, checkpoints_dir, is_finished
from gapo_megatron.io.toml_tree import to_toml
from gapo_megatron.launch.freeze import ROOMS, freeze, repository
from gapo_megatron.run.fail_fast import fail_fast
from gapo_megatron.run.processes import quiet_libraries
from gapo_megatron.run.restart import check_not_lost


def prepare(
    config_path: str,
    overrides: list[str],
    *,
    world_size: int,
    job: str,
    restarts: int = 0,
    ranks_per_node: int | None = None,
) -> tuple[Config, Path]:
    """The config and the frozen code of a job; the job's first start checks and freezes them.

    A job whose code tools/submit.py has frozen (GAPO_CODE names the folder), or that was requeued,
    keeps its code and config, which have been checked.

    Args:
        config_path: TOML file.
        overrides: `section.key=value`.
        world_size: processes of the job.
        job: name of the folder below `run.output_dir`/code; the time is appended if it is taken.
        restarts: how often the job was requeued.
        ranks_per_node: None if unknown, see `usual_ranks_per_node`.

    Raises:
        ConfigError: the config is wrong, or its parallel sizes do not divide `world_size`.
    """
    if frozen := os.environ.get("GAPO_CODE"):
        return load_config(Path(frozen) / "config.toml"), Path(frozen)
    config = load_config(config_path, overrides)
    code = Path(config.run.output_dir).absolute() / "code" / job
    if restarts and code.is_dir():
        return load_config(code / "config.toml"), code
    check_before_nodes(config, world_size=world_size, ranks_per_node=ranks_per_node)
    if code.is_dir():  # another start in this job: its config may differ
        code = code.with_name(f"{job}-{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}")
    freeze(repository(), code, config=to_toml(config))
    return config, code


def check_before_nodes(
    config: Config, *, world_size: int, ranks_per_node: int | None = None
) -> None:
    """Check everything that needs neither the model nor a device.

    Args:
        config: the run's config.
        world_size: processes of the job.
        ranks_per_node: None if unknown, see `usual_ranks_per_node`.

    Raises:
        ConfigError, CheckpointError: a path is wrong, the output folder is not a run's or has lost
            its checkpoints, the parallel sizes do not divide `world_size`, no rank is left to
            train, or the branch point is wrong.
    """
    ranks_per_node = ranks_per_node or usual_ranks_per_node(world_size)
    split_ranks(config, world_size=world_size, ranks_per_node=ranks_per_node)
    check_paths(config)
    _check_run_dir(Path(config.run.output_dir).absolute())
    check_ours(config.run.output_dir)
    check_not_lost(config)
    if config.checkpoint.branch_from or checkpoints_dir(config.run.output_dir).exists():
        quiet_libraries()
        from gapo_megatron.checkpoint import check_branch  # imports torch: seconds

        check_branch(config, None)


def _check_run_dir(run_dir: Path) -> None:
    """Refuse an output folder that launch.sh or Slurm cannot handle."""
    refused = {
        "\n": "the launcher reads one folder per line",
        ":": "it separates the folders of PYTHONPATH, which has the frozen code",
    }
    if "SLURM_JOB_ID" in os.environ:
        refused |= dict.fromkeys("\\%", "srun interprets it in the name of a log")
    for character, why in refused.items():
        if character in str(run_dir):
            raise ConfigError(
                f"run.output_dir ({str(run_dir)!r}) must not contain {character!r}: {why}"
            )
    for room in ROOMS:
        copied = repository() / room
        if real(run_dir).is_relative_to(real(copied)):
            raise ConfigError(
                f"run.output_dir ({str(run_dir)!r}) must not be inside {copied}, which is copied "
                "into it"
            )


def main() -> None:
    """Check the job and print its folders; `fail_fast` sets the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m gapo_megatron.launch.prepare", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("config", help="TOML file; see configs/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--world-size", type=int, required=True, help="processes of the job")
    parser.add_argument(
        "--ranks-per-node", type=int, required=True, help="processes of each of its nodes"
    )
    parser.add_argument("--job", required=True, help="name of the job's folder of frozen code")
    parser.add_argument(
        "--restarts", type=int, default=0, help="how often the job was requeued (default: 0)"
    )
    arguments = parser.parse_intermixed_args()
    with fail_fast():
        config, code = prepare(
            arguments.config,
            arguments.overrides,
            world_size=arguments.world_size,
            job=arguments.job,
            restarts=arguments.restarts,
            ranks_per_node=arguments.ranks_per_node,
        )
        run_dir = Path(config.run.output_dir).absolute()
        finished = is_finished(run_dir, num_steps=config.run.num_steps)
        num_generation = num_generation_ranks(
            config.rollout,
            world_size=arguments.world_size,
            ranks_per_node=arguments.ranks_per_node,
        )
        state = "finished" if finished else "unfinished"
        print(run_dir, code, state, num_generation, sep="\n")


if __name__ == "__main__":
    main()
