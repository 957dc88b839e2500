"""Train a small model with GAPO on this CPU: task, warm start, reinforcement learning, report.

Each seed, layout and method has a folder of its own (runs/demo, runs/demo_seed1, ...) with metrics,
checkpoints, report and the trained Hugging Face folder; those of a seed share task and warm
start. A stopped demo continues where it stopped; delete its folder to start over.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from gapo_megatron.config import Config, load_config
from gapo_megatron.config.rules import input_paths
from gapo_megatron.data.schema import read_jsonl
from gapo_megatron.errors import ConfigError, GapoError
from gapo_megatron.formats.folder import check_replaceable, claim, is_marked, mark
from gapo_megatron.run.fail_fast import fail_fast
from gapo_megatron.run.imports import without_garbage_collection
from gapo_megatron.sft import train_supervised

NUM_EVAL = 256
NUM_TRAIN = 2400
REPOSITORY = Path(__file__).resolve().parents[1]
METHOD, OUTPUT = "objective.method=", "run.output_dir="
MADE = ("model.", "data.", "supervised.", "batch.max_tokens_per_microbatch=")
"""Settings on which task and warm start depend, besides the seed."""
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
    """Run the demo; 0 done, 1 failed, 2 usage."""
    arguments = _parse()
    try:
        if arguments.prepare:
            config = load_config(arguments.config, arguments.overrides)
            _prepare(arguments, config, arguments.overrides)
            return 0
        settings = _settings(arguments)
        config = load_config(arguments.config, settings)
        _run(arguments, config, settings)
        _report(config)
        _show_next(arguments, config.run.output_dir)
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
        epilog="make demo SEED=1 WORLD_SIZE=2 TP=2 runs another seed on two ranks.",
    )
    parser.add_argument("--config", default="configs/demo.toml", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument("--world-size", type=int, default=1, help="ranks (processes)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--pp", type=int, default=1, help="pipeline-parallel size")
    parser.add_argument(
        "--prepare",
        action="store_true",
        help="only make task and warm start, in the config's folders, unless they exist",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="settings for the warm start and the training",
    )
    return parser.parse_intermixed_args(command_line)


def _settings(arguments: argparse.Namespace) -> list[str]:
    """Overrides of the run: seed, layout, its folder (as given, or its own), task and models."""
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
    sizes = {"ranks": arguments.world_size, "tp": arguments.tp, "pp": arguments.pp}
    layout = "".join(f"_{key}{size}" for key, size in sizes.items() if size != 1)
    of_seed = f"_seed{arguments.seed}" if arguments.seed else ""
    # A run with other settings must not continue this one; what it starts from may be the same.
    root = load_config(arguments.config).run.output_dir
    others = [one for one in arguments.overrides if not one.startswith((METHOD, OUTPUT))]
    base = root + of_seed + _digest([one for one in others if one.startswith(MADE)])
    if any(one.startswith(OUTPUT) for one in arguments.overrides):
        run_dir = config.run.output_dir
    else:
        has_method = any(one.startswith(METHOD) for one in arguments.overrides)
        method = f"_{config.objective.resolve().name}" if has_method else ""
        run_dir = root + of_seed + layout + method + _digest(others)
    paths = [one for one in input_paths(config).items() if one[0].startswith(MADE)]
    made = {name: path.removeprefix(root) for name, path in paths if path.startswith(f"{root}/")}
    return [
        *arguments.overrides,
        f"run.seed={arguments.seed}",
        f"run.output_dir={run_dir}",
        f"parallel.tensor_model_parallel_size={arguments.tp}",
        f"parallel.pipeline_model_parallel_size={arguments.pp}",
        *(f"{name}={base}{path}" for name, path in made.items()),
    ]


def _digest(settings: Sequence[str]) -> str:
    return "_" + hashlib.sha256(" ".join(settings).encode()).hexdigest()[:6] if settings else ""


def _run(arguments: argparse.Namespace, config: Config, settings: Sequence[str]) -> None:
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
    _claim_task(config)
    # On one rank, so that runs of every layout start from the same weights.
    whole = [f"parallel.{kind}_model_parallel_size=1" for kind in ("tensor", "pipeline")]
    kept = [one for one in settings if not one.startswith("parallel.")]
    alone = load_config(arguments.config, [*kept, *whole])
    # One process for both, which imports torch once.
    process = multiprocessing.get_context("fork").Process(target=_warm_start, args=(alone, start))
    process.start()
    process.join()
    if process.exitcode:
        raise subprocess.CalledProcessError(process.exitcode, "warm start")


def _warm_start(config: Config, start: float) -> None:
    """Write task and initial model, and train the model."""
    os.environ |= _threads(1)
    with fail_fast():
        _write_task(config)
        _stage("2/3 warm start: supervised training", start)
        train_supervised(config)


def _stage(title: str, start: float) -> None:
    minutes, seconds = divmod(round(time.monotonic() - start), 60)
    console.rule(Text.assemble((title, "bold"), f"  (after {minutes}:{seconds:02d})"))


def _say(text: str) -> None:
    """Print a line without wrapping, so that paths and commands can be copied."""
    console.print(text, highlight=False, soft_wrap=True)


def _claim_task(config: Config) -> None:
    """Check that task and initial model may be written, and mark their folders."""
    assert config.supervised is not None
    task, initial = Path(config.data.train_path).parent, Path(config.supervised.initial_hf_dir)
    field, is_ours = "supervised.initial_hf_dir", is_marked(initial, made_by="demo")
    check_replaceable(initial, field=field, is_ours=is_ours)
    names = [f"{split}.jsonl" for split in ("train", "eval", "supervised")]
    claim(task, names, field="data.train_path", made_by="demo")
    initial.mkdir(parents=True, exist_ok=True)
    mark(initial, made_by="demo", made_at=initial)


def _write_task(config: Config) -> None:
    # Torch and transformers: neither --help nor a wrong setting waits for them.
    with without_garbage_collection():
        from transformers.utils import logging as transformers_logging

        from gapo_tools.demonstration import demo_task, demo_tools

    transformers_logging.disable_progress_bar()  # a bar for one file of 3 MB
    supervised = config.supervised
    assert supervised is not None
    # Not by the environment: it may be the user's own, or none for comparison.
    made = demo_tools if Path(config.model.hf_dir).name == TOOLS_MODEL else demo_task
    task, initial = Path(config.data.train_path).parent, Path(supervised.initial_hf_dir)
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
    """Make the model unless its folder exists: all seeds share it. And the problems, of files."""
    from gapo_tools.demonstration import demo_language, smollm2

    model, train = Path(config.model.hf_dir), Path(config.data.train_path)
    if not model.is_dir():
        smollm2.write_model(smollm2.PACKAGES, model)
    if config.data.generated:
        return
    if not train.exists():
        claim(train.parent, ["train.jsonl", "eval.jsonl"], field="data.train_path", made_by="demo")
        seed, (num_eval, num_train) = config.run.seed, (LANGUAGE_EVAL, LANGUAGE_TRAIN)
        demo_language.write_task(train.parent, seed=seed, num_eval=num_eval, num_train=num_train)
    rows = [row for _, row in read_jsonl(train, keys=("prompt", "answer"))]
    _say("A training problem of each level:")
    for row in {row["level"]: row for row in rows}.values():
        _say(f"  {row['prompt']}")


def _launch(module: str, arguments: argparse.Namespace, settings: Sequence[str]) -> None:
    """Run `python -m module` on every rank, through torchrun if there are several."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **_threads(arguments.world_size), "PYTHONPATH": path}
    number = arguments.world_size
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}"]
    command = [sys.executable, *(torchrun if number > 1 else []), "-m", module]
    subprocess.run([*command, arguments.config, *settings], env=environment, check=True)


