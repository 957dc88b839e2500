#!/usr/bin/env python
"""Evaluate a model on benchmarks, the paper's or your own, or compare evaluations.

Uses the engine and the verifiers of training. Started by torchrun or srun, several ranks share the
work. Samples and verdicts are kept in --output: after an interruption the same command continues.
docs/evaluation.md explains the figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from gapo_megatron import user_code
from gapo_megatron.data.benchmarks import BENCHMARKS
from gapo_megatron.errors import ConfigError, GapoError
from gapo_megatron.evaluate.paper import Sampling, Setting, read_settings
from gapo_megatron.evaluate.samples import keep_settings
from gapo_megatron.hf.folder import claim
from gapo_megatron.io.files import check_overwritable, code_sha256, file_sha256, write_atomically
from gapo_megatron.run.fail_fast import fail_fast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from gapo_megatron.config import Config
    from gapo_megatron.evaluate.benchmark import Task
    from gapo_megatron.evaluate.table import Table
    from gapo_megatron.run.process_group import World

console = Console()

_OF_TEMPLATE = ("system_prompt", "chat_template_kwargs")

Remaining = dict[tuple[str, int], list[str]]
"""Benchmark and seed -> ids of the problems without stored samples."""


def main() -> int:
    """0 done, 1 failed, 2 usage, 130 interrupted."""
    arguments = _parse()
    settings = read_settings()
    if arguments.compare:
        try:
            _compare(arguments, settings)
        except GapoError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2 if isinstance(error, ConfigError) else 1
        return 0
    with fail_fast():
        _evaluate(arguments, settings)
    return 0


def _evaluate(arguments: argparse.Namespace, settings: dict[str, Setting]) -> None:
    from gapo_megatron.run.processes import quiet_libraries

    quiet_libraries()
    import torch.distributed as dist

    from gapo_megatron import rewards
    from gapo_megatron.data.tokenizer import load_tokenizer
    from gapo_megatron.evaluate.chosen import choose, judge_of
    from gapo_megatron.hf.model_folder import check_model_folder
    from gapo_megatron.run import process_group

    sampling = _sampling(arguments, settings)
    config = _config(arguments, sampling)
    chosen = choose(
        arguments.benchmarks,
        arguments.problems,
        data_dir=arguments.data,
        reward=config.reward,
        judge=judge_of(config.reward, arguments.kind, arguments.config),
    )
    for one in chosen:
        rewards.check(one.reward)
    facts = check_model_folder(arguments.model, field="--model")
    tokenizer = load_tokenizer(arguments.model, field="--model", facts=facts)
    tasks = [one.read(config, tokenizer) for one in chosen]
    alike = {"program": "evaluate", **vars(arguments)}
    world = process_group.start(config.parallel.timeout_s, alike=alike)
    shared: list[Remaining] = [{}]
    if world.rank == 0:
        _warn_of_template(arguments, tokenizer)
        digests = {one.name: one.sha256 for one in chosen}
        _keep_settings(arguments, sampling, digests)
        shared = [_remaining(arguments, tasks)]
    dist.broadcast_object_list(shared)  # ranks may see the disk differently: the first decides
    if any(shared[0].values()):
        _sample(arguments, config, sampling, tasks, shared[0], world)
    if world.rank == 0:
        _report(arguments, sampling, tasks, digests)


def _warn_of_template(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.chat_template and not arguments.chat_template:
        print(
            "warning: the tokenizer has a chat template, but --chat-template is not given; give it "
            "if data.chat_template was true in training",
            file=sys.stderr,
        )


def _sample(
    arguments: argparse.Namespace,
    config: Config,
    sampling: Sampling,
    tasks: Sequence[Task],
    remaining: Remaining,
    world: World,
) -> None:
    """Build the engine, and sample the remaining problems."""
    from gapo_megatron import rewards
    from gapo_megatron.evaluate.benchmark import sample_task
    from gapo_megatron.policy.model import read_hf_config
    from gapo_megatron.rollout.vllm import RolloutEngine
    from gapo_megatron.run import process_group

    num_workers = min(process_group.share_of_cores(), 8)
    hf_config = read_hf_config(arguments.model)
    engine = RolloutEngine(config, hf_config, device=world.device, load_weights=True)
    for task in tasks:
        if not any(remaining[task.name, seed] for seed in arguments.seeds):
            continue
        with rewards.start_pool(task.reward, num_workers=num_workers) as pool:
            pool.wait_until_ready()
            for seed in arguments.seeds:
                sample_task(
                    engine,
                    task,
                    remaining=set(remaining[task.name, seed]),
                    seed=seed,
                    sampling=sampling,
                    pool=pool,
                    output_dir=arguments.output,
                )


def _report(
    arguments: argparse.Namespace,
    sampling: Sampling,
    tasks: Sequence[Task],
    digests: dict[str, str],
) -> None:
    """Write results.json, .md, .tex and solve_rates.png of all complete benchmarks and seeds."""
    from gapo_megatron.evaluate.heat_map import draw_solve_rates
    from gapo_megatron.evaluate.results import collect, write_results
    from gapo_megatron.evaluate.tables import results_tables, title

    results = collect(
        arguments.output,
        model=arguments.model,
        setting=arguments.setting or "",
        sampling=sampling,
        files=digests,
        problem_ids={task.name: [prompt.id for prompt in task.prompts] for task in tasks},
        seeds=arguments.seeds,
    )
    write_results(results, arguments.output)
    tables = results_tables(results)
    _print_tables(tables)
    _write_tables(tables, arguments.output / "results")
    rates = {
        title(name): {
            f"seed {seed}": {
                problem: correct / known if known else math.nan
                for problem, (known, correct) in one.counts.items()
            }
            for seed, one in seeds.items()
        }
        for name, seeds in results.benchmarks.items()
    }
    picture = draw_solve_rates(rates, arguments.output / "solve_rates.png")
    console.print(
        f"results        {arguments.output / 'results.json'} (.md, .tex)",
        markup=False,
        soft_wrap=True,
    )
    console.print(f"picture        {picture}", markup=False, soft_wrap=True)


def _compare(arguments: argparse.Namespace, settings: dict[str, Setting]) -> None:
    """Print the tables; with --output also write them and the picture."""
    from gapo_megatron.evaluate.compare import Method, benchmarks_of, compare
    from gapo_megatron.evaluate.heat_map import draw_solve_rates
    from gapo_megatron.evaluate.tables import title

    methods = [Method.read(text) for text in arguments.compare]
    tables = compare(methods, settings)
    _print_tables(tables)
    if arguments.output is None:
        return
    names = [f"comparison{kind}" for kind in (".md", ".tex", ".png")]
    claim(arguments.output, names, field="--output", made_by="evaluate")
    _write_tables(tables, arguments.output / "comparison")
    everyones = [
        name for name in benchmarks_of(methods) if all(name in method for method in methods)
    ]
    rates = {
        title(name): {method.label: method.solve_rates(name) for method in methods}
        for name in everyones
    }
    if rates:
        draw_solve_rates(rates, arguments.output / "comparison.png")
    console.print(f"written        {arguments.output}/comparison.*", markup=False, soft_wrap=True)


def _print_tables(tables: Sequence[Table]) -> None:
    for table in tables:
        console.print(table.to_text(), markup=False, highlight=False, soft_wrap=True)


def _write_tables(tables: Sequence[Table], path: Path) -> None:
    write_atomically(path.with_suffix(".md"), "\n".join(table.to_markdown() for table in tables))
    write_atomically(path.with_suffix(".tex"), "\n".join(table.to_latex() for table in tables))


def _sampling(arguments: argparse.Namespace, settings: dict[str, Setting]) -> Sampling:
    """The paper's setting, if one is named, with the command line's values in place of its own."""
    given = {
        field.name: getattr(arguments, field.name)
        for field in dataclasses.fields(Sampling)
        if getattr(arguments, field.name) is not None
    }
    if arguments.setting:
        return dataclasses.replace(settings[arguments.setting].sampling, **given)
    given = {"temperature": 1.0, "top_p": 1.0} | given
    for name in ("num_samples", "max_response_tokens"):
        if name not in given:
            raise ConfigError(f"give --{name.replace('_', '-')}, or a --setting that has it")
    return Sampling(**given)


def _config(arguments: argparse.Namespace, sampling: Sampling) -> Config:
    """A config for the engine alone; nothing is trained."""
    from gapo_megatron.config import parse_config

    longest = arguments.max_prompt_tokens + sampling.max_response_tokens
    return parse_config(
        {
            "run": {"output_dir": str(arguments.output), "num_steps": 1},
            # A rank that is done with a benchmark waits for the slowest.
            "parallel": {"timeout_s": 24 * 3600},
            "model": {"hf_dir": arguments.model, "precision": arguments.precision},
            "data": {
                "train_path": "unused",
                "max_prompt_tokens": arguments.max_prompt_tokens,
                "chat_template": arguments.chat_template,
                "system_prompt": arguments.system_prompt,
                "chat_template_kwargs": arguments.chat_template_kwargs,
            },
            "batch": {"max_tokens_per_microbatch": longest},
            "rollout": {
                "max_response_tokens": sampling.max_response_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "tensor_parallel_size": arguments.tensor_parallel_size,
                "memory_fraction": 0.9,  # no trainer shares the GPU
                "enforce_eager": arguments.enforce_eager,
            },
            "evaluation": {"samples_per_prompt": sampling.num_samples},
            # The kind is every benchmark's own in turn.
            "reward": {"kind": "math", "sandbox": arguments.sandbox},
        },
        source="the command line",
    )


def _keep_settings(
    arguments: argparse.Namespace, sampling: Sampling, digests: dict[str, str]
) -> None:
    """Refuse to mix samples of different weights, prompts or settings in one folder."""
    from gapo_megatron.hf.model_folder import TOKENIZER_FILES

    is_ours = (arguments.output / "settings.json").exists()  # `keep_settings` looks at it
    names = ("results.json", "results.md", "results.tex", "solve_rates.png", *digests)
    check_overwritable(arguments.output, names, field="--output", is_ours=is_ours)
    folder, model = Path(arguments.model), hashlib.sha256()
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"--model {folder}: has no .safetensors files")
    # The weights, the end tokens, and the tokenizer with its template.
    kinds = ("*.safetensors", "*.json", "*.jinja", *TOKENIZER_FILES)
    for path in sorted({path for kind in kinds for path in folder.glob(kind)}):
        model.update(bytes.fromhex(file_sha256(path)))
    keep_settings(
        arguments.output / "settings.json",
        {
            "model_sha256": model.hexdigest(),
            "chat_template": arguments.chat_template,
            # Older versions do not have these settings.
            **{key: value for key in _OF_TEMPLATE if (value := getattr(arguments, key))},
            "precision": arguments.precision,
            **dataclasses.asdict(sampling),
        },
    )
    for name, digest in digests.items():
        keep_settings(arguments.output / name / "problems.json", {"sha256": digest})


def _remaining(arguments: argparse.Namespace, tasks: Sequence[Task]) -> Remaining:
    """Problems left to sample; refuses to mix verdicts of different verifiers in one folder."""
    remaining = {
        (task.name, seed): task.remaining(arguments.output, seed)
        for task in tasks
        for seed in arguments.seeds
    }
    for task in tasks:
        if not any(remaining[task.name, seed] for seed in arguments.seeds):
            continue
        judged_by: dict[str, Any] = {"code": code_sha256("rewards", "data/benchmarks.py")}
        if "code" in [one.kind for one in task.reward.by_name.values()]:
            judged_by["sandbox"] = arguments.sandbox
        # Older files do not have these two, nor those of a verifier without them.
        reward = task.reward.model_dump(include={"verifiers", "timeout_s"}, exclude_defaults=True)
        if names := task.reward.code_names:
            reward |= task.reward.model_dump(include={"kind", "settings", "correct_above"})
            digests = [user_code.digest(one, setting="reward.kind") for one in names]
            judged_by["reward_sha256"] = digests
        if reward:
            judged_by["reward"] = reward
        keep_settings(arguments.output / task.name / "judge.json", judged_by, done="judged")
    return remaining


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n")[1]
    )
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
        metavar="FILE",
        help="instead of --kind: a training config, whose [reward] judges --problems",
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
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--setting",
        choices=read_settings(),
        help="the paper's sampling for one of its models; other options override it",
    )
    sampling.add_argument("--num-samples", type=int, metavar="N", help="samples per problem")
    sampling.add_argument("--temperature", type=float, metavar="T", help="default: 1")
    sampling.add_argument("--top-p", type=float, metavar="P", help="default: 1")
    sampling.add_argument("--max-response-tokens", type=int, metavar="N")
    sampling.add_argument(
        "--max-prompt-tokens", type=int, default=2048, metavar="N", help="default: %(default)s"
    )
    sampling.add_argument(
        "--seeds", type=_seeds, default=[0], metavar="N[,N...]", help="sampling seeds (default: 0)"
    )
    sampling.add_argument(
        "--chat-template",
        action="store_true",
        help="wrap prompts in the tokenizer's chat template; as data.chat_template in training",
    )
    sampling.add_argument(
        "--system-prompt", default="", metavar="TEXT", help="as data.system_prompt in training"
    )
    sampling.add_argument(
        "--chat-template-kwargs",
        type=_variables,
        default={},
        metavar="JSON",
        help="as data.chat_template_kwargs in training: '{\"enable_thinking\": false}'",
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument("--precision", choices=["bf16", "fp16", "fp32"], default="bf16")
    engine.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    engine.add_argument("--enforce-eager", action="store_true", help="skip compilation")
    engine.add_argument(
        "--sandbox",
        default="bubblewrap",
        help="where the model's programs run: bubblewrap, apptainer:/PATH/OF/IMAGE, "
        "tcp://HOST:PORT (a service), or unsafe: with your own rights (default: %(default)s)",
    )
    arguments = parser.parse_args()
    if not arguments.compare and not (arguments.model and arguments.output):
        parser.error("give --model and --output, or --compare")
    if arguments.compare and arguments.model:
        parser.error("--compare reads finished evaluations; do not give --model")
    if bool(arguments.problems) != (bool(arguments.kind) + bool(arguments.config) == 1):
        parser.error("--problems needs its verifier, and nothing else does: --kind or --config")
    if arguments.benchmarks is None:
        six = [name for name, benchmark in BENCHMARKS.items() if benchmark.in_average]
        arguments.benchmarks = [] if arguments.problems else six
    return arguments


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


if __name__ == "__main__":
    sys.exit(main())
