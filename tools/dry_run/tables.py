"""Tables of the dry run: counts, method, shapes and memory without activations."""

from __future__ import annotations

import math
from pathlib import Path

from rich.table import Table
from rich.text import Text

from gapo_megatron import rewards
from gapo_megatron.config import Config, ParallelConfig
from gapo_megatron.config.counts import num_begun, usual_ranks_per_node
from gapo_megatron.config.rules import why_missing
from gapo_megatron.data.rows import count_rows
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.formats.draft_folder import describe_draft
from gapo_megatron.models.rules import Rule, shard_size
from gapo_megatron.user_code import is_code
from gapo_tools.planner.hardware import GIB
from gapo_tools.planner.layout import Layout, place_of_ranks
from gapo_tools.planner.state import (
    fp8_copy_bytes,
    most_microbatches,
    per_rank_parameters,
    placement,
    state_bytes,
    trained_rules,
)


def counts_table(config: Config, layout: Layout, *, ranks_per_node: int | None) -> Table:
    """Processes, sequences and micro-batches; `ranks_per_node` is None if it is not stated."""
    batch, reward = config.batch, config.reward
    minibatch_sequences = batch.minibatch_prompts * batch.rollouts_per_prompt
    num_prompts = num_begun(batch, batch.rollout_prompts)
    begun_as = "started per step"
    begun = f"{num_prompts} prompts (batch.oversampling {batch.oversampling:g})"
    if batch.partial_rollouts:
        begun_as, num_open = "running in a step", num_prompts - batch.rollout_prompts
        begun += f"; after the first step {batch.rollout_prompts} new and {num_open} resumed"
    runs_programs = any(one.kind == "code" for one in reward.parts)
    updates = batch.num_minibatches * config.run.num_steps
    # From the processes down to the micro-batch; rows that do not apply are left out.
    rows = {
        **_rows_of_processes(config, layout, ranks_per_node=ranks_per_node),
        **({"draft tokens": draft} if (draft := describe_draft(config.rollout)) else {}),
        "one step": f"{batch.rollout_prompts} prompts x {batch.rollouts_per_prompt} rollouts = "
        f"{batch.rollout_prompts * batch.rollouts_per_prompt:,} sequences",
        **({begun_as: begun} if batch.oversampling > 1 else {}),
        "verdicts": f"{reward.label}, time limit "
        f"{max(rewards.timeout_s(one, reward) for one in reward.parts)} s; "
        f"workers per rank: {reward.num_workers or 'its share of the cores, at most 8'}",
        **({"truncated responses": "leave their group"} if reward.truncated == "unknown" else {}),
        **({"sandbox of programs": reward.sandbox} if runs_programs else {}),
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


def _rows_of_processes(
    config: Config, layout: Layout, *, ranks_per_node: int | None
) -> dict[str, str]:
    """What the processes do: all the same in colocated runs, else by side."""
    batch, engines = config.batch, layout.rollout_replicas
    vpp = config.parallel.virtual_pipeline_model_parallel_size
    cut = (
        f"{layout.world_size} = {layout.cut}"
        + (f"; {vpp} virtual stages each" if vpp > 1 else "")
        + (f"; experts over {layout.ep_size}" if layout.ep_size > 1 else "")
    )
    replicas = f"{engines}, each with {config.rollout.tensor_parallel_size} process(es)"
    dtype = f"; layers in {config.rollout.quantization}" if config.rollout.quantization else ""
    if not layout.num_generation:
        each = f"{batch.rollout_prompts / engines:g} prompts"
        return {"processes": cut, "vLLM replicas": f"{replicas} and {each}{dtype}"}
    prompts = math.ceil(num_begun(batch, batch.rollout_prompts) / engines)
    size = ranks_per_node or usual_ranks_per_node(layout.num_ranks)
    assumed = "" if ranks_per_node else ", assumed: LOCAL_WORLD_SIZE is not set"
    training = place_of_ranks(0, layout.world_size, ranks_per_node=size)
    generation = place_of_ranks(layout.world_size, layout.num_generation, ranks_per_node=size)
    return {
        "processes": f"{layout.num_ranks} ({size} per node{assumed}): {layout.world_size} train, "
        f"{layout.num_generation} generate",
        "training side": f"{training}: {cut}",
        "generation side": f"{generation}: vLLM replicas: {replicas} and at most {prompts} "
        f"prompts = {prompts * batch.rollouts_per_prompt} sequences{dtype}",
        "schedule": schedule(config),
    }


def schedule(config: Config) -> str:
    """When a run with a generation side generates, as text for people."""
    what = "the end of a batch" if config.batch.partial_rollouts else "a batch"
    if (most := config.rollout.max_staleness) == 0:
        return (
            f"on-policy: the sides take turns; {what} is sampled by the weights that learn from it"
        )
    every = "step" if most == 1 else f"{most} steps"
    return (
        f"off-policy: generation runs ahead; {what} is sampled by weights at most {most} behind "
        f"those that learn from it, and weights are sent after every {every}"
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
        field = f"data.source.{one.name}.path"
        size = one.size if one.is_generated else None
        text = _epochs_of(one.path, num_drawn, num_active, field=field, size=size)
        rows[f"source {one.name}"] = (
            f"{num_drawn / num_active:g} prompts per step in {num_active:,} steps; "
            f"steps per epoch: {text}"
        )
    return rows


def _epochs_of(
    path: str, num_drawn: float, num_steps: int, *, field: str, size: int | None = None
) -> str:
    """Epochs of a file, or of `size` generated problems."""
    if size is None and (why := why_missing("data.", path)):
        return f"unknown: {path} {why}"
    try:
        num_prompts = count_rows(Path(path)) if size is None else size
    except DataError as error:
        raise ConfigError(f"{field} ({path}): {error}") from None
    if not num_prompts:
        raise ConfigError(f"{field} ({path}) contains no problems")
    epochs = num_drawn / num_prompts
    return f"{num_steps / epochs:,.2f} ({num_prompts:,} prompts), so {epochs:.2f} epochs in the run"


def method_table(config: Config) -> Table:
    """The resolved objective, with its upper clip by c."""
    method, k = config.objective.resolve(), config.batch.rollouts_per_prompt
    table = Table(title="Method", title_justify="left", show_header=False)
    shape = ("advantages",) if method.advantages else ("normalize_std", "focal_gamma")
    for key in ("name", "ratio", "aggregation", *shape):
        table.add_row(key, str(getattr(method, key)))
    if is_code(method.family):
        table.add_row("loss family", method.family)
    elif not method.is_band:
        meaning = f"{method.family}: for the meaning of eps_low and eps_high see docs/objective.md"
        table.add_row("loss family", meaning)
    table.add_row("eps_low", str(method.eps_low))
    if method.adaptive:
        ends = f"{method.eps_high_max:g} at c = 1, evenly down to {method.floor:g} at c = {k}"
        table.add_row("eps_high", ends)
    else:
        table.add_row("eps_high, every c", str(method.eps_high_max))
    if method.bounds != "fixed":
        table.add_row("bounds", f"{method.bounds}: each mini-batch finds its own (one more pass)")
    for key in ("ratio_max", "off_policy_mask", "second_moment_max", "positive_share_min"):
        value = getattr(method, key)
        if value is not None and math.isfinite(value):
            table.add_row(key, str(value))
    return table


def shapes_table(rules: list[Rule], parallel: ParallelConfig) -> Table:
    """Every kind of parameter: its whole shape, that on one rank, and where it is."""
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


def memory_table(rules: list[Rule], config: Config, layout: Layout) -> Table:
    """Bytes of weights, gradients and optimizer state of one rank, by pipeline stage."""
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
