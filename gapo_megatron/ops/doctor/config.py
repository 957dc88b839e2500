"""Section `config`: model, data, and the world size that this machine or job would give it."""

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
    """Python that answers with the config, its model, and what it means on the ranks here.

    Those are the job's, or one per GPU: a single task is as a rule this look (`srun -n1`), not
    the run.
    """
    num_tasks = int(env.get("SLURM_NTASKS") or env.get("WORLD_SIZE") or 1)
    gpus = num_gpus(env)
    world_size = num_tasks if num_tasks > 1 else gpus
    stated = env.get("SLURM_NTASKS_PER_NODE") or env.get("LOCAL_WORLD_SIZE")
    ranks_per_node = int(stated) if stated else gpus or None
    return probe_code(f"config({path!r}, {world_size}, {ranks_per_node})")


def judge_config(answer: Answer, path: str) -> tuple[Sections | None, list[Finding]]:
    """The config, None where it is wrong or cannot be read, and what there is to say of it.

    Args:
        answer: of `config_code`.
        path: that it was asked for.
    """
    if isinstance(answer, CommandError):
        advice = "mend what is said of packages and libraries above"
        detail = f"{path} not read: {answer}"
        return None, [Finding("config", "config", "fail", detail, advice)]
    if "error" in answer:
        return None, [Finding("config", "config", "fail", answer["error"], "see docs and configs/")]
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
    """Whether config, tokenizer and weights are there and fit each other and the parallel sizes."""
    if "error" not in answer:
        detail = f"{answer['architecture']}, weights of {answer['weights']}"
        return Finding("config", "model", "ok", detail)
    folder = config["model"]["hf_dir"]
    advice = (
        "make demo makes it" if config["supervised"] else f"hf download --local-dir {folder} ..."
    )
    if Path(folder).is_dir():
        advice = "training would end with this error: another folder, or other parallel sizes"
    return Finding("config", "model", "fail", answer["error"], advice)


def _judge_verifier(answer: dict[str, Any], config: Sections) -> Finding:
    """Whether responses can be judged here."""
    if "error" in answer:
        advice = "see docs/sandbox.md, or look on a node that generates"
        return Finding("config", "verifier", "fail", answer["error"], advice)
    return Finding("config", "verifier", "ok", f"reward.kind {config['reward']['kind']}")


def _judge_world_size(answer: dict[str, Any]) -> Iterator[Finding]:
    """What the ranks are for; of a run with two sides, a line for each, and what it needs."""
    if "error" in answer:
        advice = "ranks: one per GPU of the job"
        yield Finding("config", "world_size", "fail", answer["error"], advice)
        return
    sequences = "{rollout_sequences:,} sequences a step".format_map(answer)
    if not answer["generation"]:
        detail = "{world_size} = {cut}; {sequences}; any multiple of {smallest} will do"
        detail = detail.format_map(answer | {"sequences": sequences})
        yield Finding("config", "world_size", "ok", detail)
        return
    detail = "{world_size}, at least {smallest}; {schedule}".format_map(answer)
    yield Finding("config", "world_size", "ok", detail)
    detail = "{training} = {cut}; needs what `one update` above needs".format_map(answer)
    yield Finding("config", "training side", "ok", detail)
    detail = "{generation}: {engines}; {sequences}; needs `rollout` and `verifier` above"
    detail = detail.format_map(answer | {"sequences": sequences})
    yield Finding("config", "generation side", "ok", detail)


def _judge_memory(answer: dict[str, Any]) -> Iterator[Finding]:
    """Which GPUs the run fits, as the dry run says it; nothing where its shapes are not known."""
    if "error" in answer or not answer["world_size"]:
        return  # said of the model or the world size
    fits, not_fits = ", ".join(answer["fits"]), ", ".join(answer["not_fits"])
    detail = f"on {answer['world_size']} ranks predicted to fit {fits or 'no known GPU'}"
    advice = "lower batch.max_tokens_per_microbatch, set model.recompute, or ask tools/plan.py"
    detail += f"; NOT {not_fits}" if not_fits else ""
    yield judge("config", "fits", bool(fits), detail, advice, bad="warn")


def _look_at_data(config: Sections) -> Iterator[Finding]:
    """Files of problems."""
    least = {"train_path": config["batch"]["rollout_prompts"], "eval_path": 1}
    for name, count in least.items():
        if path := config["data"][name]:
            yield _look_at_file(name, Path(path), least=count)


def _look_at_file(name: str, path: Path, *, least: int) -> Finding:
    if not path.is_file():
        return Finding("config", name, "fail", f"no file {path}", "see docs/data.md")
    with path.open("rb") as lines:
        count = sum(1 for line in lines if line.strip())
    advice = "a batch repeats no problem: more problems, or a smaller batch.rollout_prompts"
    return judge("config", name, count >= least, f"{path}: {count:,} problems", advice)
