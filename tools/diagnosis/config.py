"""Section `config`: the config, on the ranks of this machine or of this job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gapo_megatron.launch.node_checks import CommandError
from gapo_tools.diagnosis.ask import Answer, probe_code
from gapo_tools.diagnosis.finding import Finding
from gapo_tools.diagnosis.machine import num_gpus

Sections = dict[str, Any]
"""A valid config: its sections, each a dict."""


def config_code(path: str, env: Mapping[str, str]) -> str:
    """Python code that prints the config, and the findings on it with the ranks here.

    The ranks are the job's tasks, or one per GPU if there is a single task, which is usually this
    check itself (`srun -n1`) and not the run.
    """
    num_tasks = int(env.get("SLURM_NTASKS") or env.get("WORLD_SIZE") or 1)
    gpus = num_gpus(env)
    world_size = num_tasks if num_tasks > 1 else gpus
    stated = env.get("SLURM_NTASKS_PER_NODE") or env.get("LOCAL_WORLD_SIZE")
    ranks_per_node = int(stated) if stated else gpus or None
    return probe_code(f"config({path!r}, {world_size}, {ranks_per_node})")


def judge_config(answer: Answer, path: str) -> tuple[Sections | None, list[Finding]]:
    """The config (None if it is wrong or cannot be read), and the findings on it.

    Args:
        answer: the answer to `config_code`.
        path: path of the config.
    """
    if isinstance(answer, CommandError):
        advice = "repair the packages and libraries above first"
        detail = f"{path} was not read: {answer}"
        return None, [Finding("config", "config", "fail", detail, advice)]
    if "error" in answer:
        return None, [Finding("config", "config", "fail", answer["error"], "see configs/")]
    findings = [Finding(**finding) for finding in answer["findings"]]
    return answer["config"], [Finding("config", "config", "ok", f"{path} is valid"), *findings]
