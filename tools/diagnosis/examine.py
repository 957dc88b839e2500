"""All findings, in the order of the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from gapo_tools.diagnosis import kernels, libraries
from gapo_tools.diagnosis.ask import ask
from gapo_tools.diagnosis.config import Sections, config_code, judge_config
from gapo_tools.diagnosis.finding import Finding
from gapo_tools.diagnosis.machine import look_at_machine, look_at_run_dir
from gapo_tools.diagnosis.program import look_at_program
from gapo_tools.diagnosis.slurm import look_at_slurm


def examine(config_path: str | None, env: Mapping[str, str]) -> Iterator[Finding]:
    """Run all checks; takes about fifteen seconds, mostly for imports.

    Args:
        config_path: config to check too; without one, kernels are those of the default settings.
        env: environment of this process.
    """
    asked = partial(ask, env=env)
    yield from look_at_program()
    torch = asked(libraries.TORCH)  # not in parallel, since it measures the time of the import
    config: Sections | None = None
    of_config: list[Finding] = []
    if config_path:
        config, of_config = judge_config(asked(config_code(config_path, env)), config_path)
    asked_for = ("precision", "fp8_recipe", "head")
    model = {name: config["model"][name] for name in asked_for} if config else {"precision": "bf16"}
    precision = model["precision"]
    implementation = config["optimizer"]["implementation"] if config else "auto"
    with ThreadPoolExecutor() as pool:
        policy = pool.submit(asked, kernels.policy_code(implementation=implementation, **model))
        rollout = pool.submit(asked, kernels.rollout_code(precision=precision))
        yield from libraries.look_at_libraries(torch, asked, env)
        yield from kernels.judge_policy(policy.result(), precision=precision, torch=torch)
        yield kernels.judge_rollout(rollout.result(), torch=torch)
    yield from look_at_machine(env)
    slurm = list(look_at_slurm(env))
    on_cluster = any(one.name == "cluster" for one in slurm)
    output_dir = config["run"]["output_dir"] if config else "runs"
    yield from look_at_run_dir(output_dir, on_cluster=on_cluster)
    yield from slurm
    yield from of_config
