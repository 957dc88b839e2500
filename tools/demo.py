"""Train a small model with GAPO on this CPU: task, warm start, reinforcement learning, report.

Each seed, layout and method has a folder of its own (runs/demo, runs/demo_seed1, ...) with the
task, the models, metrics, checkpoints, report.png and the trained Hugging Face folder. A stopped
demo continues where it stopped; delete its folder to start over.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from gapo_megatron.config import Config, load_config
from gapo_megatron.data.schema import read_jsonl
from gapo_megatron.errors import ConfigError, GapoError
from gapo_megatron.evaluate.counts import Counts, read_counts
from gapo_megatron.evaluate.pass_at_k import mean_pass_at_k
from gapo_megatron.hf.folder import check_replaceable, claim, is_marked, mark
from gapo_megatron.ops.launch.ranks import ranks_command

if TYPE_CHECKING:
    from gapo_megatron.evaluate.statistics import Interval

NUM_EVAL = 256
NUM_TRAIN = 2400
REPOSITORY = Path(__file__).resolve().parents[1]
METHOD = "objective.method="
TOOLS_MODEL = "warm_start_tools"
"""Name of a model's folder whose task is that of configs/demo_tools.toml, in place of additions."""
LANGUAGE_MODEL = "SmolLM2-135M-Instruct"
"""Name of a model's folder that is made from a package, and whose task is instructions."""
LANGUAGE_EVAL, LANGUAGE_TRAIN = 96, 1200
"""Its problems: few, for a model of 135 million parameters takes its time; training has 1,116."""
OTHERS = {
    "gspo_asym": "whose clip bounds are the same for every c",
    "gapo": "whose upper clip bound depends on c",
}
"""Methods that the demo suggests to compare with."""

console = Console(markup=False)


def main() -> int:
    """Run the demo for every seed asked for; 0 done, 1 failed, 2 usage."""
    arguments = _parse()
    folders = []
    try:
        if arguments.prepare:
            config = load_config(arguments.config, arguments.overrides)
            _prepare(arguments, config, arguments.overrides)
            return 0
        for seed in arguments.seed:
            settings = _settings(arguments, seed)
            config = load_config(arguments.config, settings)
            _run_seed(arguments, config, settings)
            folders.append(Path(config.run.output_dir))
            _report(config)
        if len(folders) > 1:
            _compare_seeds(arguments.seed, folders)
        _show_next(arguments, folders)
    except GapoError as error:
        console.print(Text.assemble((type(error).__name__, "bold red"), f": {error}"))
        return 2 if isinstance(error, ConfigError) else 1
    except subprocess.CalledProcessError as error:
        console.print(Text.assemble(("failed", "bold red"), f" with exit code {error.returncode}"))
        return 1
    return 0


def _parse(command_line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="make demo SEED=0,1,2 compares three seeds; WORLD_SIZE=2 TP=2 runs two ranks.",
    )
    parser.add_argument("--config", default="configs/demo.toml", help="default: %(default)s")
    parser.add_argument(
        "--seed",
        type=_seeds,
        default=[0],
        metavar="N[,N...]",
        help="seeds, one run each (default: 0)",
    )
    parser.add_argument("--world-size", type=int, default=1, help="ranks (processes)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--pp", type=int, default=1, help="pipeline-parallel size")
    parser.add_argument(
        "--prepare",
        action="store_true",
        help="only make the task and the warm start, in the config's folders, unless they exist "
        "(for slurm/gapo_demo.sbatch)",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="settings for the warm start and the training",
    )
    return parser.parse_intermixed_args(command_line)


def _seeds(text: str) -> list[int]:
    return [int(seed) for seed in text.split(",")]


