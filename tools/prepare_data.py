"""Make a problem file for training from DeepScaleR, DeepCoder, files or environments of your own.

Reads .jsonl, .json, .csv, .tsv, a .gz of these, and .parquet as published, and downloads nothing.
--output is a new folder: problems.jsonl (for data.train_path), dropped.jsonl (every row left out,
and why), manifest.json (digests, options, counts) and, for code, tests.jsonl. It appears when it is
complete. After an interruption the same command continues. docs/data.md lists the rules for
dropping rows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress, TaskID

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from gapo_megatron.errors import ConfigError, GapoError, printable
from gapo_megatron.user_code import is_code
from gapo_tools.arguments import positive

if TYPE_CHECKING:
    from gapo_tools.preparation import Counts, HeldOut, Source

KINDS = ("math", "code", "instructions", "exact")
"""Values of `reward.kind`; importing the config would slow down --help."""
FORMATS = ("auto", "gapo", "verl", "slime", "orz", "trl", "openai")
"""Values of `data.format`."""

console = Console(markup=False)
if not console.is_terminal:
    console.width = 120


def main() -> int:
    """0 done, 1 an input is wrong, 2 the command line is, 130 interrupted."""
    arguments = _parse()
    try:
        if arguments.source == "verifiers":
            return _write_tasks(arguments)
        if arguments.source == "reasoning_gym":
            return _write_generated(arguments)
        counts, held_out, source = _prepare(arguments)
    except GapoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except OSError as error:  # a full disk, most likely
        print(f"error: {error}; run the same command again to continue", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        return 130
    _show(counts, held_out, arguments, readings=[*map(source.describe, arguments.input)])
    return 0


def _prepare(arguments: argparse.Namespace) -> tuple[Counts, HeldOut | None, Source]:
    # Tokenizers and verifiers: seconds that --help does not need.
    from gapo_megatron.config import DataConfig
    from gapo_megatron.data.messages import bind_template
    from gapo_megatron.data.tokenizer import load_tokenizer
    from gapo_tools.evaluation.benchmarks import BOXED
    from gapo_tools.preparation import HeldOut, Lengths, prepare

    tokenizer = load_tokenizer(arguments.model, field="--model")
    # Lengths do not depend on the day; this one is long in words.
    bind_template(tokenizer, DataConfig.model_validate({"train_path": "unused"}), date="2026-09-30")
    lengths = Lengths(tokenizer, arguments.max_prompt_tokens, arguments.chat_template)
    held_out = HeldOut(arguments.benchmarks) if arguments.benchmarks else None
    if arguments.source == "deepscaler" and arguments.suffix is None:
        arguments.suffix = BOXED
    recorded = {k: v for k, v in vars(arguments).items() if k not in ("input", "output", "source")}
    source = _source(arguments)
    tasks: dict[str, TaskID] = {}
    told_at = time.monotonic()
    with Progress(console=console, disable=not console.is_terminal) as bar:

        def progress(activity: str, share: float) -> None:
            nonlocal told_at
            if activity not in tasks:
                tasks[activity] = bar.add_task(activity, total=1.0)
            bar.update(tasks[activity], completed=share)
            if not console.is_terminal and time.monotonic() > told_at + 10:  # a line for the log
                told_at = time.monotonic()
                print(f"{activity}: {share:.0%}", file=sys.stderr)

        counts = prepare(
            source,
            arguments.input,
            arguments.output,
            lengths=lengths,
            held_out=held_out,
            options={k: str(v) if isinstance(v, Path) else v for k, v in recorded.items()},
            progress=progress,
        )
    return counts, held_out, source


def _write_tasks(arguments: argparse.Namespace) -> int:
    from gapo_tools.preparation.verifiers_tasks import write_tasks

    count = write_tasks(arguments.config, arguments.output, num_tasks=arguments.num_tasks)
    print(f'{count:,} tasks; data.train_path = "{arguments.output / "problems.jsonl"}"')
    return 0


def _write_generated(arguments: argparse.Namespace) -> int:
    from gapo_tools.preparation.generated_tasks import write_generated

    for name, count in write_generated(arguments.config, arguments.output).items():
        print(f"{count:,} problems in {arguments.output / name}")
    return 0


def _source(arguments: argparse.Namespace) -> Source:
    from gapo_tools import preparation as sources

    if arguments.source == "deepscaler":
        return sources.deepscaler(suffix=arguments.suffix)
    if arguments.source == "deepcoder":
        return sources.deepcoder()
    from gapo_megatron.config.data_section import RowKeys

    keys = RowKeys(arguments.format, arguments.prompt_key, arguments.answer_key, arguments.id_key)
    return sources.own(
        arguments.kind,
        keys=keys,
        suffix=arguments.suffix,
        answer_after=arguments.answer_after,
        keep=arguments.keep_columns,
    )


def _show(
    counts: Counts,
    held_out: HeldOut | None,
    arguments: argparse.Namespace,
    *,
    readings: Sequence[str],
) -> None:
    dropped = ", ".join(f"{number:,} {rule}" for rule, number in sorted(counts.dropped.items()))
    lines = {
        "rows": f"{counts.read:,}: {counts.written:,} written, dropped: {dropped or 'none'}",
        "train on": f'data.train_path = "{arguments.output / "problems.jsonl"}"',
    }
    if any(readings):
        lines["read as"] = "; ".join(dict.fromkeys(readings))
        lines["first"] = _first_problem(arguments.output / "problems.jsonl")
    if counts.contradictory_texts:
        lines["contradictory"] = f"problems with several answers: {counts.contradictory_texts:,}"
    if counts.benchmarks:
        lines["held out"] = ", ".join(f"{n} of {name}" for name, n in counts.benchmarks.items())
    if counts.dropped:
        lines["why"] = str(arguments.output / "dropped.jsonl")
    if held_out is None:
        lines["not compared"] = "with the benchmarks: give --benchmarks DIR"
    elif held_out.absent:
        lines["not compared"] = f"with {', '.join(held_out.absent)}: no such folders there"
    for name, text in lines.items():
        console.print(f"{name:14} {text}", highlight=False)


def _first_problem(path: Path) -> str:
    """The end of the first prompt, and its answer."""
    with open(path, encoding="utf-8") as file:
        row = json.loads(file.readline())
    prompt = row["prompt"] if "prompt" in row else row["messages"][-1]["content"]
    answer = row["answer"] if isinstance(row["answer"], str) else "in tests.jsonl"
    return f'prompt ends in "{printable(prompt[-80:])}", answer "{printable(answer[:80])}"'


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n")[1]
    )
    sources = parser.add_subparsers(dest="source", required=True, metavar="SOURCE")
    deepscaler = sources.add_parser(
        "deepscaler",
        help="mathematics: rows with problem and answer",
        description="Keeps each problem once, and none with contradictory answers.",
    )
    deepcoder = sources.add_parser(
        "deepcoder",
        help="programs: rows with problem and tests",
        description="Reads the formats of SYNTHETIC-1, TACO, LiveCodeBench and LeetCode. Put each "
        "data set in a folder of its own: the folder's name is the level in reports.",
    )
    own = sources.add_parser(
        "own",
        help="your own files, or those of verl, slime, TRL, Open-Reasoner-Zero and OpenAI",
        description="Keeps each problem once, and none with contradictory answers.",
    )
    for one in (deepscaler, deepcoder, own):
        _add_common(one)
    verifiers = sources.add_parser(
        "verifiers",
        help="the tasks of an environment of the package verifiers",
        description="Writes a row per task, in the taskset's order (docs/environments.md).",
    )
    verifiers.add_argument(
        "--config",
        type=Path,
        required=True,
        metavar="TOML",
        help="the run's config; its environment.settings.env names the environment",
    )
    verifiers.add_argument("--output", type=Path, required=True, metavar="DIR", help="new folder")
    verifiers.add_argument(
        "--num-tasks", type=positive, metavar="N", help="only the first N tasks (default: all)"
    )
    generated = sources.add_parser(
        "reasoning_gym",
        help="the problems that a config's data sources generate",
        description="Writes what a run generates at its start: problems.jsonl for training, and "
        "held_out.jsonl, as for evaluate.py --problems (docs/data.md).",
    )
    generated.add_argument(
        "--config", type=Path, required=True, metavar="TOML", help="the run's config"
    )
    generated.add_argument("--output", type=Path, required=True, metavar="DIR", help="new folder")
    deepscaler.add_argument(
        "--suffix",
        metavar="TEXT",
        help="appended to every prompt (default: evaluation's request for a boxed answer)",
    )
    _add_own(own)
    return parser.parse_args()


def _add_own(own: argparse.ArgumentParser) -> None:
    own.add_argument(
        "--suffix", default="", metavar="TEXT", help="appended to every prompt (default: none)"
    )
    own.add_argument(
        "--kind",
        type=_kind,
        default="math",
        metavar="KIND",
        help=f"verifier, as reward.kind: {', '.join(KINDS)} or FILE.py:NAME (default: %(default)s)",
    )
    own.add_argument(
        "--format",
        choices=FORMATS,
        default="auto",
        help="format of the rows, as data.format (default: %(default)s)",
    )
    for key in ("prompt", "answer", "id"):
        own.add_argument(
            f"--{key}-key",
            default="",
            metavar="KEY",
            help=f"key of a row, as data.{key}_key; with dots for a key within a value",
        )
    own.add_argument(
        "--keep-columns",
        nargs="+",
        default=[],
        metavar="NAME",
        help="keep these columns in the problem file, beside those that the verifier takes",
    )
    own.add_argument(
        "--answer-after",
        default="",
        metavar="TEXT",
        help="keep only what follows the last TEXT of an answer, such as GSM8K's '####'",
    )


def _kind(text: str) -> str:
    if text in KINDS or is_code(text):
        return text
    raise argparse.ArgumentTypeError(f"must be {', '.join(KINDS)} or FILE.py:NAME")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input",
        nargs="+",
        type=Path,
        required=True,
        metavar="PATH",
        help="input files, in this order",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="new folder")
    parser.add_argument(
        "--model",
        required=True,
        metavar="HF_DIR",
        help="the policy's Hugging Face folder, for its tokenizer",
    )
    parser.add_argument(
        "--max-prompt-tokens",
        type=positive,
        default=2048,
        metavar="N",
        help="drop longer prompts; as data.max_prompt_tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--chat-template",
        action="store_true",
        help="measure prompts in the tokenizer's chat template; as data.chat_template",
    )
    parser.add_argument(
        "--benchmarks",
        type=Path,
        metavar="DIR",
        help="drop problems of the benchmarks in this folder, as for evaluate.py --data",
    )


if __name__ == "__main__":
    sys.exit(main())
