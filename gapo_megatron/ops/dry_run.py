"""`train --dry-run`: the resolved config, and the processes, sequences and shapes it leads to.

Reads the config and, if they exist, the model's config.json and the number of problems. Builds no
model, starts no process group, needs no GPU.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gapo_megatron import rewards
from gapo_megatron.config import Config, ParallelConfig, RolloutConfig, load_config
from gapo_megatron.config.counts import num_begun
from gapo_megatron.config.rules import check_paths, inert_clip_note, missing_inputs
from gapo_megatron.config.schema import VLLM
from gapo_megatron.data.rows import count_rows
from gapo_megatron.errors import ConfigError, DataError, shown
from gapo_megatron.hf.draft_folder import check_draft, describe_draft
from gapo_megatron.hf.manifest import list_steps
from gapo_megatron.hf.model_folder import check_model_folder, has_chat_template
from gapo_megatron.io.run_folder import checkpoints_dir
from gapo_megatron.io.toml_tree import to_toml
from gapo_megatron.io.whole_table import print_whole
from gapo_megatron.models.checks import check_positions, check_replay, check_shapes
from gapo_megatron.models.config_json import ModelFacts
from gapo_megatron.models.cpu_engine import check_engine_here
from gapo_megatron.models.lora import check_adapter, why_merged_on
from gapo_megatron.models.published import find_model
from gapo_megatron.models.rules import Rule, shard_size
from gapo_megatron.models.tables import rules_for
from gapo_megatron.ops.plan.layout import (
    Layout,
    fp8_copy_bytes,
    most_microbatches,
    per_rank_parameters,
    placement,
    state_bytes,
    trained_rules,
)
from gapo_megatron.ops.plan.memory import fit_note
from gapo_megatron.ops.sides import Sides, schedule
from gapo_megatron.rollout import environments
from gapo_megatron.run.fail_fast import fail_fast
from gapo_megatron.run.processes import quiet_libraries
from gapo_megatron.run.restart import check_not_lost
from gapo_megatron.train import parse_arguments
from gapo_megatron.user_code import is_code, load

GIB = 2**30


def print_dry_run(
    config: Config,
    *,
    world_size: int,
    ranks_per_node: int | None = None,
    console: Console | None = None,
) -> None:
    """Print the resolved config as TOML, then its counts, method, shapes and memory as tables.

    If the model folder or the dataset does not exist, a message replaces what depends on it;
    `check_paths` says which missing paths are errors.

    Args:
        config: config of the run.
        world_size: processes of the job.
        ranks_per_node: None if unknown; the output then states what is assumed.
        console: where to print; None: stdout.

    Raises:
        ConfigError: world size, model and parallel sizes do not match; a branch changes a setting
            that it may not change; the run's checkpoints are missing.
        CheckpointError: the branch point is damaged, or is of another model.
    """
    console = console or Console()
    if not console.is_terminal:
        console.width = 120
    check_paths(config)
    try:
        sides = Sides.of(config, world_size=world_size, ranks_per_node=ranks_per_node)
    except ConfigError as error:
        if world_size > 1:
            raise
        raise ConfigError(f"{error}; use --rank 0/N for a dry run of N processes") from None
    layout = sides.layout

    # Everything that can be wrong, before anything is printed.
    hf_config, shipped = find_model(config.model.hf_dir)
    if hf_config is not None:
        check_shapes(hf_config, config.parallel, config.model)
        check_replay(hf_config, config.objective)
        adapter = _adapter_note(hf_config, config)
        if not shipped:
            hf_dir, has_weights = config.model.hf_dir, not config.model.megatron_dir
            check_model_folder(hf_dir, weights=has_weights, field="model.hf_dir")
    check_not_lost(config)
    _check_megatron_dir(config)
    branch = _branch_note(config)

    # The config, and its meaning.
    console.print(to_toml(config), markup=False, highlight=False, soft_wrap=True)
    console.print(_counts_table(config, sides, is_assumed=ranks_per_node is None))
    console.print(_method_table(config))
    if hf_config is None:
        console.print(
            f"Model: {config.model.hf_dir} does not exist, so shapes, memory and positions are not "
            "checked.",
            markup=False,
        )
    else:
        if shipped:
            console.print(shipped, markup=False, highlight=False, soft_wrap=True)
        rules = rules_for(hf_config)
        print_whole(console, _shapes_table(rules, config.parallel))
        print_whole(console, _memory_table(rules, config, layout))
        for note in filter(None, (adapter, _offload_note(rules, config, layout))):
            console.print(note, markup=False)
        console.print(fit_note(hf_config, config, layout), markup=False)
        if note := _positions_note(config, hf_config):
            console.print(note, markup=False)
    if config.model.megatron_dir and not Path(config.model.megatron_dir).is_dir():
        console.print(
            f"Weights: {config.model.megatron_dir} does not exist, so it is not checked.",
            markup=False,
        )
    if branch:
        console.print(branch, markup=False)
    for note in filter(None, (_engine_memory_note(config, sides), inert_clip_note(config))):
        console.print(note, markup=False)


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
        if is_code(method.family):
            from gapo_megatron.objective.families import find_family  # imports torch

            find_family(method)
    except ConfigError as error:
        found.append(str(error))
    hf_dir = Path(config.model.hf_dir)
    facts, _ = find_model(config.model.hf_dir)
    if facts is not None and config.rollout.engine == VLLM:
        serving = [
            partial(check_engine_here, facts, field="model.hf_dir", folder=config.model.hf_dir),
            partial(check_positions, facts, config),
        ]
        if Path(config.rollout.draft_hf_dir).exists():  # a missing one is in the list
            serving.append(partial(check_draft, config.rollout, facts))
        for check in serving:
            try:
                check()
            except ConfigError as error:
                found.append(str(error))
    if config.data.chat_template and hf_dir.is_dir() and not has_chat_template(hf_dir):
        found.append(
            f"data.chat_template (True): the tokenizer in model.hf_dir ({hf_dir}) has no chat "
            "template"
        )
    return found


def _counts_table(config: Config, sides: Sides, *, is_assumed: bool) -> Table:
    batch, reward, layout = config.batch, config.reward, sides.layout
    minibatch_sequences = batch.minibatch_prompts * batch.rollouts_per_prompt
    num_prompts = num_begun(batch, batch.rollout_prompts)
    begun_as = "started per step"
    begun = f"{num_prompts} prompts (batch.oversampling {batch.oversampling:g})"
    if batch.partial_rollouts:
        begun_as, num_open = "running in a step", num_prompts - batch.rollout_prompts
        begun += f"; after the first step {batch.rollout_prompts} new and {num_open} resumed"
    updates = batch.num_minibatches * config.run.num_steps
    # From the processes down to the micro-batch; rows that do not apply are left out.
    rows = {
        **_rows_of_processes(config, sides, is_assumed=is_assumed),
        **({"draft tokens": draft} if (draft := describe_draft(config.rollout)) else {}),
        "one step": f"{batch.rollout_prompts} prompts x {batch.rollouts_per_prompt} rollouts = "
        f"{batch.rollout_prompts * batch.rollouts_per_prompt:,} sequences",
        **({begun_as: begun} if batch.oversampling > 1 else {}),
        "verdicts": f"{reward.kind}, time limit {rewards.timeout_s(reward)} s; workers per rank: "
        f"{reward.num_workers or 'its share of the cores, at most 8'}",
        **({"truncated responses": "leave their group"} if reward.truncated == "unknown" else {}),
        **({"sandbox of programs": reward.sandbox} if reward.kind == "code" else {}),
        "one update": f"{batch.minibatch_prompts} prompts = {minibatch_sequences:,} "
        f"sequences, about {minibatch_sequences / layout.dp_size:g} per data-parallel rank",
        "updates per step": f"{batch.num_minibatches} (one per mini-batch): {updates:,} updates in "
        f"{config.run.num_steps:,} steps",
        "longest sequence": f"{config.data.max_prompt_tokens:,} prompt + "
        f"{config.rollout.max_response_tokens:,} response = {config.max_sequence_tokens:,} tokens",
        "one micro-batch": f"at most {batch.max_tokens_per_microbatch:,} tokens, such as "
        f"{batch.max_tokens_per_microbatch // config.max_sequence_tokens} of the longest sequences"
        + (f"; {layout.cp_size} ranks share them" if layout.cp_size > 1 else ""),
        "micro-batches": f"at most {most_microbatches(config, layout)} per update and rank, if "
        "every sequence has the maximum length",
        **_epochs(config),
    }
    table = Table(title="World-size arithmetic", title_justify="left", show_header=False)
    for name, text in rows.items():
        table.add_row(name, Text(text))  # no markup: a path may have brackets
    return table


def _rows_of_processes(config: Config, sides: Sides, *, is_assumed: bool) -> dict[str, str]:
    """What the processes do: all the same in colocated runs, else by side."""
    batch, layout, engines = config.batch, sides.layout, sides.num_engines
    vpp = config.parallel.virtual_pipeline_model_parallel_size
    cut = (
        f"{layout.world_size} = {layout.cut}"
        + (f"; {vpp} virtual stages each" if vpp > 1 else "")
        + (f"; experts over {layout.ep_size}" if layout.ep_size > 1 else "")
    )
    replicas = f"{engines}, each with {config.rollout.tensor_parallel_size} process(es)"
    dtype = f"; layers in {config.rollout.quantization}" if config.rollout.quantization else ""
    if not sides.num_generation:
        each = f"{batch.rollout_prompts / engines:g} prompts"
        return {"processes": cut, "vLLM replicas": f"{replicas} and {each}{dtype}"}
    prompts = math.ceil(num_begun(batch, batch.rollout_prompts) / engines)
    per_node = f"{sides.ranks_per_node} per node" + (
        ", assumed: LOCAL_WORLD_SIZE is not set" if is_assumed else ""
    )
    return {
        "processes": f"{sides.world_size} ({per_node}): {sides.num_training} train, "
        f"{sides.num_generation} generate",
        "training side": f"{sides.place(0, sides.num_training)}: {cut}",
        "generation side": f"{sides.place(sides.num_training, sides.num_generation)}: vLLM "
        f"replicas: {replicas} and at most {prompts} prompts = "
        f"{prompts * batch.rollouts_per_prompt} sequences{dtype}",
        "schedule": schedule(config),
    }


def _engine_memory_note(config: Config, sides: Sides) -> str:
    share = config.rollout.memory_fraction
    if not sides.num_generation or share > RolloutConfig.model_fields["memory_fraction"].default:
        return ""
    return (
        f"Hint: rollout.memory_fraction ({share:g}) can be larger, such as 0.9: a generation GPU "
        "holds only its engine."
    )


def _epochs(config: Config) -> dict[str, str]:
    """Steps per epoch; with several data sources, by source in the steps that draw from it."""
    data, num_steps, num_drawn = config.data, config.run.num_steps, 0.0
    if not data.source:
        num_drawn = num_steps * config.batch.rollout_prompts
        text = _epochs_of(data.train_path, num_drawn, num_steps, field="data.train_path")
        return {"steps per epoch": text}
    rows = {}
    for one in data.source:
        stages = [(len(steps), by.get(one.name, 0.0)) for steps, by in data.stages(num_steps)]
        num_active = sum(length for length, share in stages if share)
        if not num_active:
            rows[f"source {one.name}"] = f"not used before step {one.first_step}"
            continue
        num_drawn = config.batch.rollout_prompts * sum(length * share for length, share in stages)
        text = _epochs_of(one.path, num_drawn, num_active, field=f"data.source.{one.name}.path")
        rows[f"source {one.name}"] = (
            f"{num_drawn / num_active:g} prompts per step in {num_active:,} steps; "
            f"steps per epoch: {text}"
        )
    return rows


def _epochs_of(path: str, num_drawn: float, num_steps: int, *, field: str) -> str:
    if not Path(path).is_file():
        return f"unknown: {path} does not exist"
    try:
        num_prompts = count_rows(Path(path))
    except DataError as error:
        raise ConfigError(f"{field} ({path}): {error}") from None
    if not num_prompts:
        raise ConfigError(f"{field} ({path}) contains no problems")
    epochs = num_drawn / num_prompts
    return f"{num_steps / epochs:,.2f} ({num_prompts:,} prompts), so {epochs:.2f} epochs in the run"


def _method_table(config: Config) -> Table:
    method, k = config.objective.resolve(), config.batch.rollouts_per_prompt
    table = Table(title="Method", title_justify="left", show_header=False)
    for key in ("name", "ratio", "aggregation", "normalize_std", "focal_gamma"):
        table.add_row(key, str(getattr(method, key)))
    if is_code(method.family):
        table.add_row("loss family", method.family)
    elif not method.is_band:
        meaning = f"{method.family}: for the meaning of eps_low and eps_high see docs/objective.md"
        table.add_row("loss family", meaning)
    table.add_row("eps_low", str(method.eps_low))
    if method.adaptive:
        shown = "  ".join(f"{method.eps_high(c, group_size=k):.4g}" for c in range(1, k))
        table.add_row(f"eps_high, c=1..{k - 1}", shown)
    else:
        table.add_row("eps_high, every c", str(method.eps_high_max))
    if method.bounds != "fixed":
        table.add_row("bounds", f"{method.bounds}: each mini-batch finds its own (one more pass)")
    for key in ("ratio_max", "off_policy_mask", "second_moment_max", "positive_share_min"):
        value = getattr(method, key)
        if value is not None and math.isfinite(value):
            table.add_row(key, str(value))
    return table


def _shapes_table(rules: list[Rule], parallel: ParallelConfig) -> Table:
    table = Table(title="Parameters of one rank", title_justify="left")
    table.add_column("parameter", overflow="fold")
    for heading in ("full shape", "on one rank", "stage"):
        table.add_column(heading, no_wrap=True)
    tp_size = parallel.tensor_model_parallel_size
    for rule in rules:
        places = list(placement(rule, parallel))
        if not places:
            where = "tied to the embedding"
        elif rule.num_layers is not None:
            numbers = dict.fromkeys(count for _, count in places)
            where = f"{' or '.join(map(str, numbers))} on each"
        else:
            where = str(places[0][0])
        shapes = (rule.full_shape, rule.shard_shape(shard_size(rule, tp_size)))
        cells = [" x ".join(str(size) for size in shape) for shape in shapes]
        table.add_row(rule.megatron, *cells, where)
    return table


def _memory_table(rules: list[Rule], config: Config, layout: Layout) -> Table:
    precision = config.model.precision
    recipe = f" ({config.model.fp8_recipe})" if precision == "fp8" else ""
    rank = "rank that trains" if config.rollout.has_generation_side else "rank"
    table = Table(
        title=f"Memory of one {rank}, {precision}{recipe}, without activations (GiB)",
        title_justify="left",
    )
    copies = ["fp8 copies"] if precision == "fp8" else []
    factors = ["factors"] if config.adapter.kind != "none" else []
    state = ("weights", *copies, "gradients", "optimizer", "sum")
    for heading in ("stage", "parameters", *factors, *state):
        table.add_column(heading, justify="right")
    counts = per_rank_parameters(rules, config.parallel)
    trained = per_rank_parameters(trained_rules(rules, config.adapter), config.parallel)
    copied = fp8_copy_bytes(rules, config, layout)
    for stage, (weights, gradients, optimizer) in enumerate(state_bytes(rules, config, layout)):
        sizes = [weights, *([copied[stage]] if copies else []), gradients, optimizer]
        cells = (f"{size / GIB:.3g}" for size in (*sizes, sum(sizes)))
        numbers = (counts[stage], trained[stage]) if factors else (counts[stage],)
        table.add_row(str(stage), *(f"{number:,}" for number in numbers), *cells)
    return table


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


def _check_megatron_dir(config: Config) -> None:
    """Check the initial Megatron weights, if they and the model exist."""
    model = config.model
    if not model.megatron_dir or not Path(model.megatron_dir).is_dir():
        return
    if Path(model.hf_dir).is_dir():
        # Imports Megatron-core, which takes seconds.
        from gapo_megatron.policy.load import check_megatron_dir
        from gapo_megatron.policy.model import read_hf_config

        check_megatron_dir(config, read_hf_config(model.hf_dir))


def _branch_note(config: Config) -> str:
    given, folder = config.checkpoint.branch_from, checkpoints_dir(config.run.output_dir)
    if not given and not folder.exists():
        return ""
    # Slow to import, so only if there are checkpoints.
    from gapo_megatron.checkpoint import check_branch
    from gapo_megatron.policy.model import read_hf_config

    has_begun = bool(list_steps(folder))
    if given and not has_begun and not Path(given).parent.is_dir():
        return f"Branch: {Path(given).parent} does not exist, so {given} is not checked."
    hf_dir = config.model.hf_dir
    point = check_branch(config, read_hf_config(hf_dir) if Path(hf_dir).is_dir() else None)
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
        print_dry_run(config, world_size=num_ranks, ranks_per_node=ranks_per_node)
        if arguments.dry_run == "deep":
            quiet_libraries()
            # Slow to import.
            from gapo_megatron.ops.plan.deep_dry_run import print_deep_dry_run

            print_deep_dry_run(
                config, rank=rank, world_size=num_ranks, ranks_per_node=ranks_per_node
            )
        if reasons := why_not_run(config):
            raise ConfigError("training could not start on this machine: " + "; ".join(reasons))


if __name__ == "__main__":
    main()