def _settings(arguments: argparse.Namespace, seed: int) -> list[str]:
    """Overrides of one run: its seed and layout, and its paths moved into a folder of its own."""
    config = load_config(arguments.config, arguments.overrides)
    has_model = config.supervised or Path(config.model.hf_dir).name == LANGUAGE_MODEL
    if not has_model or not config.evaluation.every_steps:
        raise ConfigError(
            f"{arguments.config}: the demo needs evaluation, and [supervised] unless model.hf_dir "
            f"({config.model.hf_dir}) has the name {LANGUAGE_MODEL}"
        )
    if arguments.world_size % (arguments.tp * arguments.pp):
        raise ConfigError(
            f"--world-size ({arguments.world_size}) must be a multiple of "
            f"--tp ({arguments.tp}) x --pp ({arguments.pp})"
        )
    marks = {"seed": seed, "ranks": arguments.world_size, "tp": arguments.tp, "pp": arguments.pp}
    usual = {"seed": 0, "ranks": 1, "tp": 1, "pp": 1}
    suffix = "".join(f"_{key}{value}" for key, value in marks.items() if value != usual[key])
    # A run with other settings must not continue this one.
    others = [one for one in arguments.overrides if not one.startswith(METHOD)]
    if others != arguments.overrides:
        suffix += f"_{config.objective.resolve().name}"
    if others:
        suffix += "_" + hashlib.sha256(" ".join(others).encode()).hexdigest()[:6]
    root = config.run.output_dir
    paths = {
        "run.output_dir": root,
        "model.hf_dir": config.model.hf_dir,
        "data.train_path": config.data.train_path,
        "data.eval_path": config.data.eval_path,
    }
    if config.supervised:
        paths["supervised.initial_hf_dir"] = config.supervised.initial_hf_dir
        paths["supervised.train_path"] = config.supervised.train_path
    return [
        *arguments.overrides,
        f"run.seed={seed}",
        f"parallel.tensor_model_parallel_size={arguments.tp}",
        f"parallel.pipeline_model_parallel_size={arguments.pp}",
        *(f"{key}={path.replace(root, root + suffix, 1)}" for key, path in paths.items()),
    ]


def _run_seed(arguments: argparse.Namespace, config: Config, settings: Sequence[str]) -> None:
    start = time.monotonic()
    _prepare(arguments, config, settings)
    number = "3/3" if config.supervised else "2/2"
    _stage(f"{number} reinforcement learning with {config.objective.method}", start)
    _launch("gapo_megatron.train", arguments, settings)
    _stage("done", start)


def _prepare(arguments: argparse.Namespace, config: Config, settings: Sequence[str]) -> None:
    """Make the task and the warm-started model, unless they exist."""
    start = time.monotonic()
    is_language = config.supervised is None
    _stage("1/2 task and language model" if is_language else "1/3 task, random model", start)
    _say(f"output folder: {config.run.output_dir}")
    if is_language:
        _prepare_language(config)
        return
    if (Path(config.model.hf_dir) / "config.json").exists():
        _say(f"{config.model.hf_dir} exists: skipping steps 1 and 2")
        return
    _write_task(config)
    _stage("2/3 warm start: supervised training", start)
    _launch("gapo_megatron.sft", arguments, settings)


def _stage(title: str, start: float) -> None:
    minutes, seconds = divmod(round(time.monotonic() - start), 60)
    console.rule(Text.assemble((title, "bold"), f"  (after {minutes}:{seconds:02d})"))


def _say(text: str) -> None:
    """Print a line without wrapping, so that paths and commands can be copied."""
    console.print(text, highlight=False, soft_wrap=True)