def _threads(num_ranks: int) -> dict[str, str]:
    """Variables by which ranks share the cores."""
    # Beyond four threads a model of this size only waits for them.
    threads = max(1, min(4, (os.cpu_count() or 1) // num_ranks))
    # An idle thread leaves its core to the other rank.
    return {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}


def _report(config: Config) -> None:
    """Print the table of held-out accuracy by level, before and after, and draw the picture."""
    # scipy, matplotlib and torch: seconds that the command line need not wait.
    from gapo_tools.reporting import gains, write_report

    folder = Path(config.run.output_dir)
    if found := gains.read_first_and_last(folder):
        _, pair = found
        k = config.evaluation.samples_per_prompt
        title = (
            f"Accuracy (%) on {len(pair[0])} held-out problems, before -> after "
            f"{config.objective.method}"
        )
        caption = "gain: of pass@1; interval: 95 % Student-t over problems"
        table = Table(title=title, caption=caption)
        table.add_column("problems", no_wrap=True)
        for name in ("pass@1", "gain [interval]", f"pass@{k}"):
            table.add_column(name, justify="right", no_wrap=True)
        levels = list(dict.fromkeys(entry["level"] for entry in pair[0]))
        for level in [*levels, None]:
            before, after = (
                [entry for entry in counts if level in (None, entry["level"])] for counts in pair
            )
            table.add_row(
                level or "all",
                gains.change((before, after), 1),
                gains.with_bounds(gains.gain((before, after))),
                gains.change((before, after), k),
                style="bold" if level is None else None,
            )
        console.print(table)
    page = write_report([folder], folder / "report").page
    _say(f"report: {page}\nmodel:  {folder / 'hf'} (Hugging Face folder)")


def _show_next(arguments: argparse.Namespace, folder: str) -> None:
    """Print the commands that train another method and compare both."""
    trained = load_config(arguments.config, arguments.overrides).objective.method
    other = "gspo_asym" if trained == "gapo" else "gapo"
    others = [one for one in arguments.overrides if not one.startswith((METHOD, OUTPUT))]
    if load_config(arguments.config, others).objective.method != other:
        others.append(f"{METHOD}{other}")
    theirs = argparse.Namespace(**{**vars(arguments), "overrides": others})
    their_folder = load_config(arguments.config, _settings(theirs)).run.output_dir
    why = (
        f"This trained {trained} alone. To compare it with {other}, {OTHERS[other]}, train {other} "
        f"too (it takes as long as {trained} did), then draw both in one report:"
    )
    _say(
        f"\n{textwrap.fill(why, console.width)}\n"
        f"  {_command('demo', *_options(arguments), *others)}\n"
        f"  {_command('report', folder, their_folder)}"
    )


def _options(arguments: argparse.Namespace) -> list[str]:
    """Command-line options that differ from the defaults."""
    given, usual = vars(arguments), vars(_parse([]))
    words = []
    for key in ("config", "seed", "world_size", "tp", "pp"):
        if given[key] != usual[key]:
            words += [f"--{key.replace('_', '-')}", str(given[key])]
    return words


def _command(tool: str, *words: str) -> str:
    """A command line that runs one of the tools from the working directory."""
    paths = (Path(sys.executable), REPOSITORY / "tools" / f"{tool}.py")
    here = Path.cwd()
    shown = (path.relative_to(here) if path.is_relative_to(here) else path for path in paths)
    return shlex.join([*map(str, shown), *words])


if __name__ == "__main__":
    sys.exit(main())
