"""What a plan rests on and says, printed for people."""

from __future__ import annotations

from rich.console import Console

from gapo_megatron.config import Config
from gapo_megatron.io.whole_table import print_whole
from gapo_megatron.ops.plan import tables
from gapo_megatron.ops.plan.calibration import Calibration
from gapo_megatron.ops.plan.layout_file import roomy_candidates
from gapo_megatron.ops.plan.planner import Plan, leave_out, overrides
from gapo_megatron.ops.plan.workload import Workload


def print_plan(
    console: Console,
    result: Plan,
    config: Config,
    workload: Workload,
    found: Calibration,
    *,
    note: str,
    top: int,
) -> None:
    """Print what the plan rests on, the layouts in order, and why others do not run."""
    if note:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"A step: {config.batch.rollout_prompts} prompts of {workload.mean_prompt_tokens:g} tokens "
        f"x {config.batch.rollouts_per_prompt} responses of {workload.mean_response_tokens:g} "
        f"(longest {workload.longest_response_tokens:,}), {workload.active_share:.0%} with A != 0. "
        + tables.times_rest_on(found),
        markup=False,
        highlight=False,
    )
    if caveat := tables.fp8_caveat(config):
        console.print(caveat, markup=False, highlight=False)
    print_whole(console, tables.layouts_table(result, config, top=top))
    if tables.has_sides(result):
        print_whole(console, tables.sides_table(result, top=top))
    print_whole(console, tables.memory_table(result, top=top))
    if result.current_refusal:
        console.print(f"* The config's own does not run: {result.current_refusal}", markup=False)
    if result.split_refusal:
        console.print(f"No generation nodes: {result.split_refusal}", markup=False)
    if result.refusals:
        print_whole(console, tables.refusals_table(result))
    if result.best is None:
        console.print(tables.nothing_fits(result, config))
        return
    if hint := tables.ahead_hint(result):
        console.print(hint, markup=False, soft_wrap=True)
    roomy = roomy_candidates(result)
    if not roomy:
        console.print("None of them leaves a twentieth of a GPU free: plan more nodes.")
        return
    best = roomy[0]
    kind, rows = ("s", result.splits) if best.layout.num_generation else ("", result.ranked)
    row = f"{kind}{rows.index(best) + 1}"
    console.print(
        f"The quickest that leaves a twentieth of a GPU free, as --write does ({row}), as "
        f"overrides: {' '.join(overrides(best))}",
        markup=False,
        soft_wrap=True,
    )
    if names := leave_out(config):
        listed = " and ".join(names)
        console.print(f"Its stages are equal: leave {listed} out of the config.", soft_wrap=True)