def _write_task(config: Config) -> None:
    # Torch and transformers: neither --help nor a wrong setting waits for them.
    from transformers.utils import logging as transformers_logging

    from gapo_megatron.ops.prepare import demo_task, demo_tools

    transformers_logging.disable_progress_bar()  # a bar for one file of 3 MB
    supervised = config.supervised
    assert supervised is not None
    # Not by the environment: it may be the user's own, or none for comparison.
    made = demo_tools if Path(config.model.hf_dir).name == TOOLS_MODEL else demo_task
    task, initial = Path(config.data.train_path).parent, Path(supervised.initial_hf_dir)
    field, is_ours = "supervised.initial_hf_dir", is_marked(initial, made_by="demo")
    check_replaceable(initial, field=field, is_ours=is_ours)
    names = [f"{split}.jsonl" for split in ("train", "eval", "supervised")]
    claim(task, names, field="data.train_path", made_by="demo")
    initial.mkdir(parents=True, exist_ok=True)
    mark(initial, made_by="demo", made_at=initial)
    made.write_task(
        task,
        seed=config.run.seed,
        num_eval=NUM_EVAL,
        num_train=NUM_TRAIN,
        num_supervised=supervised.num_steps * supervised.batch_sequences,
    )
    rows = read_jsonl(supervised.train_path, keys=("prompt", "response"))
    tokenizer = made.write_tokenizer(made.training_texts([row for _, row in rows]), initial)
    demo_task.write_initial_model(tokenizer, initial, seed=config.run.seed)
    _say(f"Four training examples of the warm start; {made.ABOUT_EXAMPLES}")
    for _, row in rows[:4]:
        _say(f"  {row['prompt']} {row['response']}")


def _prepare_language(config: Config) -> None:
    """Make the problems, and the model unless its folder exists: all seeds share it."""
    from gapo_megatron.ops.prepare import demo_language, smollm2

    model, train = Path(config.model.hf_dir), Path(config.data.train_path)
    if not model.is_dir():
        smollm2.write_model(smollm2.PACKAGES, model)
    if not train.exists():
        claim(train.parent, ["train.jsonl", "eval.jsonl"], field="data.train_path", made_by="demo")
        seed, (num_eval, num_train) = config.run.seed, (LANGUAGE_EVAL, LANGUAGE_TRAIN)
        demo_language.write_task(train.parent, seed=seed, num_eval=num_eval, num_train=num_train)
    rows = [row for _, row in read_jsonl(train, keys=("prompt", "answer"))]
    _say("A training problem of each level:")
    for row in {row["level"]: row for row in rows}.values():
        _say(f"  {row['prompt']}")


def _launch(module: str, arguments: argparse.Namespace, settings: Sequence[str]) -> None:
    """Run `python -m module` on every rank."""
    # The ranks share the cores; beyond four threads a model of this size only waits for them.
    threads = max(1, min(4, (os.cpu_count() or 1) // arguments.world_size))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # an idle thread leaves its core to the other rank
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])
        ),
    }
    command = [*ranks_command(module, arguments.world_size), arguments.config, *settings]
    subprocess.run(command, env=environment, check=True)


def _read_before_and_after(folder: Path) -> tuple[Counts, Counts]:
    files = sorted(
        (folder / "evaluations").glob("step_*.json"), key=lambda path: int(path.stem[5:])
    )
    return read_counts(files[0]), read_counts(files[-1])


def _pass_at_1(counts: Counts) -> list[float]:
    return [entry["num_correct"] / entry["num_samples"] for entry in counts]


def _change(before_and_after: Sequence[Counts], k: int) -> str:
    pairs = [
        [(entry["num_samples"], entry["num_correct"]) for entry in counts]
        for counts in before_and_after
    ]
    return " -> ".join(f"{100 * mean_pass_at_k(one, k):.1f}" for one in pairs)


def _shown(interval: Interval) -> str:
    low, high = 100 * interval.low, 100 * interval.high
    return f"{100 * interval.mean:+.1f}  [{low:+.1f}, {high:+.1f}]"


def _report(config: Config) -> None:
    """Print the table of held-out accuracy by level, before and after, and draw the picture."""
    from gapo_megatron.evaluate.statistics import paired_difference  # scipy: most of a second

    folder = Path(config.run.output_dir)
    before, after = _read_before_and_after(folder)
    k = config.evaluation.samples_per_prompt
    title = (
        f"Accuracy (%) on {len(before)} held-out problems, before -> after "
        f"{config.objective.method}"
    )
    table = Table(title=title, caption="gain: of pass@1; interval: 95 % Student-t over problems")
    table.add_column("problems", no_wrap=True)
    for name in ("pass@1", "gain [interval]", f"pass@{k}"):
        table.add_column(name, justify="right", no_wrap=True)
    levels = list(dict.fromkeys(entry["level"] for entry in before))
    for level in [*levels, None]:
        chosen = [
            [entry for entry in counts if level in (None, entry["level"])]
            for counts in (before, after)
        ]
        gain = paired_difference(*map(_pass_at_1, chosen))
        table.add_row(
            level or "all",
            _change(chosen, 1),
            _shown(gain),
            _change(chosen, k),
            style="bold" if level is None else None,
        )
    console.print(table)
    picture = _draw([folder], folder / "report.png")
    _say(f"picture: {picture}\nmodel:   {folder / 'hf'} (Hugging Face folder)")


