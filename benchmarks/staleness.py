"""The demo on-policy, with batches sampled a step ahead, and with the clip around older weights.

    make demo && python benchmarks/staleness.py            9 runs, one after the other; resumes

Three arms from one warm start, with the same seeds, all on generation ranks: on-policy; batches a
step old under the decoupled objective; the same batches with a clip around the log-probs that they
were sampled with (docs/objective.md). A run that is finished is not repeated, one that was stopped
goes on. Prints, as Markdown, means over seeds with their 95 % Student-t intervals, and draws the
curves: FOLDER/staleness.{png,pdf,csv}.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from gapo_megatron.config import CONFIG_NAME, load_config
from gapo_megatron.config.roles import flat
from gapo_megatron.errors import GapoError
from gapo_megatron.evaluate.statistics import mean_interval, paired_difference
from gapo_megatron.io.run_folder import is_finished
from gapo_megatron.ops.launch.ranks import ranks_command
from gapo_megatron.ops.report.arms import Arm
from gapo_megatron.ops.report.exhibit import Exhibit
from gapo_megatron.ops.report.learning import draw_arms
from gapo_megatron.ops.report.runs import Run, Values, read_run
from gapo_megatron.ops.report.series import Row, curve_rows, window_of, windowed
from gapo_megatron.ops.report.style import legend_below, outer_names, panels, style

REPOSITORY = Path(__file__).resolve().parents[1]
BASE = "on-policy"
ARMS = {
    BASE: ["rollout.max_staleness=0"],
    "decoupled": ["rollout.max_staleness=1", "objective.importance_weight_max=2"],
    "around older weights": ["rollout.max_staleness=1", "objective.old_log_probs=rollout"],
}
PASS, CLIP = "eval/pass@1", "clip/fraction_sequences"
OUTSIDE, WEIGHT = "mismatch/outside_clip", "mismatch/importance_weight"
DRAWN = {
    PASS: "pass@1 (%)",
    CLIP: "clipped (%)",
    OUTSIDE: "outside the clip\nat the start (%)",
    WEIGHT: "importance weight",
}
"""Names on the axes."""
NOTHING = "-"


def main() -> None:
    """Train what is missing, print the table, draw the curves."""
    arguments = _parse()
    runs = {
        arm: {
            seed: [
                *(f"run.output_dir={_folder(arguments, arm, seed)}", f"run.seed={seed}"),
                *(f"rollout.generation_ranks={arguments.generation_ranks}", *settings),
                *([f"run.num_steps={arguments.steps}"] if arguments.steps else []),
                *arguments.overrides,
            ]
            for seed in arguments.seeds
        }
        for arm, settings in ARMS.items()
    }
    try:
        for seed in arguments.seeds:  # every arm of the first seed before another seed
            for arm in runs:
                train(arguments.config, runs[arm][seed], num_ranks=arguments.ranks)
        arms = read_arms({arm: _folders(arguments, arm) for arm in runs})
    except GapoError as error:
        raise SystemExit(f"error: {error}") from None
    print(table(arms), end="")
    for path in draw(arms, arguments.folder / "staleness"):
        print(path)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", default="configs/demo.toml", help="default: %(default)s")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/staleness"), help="default: %(default)s"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N")
    parser.add_argument("--steps", type=int, help="of each run; default: the config's")
    parser.add_argument("--ranks", type=int, default=2, help="of each run; default: %(default)s")
    parser.add_argument(
        "--generation-ranks", type=int, default=1, help="of these; default: %(default)s"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of every run")
    return parser.parse_intermixed_args()


def _folder(arguments: argparse.Namespace, arm: str, seed: int) -> Path:
    return Path(arguments.folder) / f"{arm.replace(' ', '_')}_{seed}"


def _folders(arguments: argparse.Namespace, arm: str) -> list[Path]:
    return [_folder(arguments, arm, seed) for seed in arguments.seeds]


def train(config_path: str, settings: Sequence[str], *, num_ranks: int) -> None:
    """Train one run to its end, unless it is there already."""
    config = load_config(config_path, settings)
    folder = Path(config.run.output_dir)
    if is_finished(folder, num_steps=config.run.num_steps):
        before = flat(load_config(folder / CONFIG_NAME))
        changed = [key for key, value in flat(config).items() if before.get(key) != value]
        if changed:
            raise SystemExit(f"{folder} has other {', '.join(changed)}: give another --folder")
        print(f"{folder} is finished", flush=True)
        return
    if not Path(config.model.hf_dir).is_dir():
        raise SystemExit(f"{config.model.hf_dir} is not there: run `make demo` first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_name(f"{folder.name}.log")
    print(f"{folder} trains: {log}", flush=True)
    command = [*ranks_command("gapo_megatron.train", num_ranks), config_path, *settings]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_ranks)),
        "OMP_WAIT_POLICY": "PASSIVE",  # an idle thread leaves its core to the other rank
        "PYTHONPATH": str(REPOSITORY),
    }
    with log.open("a") as output:
        done = subprocess.run(command, env=environment, stdout=output, stderr=output)
    if done.returncode or not is_finished(folder, num_steps=config.run.num_steps):
        raise SystemExit(f"{folder} has not finished (exit code {done.returncode}): {log}")


def read_arms(folders: dict[str, list[Path]]) -> list[Arm]:
    """The arms by label, from their runs' folders."""
    return [Arm(label, [read_run(path) for path in paths], {}) for label, paths in folders.items()]


