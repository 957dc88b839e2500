"""Section `config`: model, data, and the world size on this machine or in this job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gapo_megatron.ops.doctor.ask import Answer, probe_code
from gapo_megatron.ops.doctor.finding import Finding, judge
from gapo_megatron.ops.doctor.machine import num_gpus
from gapo_megatron.ops.launch.node_checks import CommandError

Sections = dict[str, Any]
"""A valid config: its sections, each a dict."""


def config_code(path: str, env: Mapping[str, str]) -> str:
    """Python code that prints the config, its model, and its layout on the ranks here.

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
    config = answer["config"]
    return config, [
        Finding("config", "config", "ok", f"{path} is valid"),
        _judge_model(answer["model"], config),
        *_look_at_data(config),
        _judge_verifier(answer["verifier"], config),
        *_judge_world_size(answer["world_size"]),
        *_judge_memory(answer["memory"]),
    ]


def _judge_model(answer: dict[str, Any], config: Sections) -> Finding:
    """Whether model config, tokenizer and weights exist and match each other and the layout."""
    if "error" not in answer:
        detail = f"{answer['architecture']}, weights from {answer['weights']}"
        return Finding("config", "model", "ok", detail)
    folder = config["model"]["hf_dir"]
    advice = (
        "make demo creates it" if config["supervised"] else f"hf download --local-dir {folder} ..."
    )
    if Path(folder).is_dir():
        advice = "training would stop with this error: use another folder or other parallel sizes"
    return Finding("config", "model", "fail", answer["error"], advice)


def _judge_verifier(answer: dict[str, Any], config: Sections) -> Finding:
    """Whether the verifier runs on this machine."""
    if "error" in answer:
        advice = "see docs/sandbox.md, or run this check on a node that generates"
        return Finding("config", "verifier", "fail", answer["error"], advice)
    return Finding("config", "verifier", "ok", f"reward.kind {config['reward']['kind']}")


def _judge_world_size(answer: dict[str, Any]) -> Iterator[Finding]:
    """The layout of the ranks; in a run with generation ranks, one line for each side."""
    if "error" in answer:
        advice = "the job needs one rank per GPU"
        yield Finding("config", "world_size", "fail", answer["error"], advice)
        return
    sequences = "{rollout_sequences:,} sequences per step".format_map(answer)
    if not answer["generation"]:
        detail = "{world_size} = {cut}; {sequences}; any multiple of {smallest} works"
        detail = detail.format_map(answer | {"sequences": sequences})
        yield Finding("config", "world_size", "ok", detail)
        return
    detail = "{world_size}, at least {smallest}; {schedule}".format_map(answer)
    yield Finding("config", "world_size", "ok", detail)
    detail = "{training} = {cut}; needs `one update` above to pass".format_map(answer)
    yield Finding("config", "training side", "ok", detail)
    detail = "{generation}: {engines}; {sequences}; needs `rollout` and `verifier` above to pass"
    detail = detail.format_map(answer | {"sequences": sequences})
    yield Finding("config", "generation side", "ok", detail)


def _judge_memory(answer: dict[str, Any]) -> Iterator[Finding]:
    """Which GPUs the run fits, as in the dry run; nothing if the model's shapes are unknown."""
    if "error" in answer or not answer["world_size"]:
        return  # reported with the model or the world size
    fits, not_fits = ", ".join(answer["fits"]), ", ".join(answer["not_fits"])
    detail = f"on {answer['world_size']} ranks it is predicted to fit {fits or 'no known GPU'}"
    advice = "lower batch.max_tokens_per_microbatch, set model.recompute, or ask tools/plan.py"
    detail += f"; it does NOT fit {not_fits}" if not_fits else ""
    yield judge("config", "fits", bool(fits), detail, advice, bad="warn")


def _look_at_data(config: Sections) -> Iterator[Finding]:
    """The files with problems."""
    least = {"train_path": config["batch"]["rollout_prompts"], "eval_path": 1}
    for name, count in least.items():
        if path := config["data"][name]:
            yield _look_at_file(name, Path(path), least=count)


def _look_at_file(name: str, path: Path, *, least: int) -> Finding:
    if not path.is_file():
        return Finding("config", name, "fail", f"{path} does not exist", "see docs/data.md")
    with path.open("rb") as lines:
        count = sum(1 for line in lines if line.strip())
    advice = "a batch needs distinct problems: add problems, or lower batch.rollout_prompts"
    return judge("config", name, count >= least, f"{path}: {count:,} problems", advice)
