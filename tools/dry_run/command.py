"""`train --dry-run`: what the run would find, what its config leads to, and its settings.

Reads the config and, if they exist, the model's folder and its tokenizer, rows of the data and the
manifest of the newest checkpoint. Builds no model, starts no process group, needs no GPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from gapo_megatron import rewards
from gapo_megatron.config import Config, load_config
from gapo_megatron.config.rules import check_paths, inert_clip_note, missing_inputs
from gapo_megatron.config.schema import VLLM
from gapo_megatron.data.template_date import DATE_NAME, asks_date, expected_date, read_date
from gapo_megatron.errors import ConfigError, shown
from gapo_megatron.formats.draft_folder import check_draft
from gapo_megatron.formats.manifest import list_steps
from gapo_megatron.formats.model_folder import check_model_folder, read_chat_template
from gapo_megatron.io.run_folder import checkpoints_dir
from gapo_megatron.io.toml_tree import to_toml
from gapo_megatron.models.checks import check_positions, check_replay, check_shapes
from gapo_megatron.models.config_json import ModelFacts
from gapo_megatron.models.cpu_engine import check_engine_here, check_routes_here
from gapo_megatron.models.lora import check_adapter, why_merged_on
from gapo_megatron.models.published import find_model
from gapo_megatron.models.rules import Rule
from gapo_megatron.models.tables import rules_for
from gapo_megatron.rollout import environments
from gapo_megatron.run.fail_fast import fail_fast
from gapo_megatron.run.processes import quiet_libraries
from gapo_megatron.run.restart import check_not_lost
from gapo_megatron.train import parse_arguments
from gapo_megatron.user_code import is_code, load
from gapo_tools.dry_run.data import SAMPLE, Seen, look_at_data
from gapo_tools.dry_run.tables import counts_table, memory_table, method_table, shapes_table
from gapo_tools.planner.hardware import GIB
from gapo_tools.planner.layout import Layout
from gapo_tools.planner.memory import fits
from gapo_tools.planner.state import state_bytes
from gapo_tools.planner.tables import print_whole


def print_dry_run(
    config: Config,
    *,
    world_size: int,
    ranks_per_node: int | None = None,
    console: Console | None = None,
    look: Callable[[], Seen] = Seen,
    all_settings: bool = False,
) -> list[str]:
    """Print whether the run would start, what was found, what follows from it, and the settings.

    All is TOML but for the tables: settings that are not the default, after the tables; or
    all of them, without tables.

    If the model folder or the dataset does not exist, a message replaces what depends on it;
    `check_paths` says which missing paths are errors.

    Args:
        config: the run's config.
        world_size: processes of the job.
        ranks_per_node: None if unknown; the output then states what is assumed.
        console: where to print; None: stdout.
        look: called once all that the config alone tells has been checked; its errors come first.
        all_settings: print every setting instead of the tables.

    Returns:
        The errors of `look`.

    Raises:
        ConfigError: world size, model and parallel sizes do not match; a branch or a resume changes
            a setting that it may not change; the run's checkpoints are missing.
        CheckpointError: the branch point is damaged, or is of another model.
    """
    console = console or Console(markup=False)
    if not console.is_terminal:
        console.width = 120
    check_paths(config)
    try:
        layout = Layout.of_job(config, world_size=world_size, ranks_per_node=ranks_per_node)
    except ConfigError as error:
        if world_size > 1:
            raise
        raise ConfigError(f"{error}; use --rank 0/N for a dry run of N processes") from None

    # Everything that can be wrong, before anything is printed.
    hf_config, shipped = check_model(config)
    check_not_lost(config)
    branch = _branch_note(config)

    rules = [] if hf_config is None else rules_for(hf_config)
    seen = look()
    num_errors = f"{len(seen.errors)} error" + "s" * (len(seen.errors) > 1)
    notes = [
        f"Training could NOT start here: {num_errors}." if seen.errors else "Found no error.",
        *(f"error: {error}" for error in seen.errors),
        *(f"warning: {warning}" for warning in seen.warnings),
        *seen.notes,
        shipped,
        *_model_notes(config, hf_config, rules, layout),
        _date_note(config),
        branch,
        inert_clip_note(config),
    ]
    for note in filter(None, notes):
        text = "# " + note.replace("\n", "\n# ")
        console.print(text, highlight=False, soft_wrap=True)
    if not all_settings:
        console.print(counts_table(config, layout, ranks_per_node=ranks_per_node))
        console.print(method_table(config))
        if rules:
            print_whole(console, shapes_table(rules, config.parallel))
            print_whole(console, memory_table(rules, config, layout))
        console.print("# Settings that are not the default (--dry-run=settings prints all):")
    text = to_toml(config, without_defaults=not all_settings)
    console.print(text, highlight=False, soft_wrap=True)
    return seen.errors


def check_model(config: Config) -> tuple[ModelFacts | None, str]:
    """Check the model, as far as it is here, against the config.

    Returns:
        The model, or None if nothing is known of it; a sentence if its shape is one that the
        package ships (`models.published.find_model`).

    Raises:
        ConfigError: the model's files are damaged, or do not fit the config.
        ConversionError: the weights' headers are damaged.
    """
    hf_dir, megatron_dir = config.model.hf_dir, config.model.megatron_dir
    hf_config, shipped = find_model(hf_dir)
    if hf_config is not None:
        check_shapes(hf_config, config.parallel, config.model)
        check_replay(hf_config, config.objective)
        check_adapter(hf_config, config.adapter, config.parallel)
        if not shipped:
            check_model_folder(hf_dir, weights=not megatron_dir, field="model.hf_dir")
    if megatron_dir and Path(megatron_dir).is_dir() and Path(hf_dir).is_dir():
        # Imports Megatron-core, which takes seconds.
        from gapo_megatron.policy.load import check_megatron_dir
        from gapo_megatron.policy.model import read_hf_config

        check_megatron_dir(config, read_hf_config(hf_dir))
    return hf_config, shipped


def _model_notes(
    config: Config, hf_config: ModelFacts | None, rules: list[Rule], layout: Layout
) -> Iterator[str]:
    """What the model and its layout lead to, besides the tables."""
    if hf_config is None:
        yield (
            f"Model: {config.model.hf_dir} does not exist, so shapes, memory and positions are not "
            "checked."
        )
    else:
        yield _adapter_note(hf_config, config)
        yield _offload_note(rules, config, layout)
        yield _fit_note(hf_config, config, layout)
        yield _positions_note(config, hf_config)
    if config.model.megatron_dir and not Path(config.model.megatron_dir).is_dir():
        yield f"Weights: {config.model.megatron_dir} does not exist, so it is not checked."


def look_at_inputs(config: Config, *, most: int | None) -> Seen:
    """What a run on this machine would find: `why_not_run`, and its data (`look_at_data`).

    Args:
        config: the run's config.
        most: rows of each file to read; None: all.
    """
    reasons = why_not_run(config)
    # The tokenizer comes with transformers: seconds, spent only where nothing else is wrong.
    seen = look_at_data(config, most=most, tokenises=not reasons)
    return replace(seen, errors=[*dict.fromkeys([*reasons, *seen.errors])])


def why_not_run(config: Config) -> list[str]:
    """Reasons why the run itself could not start on this machine; see `missing_inputs`.

    They do not stop the dry run, whose tables are useful on a laptop too.
    """
    found = missing_inputs(config)
    checks: tuple[Callable[[], None], ...] = (
        partial(rewards.check, config.reward),
        partial(environments.check, config.environment, system_prompt=config.data.system_prompt),
    )
    for check in checks:
        try:
            check()
        except ConfigError as error:
            found.append(str(error))
    method, engine = config.objective.resolve(), config.rollout.engine
    try:
        if is_code(engine):
            load(engine, setting="rollout.engine")
        if is_code(method.family + method.advantages):
            from gapo_megatron.objective.families import find_family  # imports torch
            from gapo_megatron.objective.groups import find_advantages

            find_family(method)
            find_advantages(method)
    except ConfigError as error:
        found.append(str(error))
    hf_dir = Path(config.model.hf_dir)
    facts, _ = find_model(config.model.hf_dir)
    if facts is not None and config.rollout.engine == VLLM:
        serving = [
            partial(check_engine_here, facts, field="model.hf_dir", folder=config.model.hf_dir),
            partial(check_routes_here, config.objective),
            partial(check_positions, facts, config.max_sequence_tokens),
        ]
        if Path(config.rollout.draft_hf_dir).exists():  # a missing one is in the list
            serving.append(partial(check_draft, config.rollout, facts))
        for check in serving:
            try:
                check()
            except ConfigError as error:
                found.append(str(error))
    if config.data.chat_template and hf_dir.is_dir() and not read_chat_template(hf_dir):
        found.append(
            f"data.chat_template (True): the tokenizer in model.hf_dir ({hf_dir}) has no chat "
            "template"
        )
    return found


def _adapter_note(hf_config: ModelFacts, config: Config) -> str:
    """How many linear layers get factors; empty without an adapter."""
    counts = check_adapter(hf_config, config.adapter, config.parallel)
    if not counts:
        return ""
    shown = ", ".join(f"{target}: {count}" for target, count in counts.items())
    note = (
        f"Adapter: {config.adapter.kind} of rank {config.adapter.rank} beside "
        f"{sum(counts.values())} linear layers ({shown}); only these factors are trained."
    )
    if config.rollout.engine == VLLM and (reason := why_merged_on("cuda", config, hf_config)):
        note += (
            f" The engine gets merged weights, rounded to the model's dtype, because of {reason}; "
            "sync/merge_rounding measures what that costs."
        )
        if config.objective.old_log_probs == "rollout":
            note += " The start refuses objective.old_log_probs ('rollout') there."
    return note


def _fit_note(hf_config: ModelFacts, config: Config, layout: Layout) -> str:
    """The GPUs that a run is predicted to fit, and those it does not fit."""
    good, bad = fits(hf_config, config, layout)
    text = f"Predicted to fit: {', '.join(good) or 'none of the GPUs that the planner knows'}."
    if not bad:
        return text
    return (
        f"{text} Does NOT fit: {', '.join(bad)}. To make it fit, lower "
        "batch.max_tokens_per_microbatch, set model.recompute, change rollout.memory_fraction, or "
        "let tools/plan.py --gpu find a layout."
    )


def _offload_note(rules: list[Rule], config: Config, layout: Layout) -> str:
    if config.optimizer.offload == "none":
        return ""
    is_all = config.optimizer.offload == "all"
    parts = "weights and optimizer state" if is_all else "optimizer state"
    states = state_bytes(rules, config, layout)
    most = max(optimizer + is_all * weights for weights, _, optimizer in states)
    return (
        f"Offload of {parts} pins up to {most / GIB:.3g} GiB of host memory per rank; multiply by "
        "the ranks of a node."
    )


def _branch_note(config: Config) -> str:
    given, folder = config.checkpoint.branch_from, checkpoints_dir(config.run.output_dir)
    if not given and not folder.exists():
        return ""
    # Slow to import, so only if there are checkpoints.
    from gapo_megatron.checkpoint import check_branch, check_resume
    from gapo_megatron.policy.model import read_hf_config

    has_begun = bool(list_steps(folder))
    if given and not has_begun and not Path(given).parent.is_dir():
        return f"Branch: {Path(given).parent} does not exist, so {given} is not checked."
    hf_dir = config.model.hf_dir
    hf_config = read_hf_config(hf_dir) if Path(hf_dir).is_dir() else None
    if hf_config is not None:
        check_resume(config.run.output_dir, hf_config, config)
    point = check_branch(config, hf_config)
    if point is None:
        return f"Branch: started from {given}; resumes from its own checkpoints." if given else ""
    changed = [
        f"{name} = {now!r} (was {was!r})" for name, (was, now) in point.branch.changes.items()
    ]
    return (
        f"Branch: starts from step {point.branch.step} of {point.branch.run}, "
        f"{point.path.name} (manifest {point.branch.manifest_sha256[:12]}), with "
        + (", ".join(changed) or "the same settings")
        + "."
    )


def _positions_note(config: Config, hf_config: ModelFacts) -> str:
    positions: int = hf_config.max_position_embeddings
    if positions >= config.max_sequence_tokens:
        return ""
    return (
        f"data.max_prompt_tokens + rollout.max_response_tokens = {config.max_sequence_tokens} "
        f"exceeds the model's max_position_embeddings ({positions}): positions beyond extrapolate."
    )


def _date_note(config: Config) -> str:
    """Which date prompts have; empty if the chat template asks for none."""
    data, folder = config.data, config.run.output_dir
    is_used = data.chat_template or config.environment.is_called
    if not is_used or not asks_date(read_chat_template(Path(config.model.hf_dir))):
        return ""
    date, begun = expected_date(folder, pinned=data.template_date), Path(folder, DATE_NAME)
    if data.template_date:
        why = "data.template_date"
    elif read_date(folder):
        why = f"frozen in {begun}"
    elif config.checkpoint.branch_from:
        return "Date in the chat template: that of the run that this one branches from."
    else:
        why = f"today; the start freezes it in {begun}, data.template_date pins another"
    return f"Date in the chat template: {date} ({why})."


def _stated_ranks_per_node() -> int | None:
    """Ranks per node, if a launcher or Slurm states it; ConfigError if it is no number."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        if stated := os.environ.get(name):
            if not re.fullmatch("[1-9][0-9]{0,4}", stated):
                raise ConfigError(f"{name} ({shown(stated)}) must be a whole number from 1")
            return int(stated)
    return None


def main() -> None:
    """Do a dry run with the command line of `train`."""
    arguments = parse_arguments()
    rank, num_ranks = arguments.rank
    with fail_fast():
        config = load_config(arguments.config, arguments.overrides)
        ranks_per_node = _stated_ranks_per_node()
        most = None if arguments.dry_run == "data" else SAMPLE
        reasons = print_dry_run(
            config,
            world_size=num_ranks,
            ranks_per_node=ranks_per_node,
            look=partial(look_at_inputs, config, most=most),
            all_settings=arguments.dry_run == "settings",
        )
        if arguments.dry_run == "deep":
            quiet_libraries()
            # Slow to import.
            from gapo_tools.planner.deep_dry_run import print_deep_dry_run

            print_deep_dry_run(
                config, rank=rank, world_size=num_ranks, ranks_per_node=ranks_per_node
            )
        if reasons:
            raise ConfigError("training could not start on this machine: " + "; ".join(reasons))


if __name__ == "__main__":
    main()
