"""Trial runs: a few training steps of a config in a scratch folder, to measure its stages here.

As a program (`python -m gapo_megatron.ops.plan.trial CONFIG [section.key=value ...]`) it is one
rank of such a run. It trains without checkpoints and without exporting the model: for 7 billion
parameters they would be 120 GB per size, in a temporary folder that may be in memory.
"""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gapo_megatron import rewards
from gapo_megatron.config import Config, DataConfig, RewardConfig, load_config
from gapo_megatron.config.rules import input_paths
from gapo_megatron.data.messages import bind_template
from gapo_megatron.data.schema import read_training_prompts
from gapo_megatron.data.tokenizer import load_tokenizer
from gapo_megatron.errors import ConfigError
from gapo_megatron.ops.launch.ranks import ranks_command
from gapo_megatron.ops.plan.observation import Observation, read_observation
from gapo_megatron.ops.plan.workload import refuse_unmodelled
from gapo_megatron.run.fail_fast import fail_fast

_QUIET = (
    "evaluation.every_steps=0",
    "checkpoint.branch_from=",
    "metrics.tensorboard=false",
    "metrics.wandb_project=",
    "metrics.rounding_every_steps=0",
)

_LOG_LINES = 20


def default_sizes(config: Config) -> list[list[str]]:
    """The config's own step, and half its prompts: two loads separate costs from overheads."""
    batch = config.batch
    if batch.rollout_prompts % 2 or batch.minibatch_prompts % 2:
        half = [f"rollout.max_response_tokens={max(1, config.rollout.max_response_tokens // 2)}"]
    else:
        half = [
            f"batch.rollout_prompts={batch.rollout_prompts // 2}",
            f"batch.minibatch_prompts={batch.minibatch_prompts // 2}",
        ]
    return [[], half]


def trial_command(
    config_path: str, overrides: Sequence[str], *, output_dir: Path, num_steps: int, world_size: int
) -> list[str]:
    """The command line of one trial run, on one node."""
    return [
        *ranks_command("gapo_megatron.ops.plan.trial", world_size),
        config_path,
        *overrides,
        *_QUIET,
        f"run.num_steps={num_steps}",
        f"run.output_dir={output_dir}",
    ]


def run_trials(
    config_path: str,
    overrides: Sequence[str],
    *,
    sizes: Sequence[Sequence[str]],
    scratch: Path,
    num_steps: int,
    world_size: int,
    prompt_tokens: float | None = None,
) -> list[Observation]:
    """Train a few steps at every size, one after another, and read the measured times.

    Args:
        config_path: the run's config file.
        overrides: for every size.
        sizes: further overrides for each size.
        scratch: empty folder for logs and metrics, a few megabytes.
        num_steps: steps of each run; the first two are not counted.
        world_size: processes, on this node.
        prompt_tokens: mean length of a prompt; None: read from the data.

    Raises:
        ConfigError: a size is wrong, over-samples or has draft tokens (checked before any is
            trained), or a run failed; the message has the last lines of its log.
    """
    every = [[*overrides, *size] for size in sizes]
    configs = [load_config(config_path, settings) for settings in every]
    for config in configs:
        refuse_unmodelled(config)
    prompts = [prompt_tokens or mean_prompt_tokens(config) for config in configs]
    # The default of slurm/launch.sh.
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    observations = []
    for number, (size, settings) in enumerate(zip(sizes, every, strict=True)):
        name = " ".join(size) or "as configured"
        folder = scratch / f"size_{number}"
        folder.mkdir(parents=True, exist_ok=True)
        command = trial_command(
            config_path, settings, output_dir=folder, num_steps=num_steps, world_size=world_size
        )
        log = scratch / f"size_{number}.log"
        with open(log, "w", encoding="utf-8") as file:
            result = subprocess.run(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False
            )
        if result.returncode:
            last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
            raise ConfigError(
                f"the trial run {name} failed with exit code {result.returncode}; end of its log:\n"
                + "\n".join(last)
            )
        observations.append(
            read_observation(
                folder,
                mean_prompt_tokens=prompts[number],
                world_size=world_size,
                name=name,
            )
        )
    return observations


def mean_prompt_tokens(config: Config) -> float:
    """Mean prompt length of the training problems in tokens, read as the run reads them.

    Raises:
        ConfigError: the data or the tokenizer does not exist.
    """
    paths = input_paths(config)
    problems = [name for name in paths if name.startswith(("data.train_path", "data.source."))]
    for field in (*problems, "model.hf_dir"):
        path = paths[field]
        if path and not Path(path).exists():
            raise ConfigError(
                f"{field} ({path}) does not exist, so the prompt lengths cannot be read: pass "
                "--mean-prompt-tokens, or start this in the folder where the run was started"
            )
    return _mean_length(
        config.data.model_dump_json(), config.reward.model_dump_json(), config.model.hf_dir
    )


@functools.cache  # runs of a study share a data set of many problems
def _mean_length(data: str, reward: str, hf_dir: str) -> float:
    judged_by = RewardConfig.model_validate_json(reward)
    section = DataConfig.model_validate_json(data)
    tokenizer = load_tokenizer(hf_dir)
    bind_template(tokenizer, section, date=section.template_date)
    prompts = read_training_prompts(
        section,
        tokenizer=tokenizer,
        reward=judged_by,
        columns=rewards.row_columns(judged_by),
    )
    return statistics.fmean(len(prompt.token_ids) for prompt in prompts)


def main() -> None:
    """Train as the command line says, without saving weights; `fail_fast` sets the exit code."""
    with fail_fast():
        from gapo_megatron.train import train  # imports vLLM; planning does not need it

        train(load_config(sys.argv[1], sys.argv[2:]), keep_weights=False)


if __name__ == "__main__":
    main()
