"""Section `config`: what a valid config needs here, with the trainer's code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gapo_megatron import rewards
from gapo_megatron.config import Config
from gapo_megatron.config.rules import missing_inputs
from gapo_megatron.errors import ConfigError, GapoError
from gapo_megatron.formats.headers import find_files
from gapo_megatron.formats.model_folder import check_model_folder
from gapo_megatron.models.published import find_model
from gapo_tools.diagnosis.finding import Finding, Status, judge
from gapo_tools.dry_run.data import look_at_data
from gapo_tools.dry_run.tables import schedule
from gapo_tools.planner.hardware import GPUS
from gapo_tools.planner.memory import fits
from gapo_tools.planner.sides import Sides

_MOST_PROCESSES = 2**14


def look_at_settings(
    settings: Config, *, world_size: int, ranks_per_node: int | None
) -> Iterator[Finding]:
    """Check model, data, verifier and the layout on `world_size` processes.

    Args:
        settings: a valid config.
        world_size: number of processes; 0: the smallest that works, and eight for the memory.
        ranks_per_node: see `Sides.of`.
    """
    model, verifier = _look_at_model(settings), _look_at_verifier(settings)
    yield model
    yield from _look_at_data(settings, tokenises=model.status == verifier.status == "ok")
    yield verifier
    yield from _look_at_world_size(settings, world_size, ranks_per_node)
    yield from _look_at_memory(settings, world_size, ranks_per_node)


def _look_at_model(settings: Config) -> Finding:
    """Open config, tokenizer and weights as the trainer does; of the weights, only headers."""
    from gapo_megatron.data.tokenizer import load_tokenizer
    from gapo_megatron.models.checks import check_replay, check_shapes
    from gapo_megatron.policy.load import check_megatron_dir
    from gapo_megatron.policy.model import read_hf_config

    hf_dir, megatron_dir = settings.model.hf_dir, settings.model.megatron_dir
    try:
        facts = check_model_folder(hf_dir, weights=not megatron_dir, field="model.hf_dir")
        hf_config = read_hf_config(hf_dir)
        check_shapes(hf_config, settings.parallel, settings.model)
        check_replay(hf_config, settings.objective)
        load_tokenizer(hf_dir, facts=facts)
        if megatron_dir:
            check_megatron_dir(settings, hf_config)
        else:
            find_files(hf_dir)
    except GapoError as error:
        if Path(hf_dir).is_dir():
            advice = (
                "training would stop with this error: use another folder or other parallel sizes"
            )
        elif settings.supervised:
            advice = "make demo creates it"
        else:
            advice = f"hf download --local-dir {hf_dir} ..."
        return Finding("config", "model", "fail", str(error), advice)
    detail = f"{hf_config.architectures[0]}, weights from {megatron_dir or hf_dir}"
    return Finding("config", "model", "ok", detail)


def _look_at_data(settings: Config, *, tokenises: bool) -> Iterator[Finding]:
    """The problem files: what is missing, and what a dry run finds in the others."""
    missing = [one for one in missing_inputs(settings) if one.startswith("data.")]
    seen = look_at_data(settings, tokenises=tokenises)
    found: dict[Status, list[str]] = {
        "fail": [*missing, *seen.errors],
        "warn": seen.warnings,
        "ok": seen.notes,
    }
    for status, details in found.items():
        advice = "" if status == "ok" else "see docs/data.md and docs/rewards.md"
        yield from (Finding("config", "data", status, one, advice) for one in details)


def _look_at_verifier(settings: Config) -> Finding:
    """Whether the verifier runs on this machine."""
    try:
        rewards.check(settings.reward)
    except GapoError as error:
        advice = "see docs/sandbox.md, or run this check on a node that generates"
        return Finding("config", "verifier", "fail", str(error), advice)
    return Finding("config", "verifier", "ok", f"reward.kind {settings.reward.kind}")


def _look_at_world_size(
    settings: Config, world_size: int, ranks_per_node: int | None
) -> Iterator[Finding]:
    """The layout of the ranks; in a run with generation ranks, one line for each side."""

    def divides(size: int) -> bool:
        try:
            Sides.of(settings, world_size=size, ranks_per_node=ranks_per_node)
        except ConfigError:
            return False
        return True

    try:
        smallest = next(filter(divides, range(1, _MOST_PROCESSES)), 1)
        sides = Sides.of(settings, world_size=world_size or smallest, ranks_per_node=ranks_per_node)
    except GapoError as error:
        advice = "the job needs one rank per GPU"
        yield Finding("config", "world_size", "fail", str(error), advice)
        return
    trained, generated, batch = sides.num_training, sides.num_generation, settings.batch
    sequences = f"{batch.rollout_prompts * batch.rollouts_per_prompt:,} sequences per step"
    if not generated:
        detail = f"{sides.world_size} = {sides.layout.cut}; {sequences}"
        detail += f"; any multiple of {smallest} works"
        yield Finding("config", "world_size", "ok", detail)
        return
    detail = f"{sides.world_size}, at least {smallest}; {schedule(settings)}"
    yield Finding("config", "world_size", "ok", detail)
    detail = f"{trained}, {sides.place(0, trained)} = {sides.layout.cut}"
    detail += "; needs `one update` above to pass"
    yield Finding("config", "training side", "ok", detail)
    detail = f"{generated}, {sides.place(trained, generated)}: {sides.num_engines} vLLM replicas "
    detail += f"of {settings.rollout.tensor_parallel_size}; {sequences}"
    detail += "; needs `rollout` and `verifier` above to pass"
    yield Finding("config", "generation side", "ok", detail)


def _look_at_memory(
    settings: Config, world_size: int, ranks_per_node: int | None
) -> Iterator[Finding]:
    """Which GPUs the run fits, as in the dry run; nothing if the model's shapes are unknown."""
    size = world_size or GPUS["h100"].gpus_per_node
    try:
        hf_config, _ = find_model(settings.model.hf_dir)
        if hf_config is None:
            return
        layout = Sides.of(settings, world_size=size, ranks_per_node=ranks_per_node).layout
        good, bad = fits(hf_config, settings, layout)
    except GapoError:  # reported with the model or the world size
        return
    detail = f"on {size} ranks it is predicted to fit {', '.join(good) or 'no known GPU'}"
    detail += f"; it does NOT fit {', '.join(bad)}" if bad else ""
    advice = "lower batch.max_tokens_per_microbatch, set model.recompute, or ask tools/plan.py"
    yield judge("config", "fits", bool(good), detail, advice, bad="warn")