def _draw(folders: Sequence[Path], output: Path) -> Path:
    from gapo_megatron.ops.report import (
        write_picture,  # seconds that the command line need not wait
    )

    return write_picture(folders, output)


def _compare_seeds(seeds: Sequence[int], folders: Sequence[Path]) -> None:
    """Print each seed's accuracy and the interval of the gain over seeds; draw one picture."""
    from gapo_megatron.evaluate.statistics import mean_interval

    table = Table(title="pass@1 in % on held-out problems, by seed")
    for name in ("seed", "before", "after", "gain [95 % interval over seeds]"):
        table.add_column(name, justify="right")
    gains = []
    for seed, folder in zip(seeds, folders, strict=True):
        counts = _read_before_and_after(folder)
        before, after = (sum(values) / len(values) for values in map(_pass_at_1, counts))
        gains.append(after - before)
        table.add_row(
            str(seed), f"{100 * before:.1f}", f"{100 * after:.1f}", f"{100 * gains[-1]:+.1f}"
        )
    table.add_row("mean", "", "", _shown(mean_interval(gains)), style="bold")
    console.print(table)
    picture = _draw(folders, folders[0] / "report_seeds.png")
    _say(f"picture: {picture}")


def _show_next(arguments: argparse.Namespace, folders: Sequence[Path]) -> None:
    """Print the commands that draw all figures, and that train another method to compare with."""
    trained = load_config(arguments.config, arguments.overrides).objective.method
    other = "gspo_asym" if trained == "gapo" else "gapo"
    others = [one for one in arguments.overrides if not one.startswith(METHOD)]
    if load_config(arguments.config, others).objective.method != other:
        others.append(f"{METHOD}{other}")
    theirs = argparse.Namespace(**{**vars(arguments), "overrides": others})
    configs = [load_config(arguments.config, _settings(theirs, one)) for one in arguments.seed]
    their_folders = [Path(config.run.output_dir) for config in configs]
    both = _command("report", *map(str, [*folders, *their_folders]))
    if all(
        (folder / "evaluations" / f"step_{config.run.num_steps}.json").exists()
        for folder, config in zip(their_folders, configs, strict=True)
    ):
        _say(f"\nTo draw {trained} and {other} in one report:\n  {both}")
        return
    why = (
        f"This trained {trained} alone. To compare it with {other}, {OTHERS[other]}, train {other} "
        f"too (it takes as long as {trained} did), then draw both in one report:"
    )
    _say(
        f"\nTo draw every figure of {trained}:\n  {_command('report', *map(str, folders))}\n\n"
        f"{textwrap.fill(why, console.width)}\n"
        f"  {_command('demo', *_options(arguments), *others)}\n  {both}"
    )


def _options(arguments: argparse.Namespace) -> list[str]:
    """Command-line options that differ from the defaults."""
    given, usual = vars(arguments), vars(_parse([]))
    words = []
    for key in ("config", "seed", "world_size", "tp", "pp"):
        if given[key] != usual[key]:
            value = ",".join(map(str, given[key])) if key == "seed" else str(given[key])
            words += [f"--{key.replace('_', '-')}", value]
    return words


def _command(tool: str, *words: str) -> str:
    """A command line that runs one of the tools from the working directory."""
    paths = (Path(sys.executable), REPOSITORY / "tools" / f"{tool}.py")
    here = Path.cwd()
    shown = (path.relative_to(here) if path.is_relative_to(here) else path for path in paths)
    return shlex.join([*map(str, shown), *words])


if __name__ == "__main__":
    sys.exit(main())
