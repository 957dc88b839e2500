"""Command line of tools/evaluate.py. Imports no torch: its help comes at once."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from gapo_megatron import user_code
from gapo_tools.evaluation.benchmarks import BENCHMARKS
from gapo_tools.evaluation.paper import read_settings


def parse(description: str, epilog: str) -> argparse.Namespace:
    """Read the command line; a wrong one ends the process with 2, as argparse does."""
    parser = argparse.ArgumentParser(description=description, epilog=epilog)
    _add_inputs(parser)
    _add_sampling(parser)
    _add_engine(parser)
    arguments = parser.parse_args()
    if not arguments.compare and not (arguments.model and arguments.output):
        parser.error("give --model and --output, or --compare")
    if arguments.compare and arguments.model:
        parser.error("--compare reads finished evaluations; do not give --model")
    if arguments.problems and bool(arguments.kind) == bool(arguments.config):
        parser.error("--problems needs its verifier: give either --kind or --config")
    if arguments.kind and not arguments.problems:
        parser.error("--kind is the verifier of --problems; benchmarks have their own")
    if arguments.benchmarks is None:
        six = [name for name, benchmark in BENCHMARKS.items() if benchmark.in_average]
        arguments.benchmarks = [] if arguments.problems else six
    return arguments


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="HF_DIR", help="Hugging Face folder")
    parser.add_argument(
        "--benchmarks",
        type=_benchmarks,
        metavar="NAME[,NAME...]",
        help=f"{', '.join(BENCHMARKS)}, or code of your own, path/to/file.py:NAME (default: the "
        "paper's six for mathematics; none with --problems)",
    )
    parser.add_argument(
        "--problems",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="problems of your own, in the format of training data; each file is a benchmark "
        "with its name",
    )
    parser.add_argument(
        "--kind",
        metavar="KIND",
        help="verifier of --problems, as reward.kind of a config: a name, or code of your own",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="RUN_OR_FILE",
        help="a run's folder or a training config, whose [data] makes the prompts where no option "
        "says how, whose [environment] answers the model, and whose [reward] judges --problems",
    )
    parser.add_argument(
        "--data",
        type=Path,
        default="data/benchmarks",
        metavar="DIR",
        help="one folder per benchmark, as published (default: %(default)s)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="folder for samples, figures and tables"
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        metavar="[LABEL=]DIR[,DIR...]",
        help="compare evaluations: the first with each other one. DIRs of one label are training "
        "seeds; a label that is a method (gapo, gspo) gets the published figures beside it",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--setting",
        choices=read_settings(),
        help="the paper's sampling for one of its models; other options override it",
    )
    group.add_argument("--num-samples", type=int, metavar="N", help="samples per problem")
    group.add_argument("--temperature", type=float, metavar="T", help="default: 1")
    group.add_argument("--top-p", type=float, metavar="P", help="default: 1")
    group.add_argument("--max-response-tokens", type=int, metavar="N")
    group.add_argument(
        "--max-prompt-tokens", type=int, default=2048, metavar="N", help="default: %(default)s"
    )
    group.add_argument(
        "--seeds", type=_seeds, default=[0], metavar="N[,N...]", help="sampling seeds (default: 0)"
    )
    group.add_argument(
        "--environment",
        metavar="KIND",
        help="what answers the model, as environment.kind of a config, without settings; in place "
        "of the [environment] of --config (default: nothing)",
    )
    group.add_argument(
        "--chat-template",
        action="store_true",
        help="wrap prompts in the tokenizer's chat template; as data.chat_template in training",
    )
    group.add_argument(
        "--system-prompt", default="", metavar="TEXT", help="as data.system_prompt in training"
    )
    group.add_argument(
        "--chat-template-kwargs",
        type=_variables,
        default={},
        metavar="JSON",
        help="as data.chat_template_kwargs in training: '{\"enable_thinking\": false}'",
    )
    group.add_argument(
        "--end-tokens",
        nargs="+",
        default=[],
        metavar="TOKEN",
        help="as data.end_tokens in training (default: all that the model's files name)",
    )
    group.add_argument(
        "--template-date",
        default="",
        metavar="YYYY-MM-DD",
        help="as data.template_date in training (default: the date of the run that made the model "
        "or that --config names, or else today)",
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--precision", choices=["bf16", "fp16", "fp32"], default="bf16")
    group.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    group.add_argument("--enforce-eager", action="store_true", help="skip compilation")
    group.add_argument(
        "--sandbox",
        metavar="KIND",
        help="where the model's programs run: bubblewrap, apptainer:/PATH/OF/IMAGE, "
        "https://HOST:PORT (a service), sandboxfusion:http://HOST:PORT, or unsafe: with your own "
        "rights (default: bubblewrap; for --problems with --config, as that says)",
    )


def _variables(text: str) -> dict[str, Any]:
    try:
        variables = json.loads(text)
    except ValueError:
        variables = None
    if not isinstance(variables, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object")
    return variables


def _benchmarks(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in BENCHMARKS and not user_code.is_code(name):
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(BENCHMARKS)}")
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text}: a benchmark is named twice")
    return names


def _seeds(text: str) -> list[int]:
    if not all(seed.isdecimal() for seed in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: seeds must be whole numbers, as 0,1,2")
    seeds = [int(seed) for seed in text.split(",")]
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text}: seeds must be different")
    return seeds