def table(arms: Sequence[Arm]) -> str:
    """Markdown: the last pass@1, means over steps, and both minus the first arm's, by seed."""
    base = arms[0]
    head = ["arm", "pass@1, %", "of seeds", f"minus {base.label}'s", "clipped, %", "minus"]
    head += ["outside the clip at the start, %", "importance weight", "truncated, %"]
    lines = [head, ["---"] * len(head)]
    for arm in arms:
        last = [_final(run) for run in arm.runs]
        cells = [arm.label, _shown(last), ", ".join(f"{100 * value:.1f}" for value in last)]
        cells += [_difference(base, arm, _final), _shown(_means(arm, CLIP))]
        cells.append(_difference(base, arm, lambda run: _mean(run, CLIP)))
        cells.append(_shown(_means(arm, OUTSIDE)))
        cells.append(_shown(_means(arm, WEIGHT), scale=1, digits=4))
        lines.append([*cells, _shown(_means(arm, f"{WEIGHT}_cut"))])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _final(run: Run) -> float:
    """pass@1 after the last step."""
    values = run.series(PASS)
    if run.num_steps not in values:
        raise SystemExit(f"{run.folder} has no {PASS} after step {run.num_steps}, its last")
    return values[run.num_steps]


def _mean(run: Run, name: str) -> float:
    values = run.series(name).values()
    return sum(values) / len(values)


def _means(arm: Arm, name: str) -> list[float]:
    return [_mean(run, name) for run in arm.runs if run.series(name)]


def _shown(values: Sequence[float], *, scale: float = 100, digits: int = 2) -> str:
    """The mean, in percent, with its interval where there are several."""
    if not values:
        return NOTHING
    shown = f"{scale * sum(values) / len(values):.{digits}f}"
    if len(values) > 1:
        found = mean_interval(values)
        shown += f" ± {scale * (found.mean - found.low):.{digits}f}"
    return shown


def _difference(base: Arm, arm: Arm, value: Callable[[Run], float]) -> str:
    """Percentage points to the first arm, paired by seed, with their interval."""
    theirs, ours = ({run.seed: value(run) for run in one.runs} for one in (base, arm))
    if arm is base or len(theirs) < 2:
        return NOTHING
    found = paired_difference([theirs[seed] for seed in ours], list(ours.values()))
    return f"{100 * found.mean:+.2f} ± {100 * (found.mean - found.low):.2f}"


def curves(arms: Sequence[Arm]) -> tuple[list[Row], int]:
    """Rows of every drawn metric, and the window of those of single steps."""
    window = window_of([run for arm in arms for run in arm.runs])
    rows: list[Row] = []
    for name in DRAWN:

        def values(run: Run, name: str = name) -> Values:
            found = run.series(name)
            return found if name == PASS else windowed(found, list(found), window)

        rows += curve_rows(arms, values, metric=name)
    return rows, window


def draw(arms: Sequence[Arm], stem: Path) -> list[Path]:
    """Write the curves; returns the files."""
    rows, window = curves(arms)
    with style():
        note = f"Means over {window} steps, except pass@1; bands: 95 % intervals over seeds."
        return Exhibit(aid=note, rows=rows, figure=figure_of(arms, rows)).write(stem)


def figure_of(arms: Sequence[Arm], rows: Sequence[Row]) -> Figure:
    """A panel for each metric; inside `style`."""
    figure, axes = panels(len(DRAWN), share_y=False)
    shown = {arm.label: arm for arm in arms}
    for axis, name in zip(axes, DRAWN, strict=True):
        axis.set(xlabel="step", ylabel=DRAWN[name])
        chosen = [row for row in rows if row["metric"] == name]
        limits, scale = ((0.0, math.inf), 1) if name == WEIGHT else ((0.0, 1.0), 100)
        draw_arms(axis, chosen, shown, limits=limits, scale=scale, points=name == PASS)
    outer_names(axes, share_y=False)
    legend_below(figure, *axes)
    return figure


if __name__ == "__main__":
    main()
