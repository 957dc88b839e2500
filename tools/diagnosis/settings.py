"""Section `config`: what a valid config needs here, with the checks of the dry run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from gapo_megatron.config import Config
from gapo_megatron.errors import ConfigError, GapoError
from gapo_megatron.models.published import find_model
from gapo_tools.diagnosis.finding import Finding, Status, judge
from gapo_tools.dry_run.command import check_model, look_at_inputs
from gapo_tools.dry_run.data import SAMPLE
from gapo_tools.dry_run.tables import schedule
from gapo_tools.planner.hardware import GPUS
from gapo_tools.planner.layout import Layout
from gapo_tools.planner.memory import fits

_MOST_PROCESSES = 2**14


def look_at_settings(
    settings: Config, *, world_size: int, ranks_per_node: int | None
) -> Iterator[Finding]:
    """Check model, data, verifier and the layout on `world_size` processes.

    Args:
        settings: a valid config.
        world_size: number of processes; 0: those of a node with eight GPUs or, if that does not
            work, the smallest number that does.
        ranks_per_node: see `Layout.of_job`.
    """
    try:
        check_model(settings)
    except GapoError as error:
        advice = "training would stop with this error: use another folder or other parallel sizes"
        yield Finding("config", "model", "fail", str(error), advice)
    seen = look_at_inputs(settings, most=SAMPLE)
    found: dict[Status, list[str]] = {"fail": seen.errors, "warn": seen.warnings, "ok": seen.notes}
    for status, details in found.items():
        advice = "" if status == "ok" else "see docs/data.md, docs/rewards.md and docs/sandbox.md"
        for one in details:
            hint = _download(settings) if one.startswith("model.hf_dir") else advice
            yield Finding("config", "inputs", status, one, hint)
    yield from _look_at_layout(settings, world_size, ranks_per_node)


def _download(settings: Config) -> str:
    if settings.supervised:
        return "make demo creates it"
    return f"hf download --local-dir {Path(settings.model.hf_dir)} ..."


def _look_at_layout(
    settings: Config, world_size: int, ranks_per_node: int | None
) -> Iterator[Finding]:
    """How the ranks are divided, and which GPUs the run fits if the model's shape is known."""
    eight = GPUS["h100"].gpus_per_node
    sizes = [world_size] if world_size else chain([eight], range(1, _MOST_PROCESSES))
    layout, reason = None, ""
    for size in sizes:
        try:
            layout = Layout.of_job(settings, world_size=size, ranks_per_node=ranks_per_node)
            break
        except ConfigError as error:
            reason = reason or str(error)
    if layout is None:
        yield Finding("config", "world_size", "fail", reason, "the job needs one rank per GPU")
        return
    batch = settings.batch
    detail = f"{layout.world_size} ranks: {layout.cut}"
    if layout.num_generation:
        detail += f"; {layout.num_generation} more generate, {schedule(settings)}"
    detail += f"; {layout.rollout_replicas} vLLM replicas of {layout.rollout_tp_size}"
    detail += f"; {batch.rollout_prompts * batch.rollouts_per_prompt:,} sequences per step"
    yield Finding("config", "world_size", "ok", detail)
    try:
        hf_config, _ = find_model(settings.model.hf_dir)
        good, bad = fits(hf_config, settings, layout) if hf_config else ([], [])
    except GapoError:  # reported with the model
        return
    if good or bad:
        detail = f"on {layout.num_ranks} ranks it is predicted to fit {', '.join(good) or 'none'}"
        detail += f"; it does NOT fit {', '.join(bad)}" if bad else ""
        advice = "lower batch.max_tokens_per_microbatch, set model.recompute, or ask tools/plan.py"
        yield judge("config", "fits", bool(good), detail, advice, bad="warn")
