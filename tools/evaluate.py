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
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from gapo_megatron import user_code
from gapo_megatron.errors import ConfigError, GapoError
from gapo_megatron.formats.folder import claim
from gapo_megatron.io.files import check_overwritable, file_sha256, write_atomically
from gapo_megatron.run.fail_fast import fail_fast
from gapo_tools.evaluation.code_digest import code_sha256
from gapo_tools.evaluation.options import parse
from gapo_tools.evaluation.paper import Sampling, Setting, read_settings
from gapo_tools.evaluation.samples import keep_settings

if TYPE_CHECKING:
    from gapo_megatron.config import Config, EnvironmentConfig
    from gapo_megatron.rollout.environment import Environment
    from gapo_megatron.run.process_group import World
    from gapo_tools.evaluation.sampler import Task
    from gapo_tools.evaluation.table import Table

console = Console(markup=False)

_OF_TEMPLATE = ("system_prompt", "chat_template_kwargs", "end_tokens")

_JUDGE_CODE = ("gapo_megatron/rewards", "gapo_tools/evaluation/benchmarks.py")
_ENVIRONMENT_CODE = (
    *("gapo_megatron/rollout/environments", "gapo_megatron/rollout/agents"),
    *("gapo_megatron/rollout/chat.py", "gapo_megatron/rollout/turns.py"),
)

_UNUSED_TEMPLATE = (
    "the tokenizer has a chat template, but --chat-template is not given; give it if "
    "data.chat_template was true in training"
)

Remaining = dict[tuple[str, int], list[str]]
"""Benchmark and seed -> ids of the problems without stored samples."""


def main() -> int:
    """0 done, 1 failed, 2 usage, 130 interrupted."""
    about, keeps, *_ = __doc__.split("\n\n")
    arguments = parse(about, keeps)
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
    from gapo_megatron.data.messages import begin_template
    from gapo_megatron.data.template_date import DATE
    from gapo_megatron.data.tokenizer import load_tokenizer
    from gapo_megatron.formats.model_folder import check_model_folder
    from gapo_megatron.rollout import environments
    from gapo_megatron.run import process_group
    from gapo_tools.evaluation.chosen import (
        choose,
        date_of_run,
        environment_of,
        judge_of,
        with_prompts_of_config,
    )
    from gapo_tools.evaluation.engine_checks import check_engine

    arguments = with_prompts_of_config(arguments)
    acts = environment_of(arguments.environment, arguments.config)
    sampling = _sampling(arguments, settings, acts)
    config = _config(arguments, sampling, acts)
    chosen = choose(
        arguments.benchmarks,
        arguments.problems,
        data_dir=arguments.data,
        reward=config.reward,
        judge=judge_of(
            config.reward,
            arguments.kind,
            arguments.config if arguments.problems else None,
            sandbox=arguments.sandbox,
        ),
    )
    for one in chosen:
        rewards.check(one.reward)
    environments.check(acts, system_prompt=config.data.system_prompt)
    facts = check_model_folder(arguments.model, field="--model")
    check_engine(facts, config)
    tokenizer = load_tokenizer(arguments.model, field="--model", facts=facts)
    date = begin_template(
        tokenizer,
        config.data,
        arguments.output,
        is_used=arguments.chat_template or acts.is_called,
        inherited=date_of_run(Path(arguments.model), arguments.config),
    )
    tasks = [one.read(config, tokenizer) for one in chosen]
    environment = environments.build(acts, tokenizer, chat_template=arguments.chat_template)
    alike = {"program": "evaluate", **vars(arguments), "[environment]": acts, DATE: date}
    world = process_group.start(config.parallel.timeout_s, alike=alike)
    shared: list[Remaining] = [{}]
    if world.rank == 0:
        if tokenizer.chat_template and not arguments.chat_template:
            print(f"warning: {_UNUSED_TEMPLATE}", file=sys.stderr)
        digests = {one.name: one.sha256 for one in chosen}
        _keep_settings(arguments, sampling, digests, acts, date=date)
        shared = [_remaining(arguments, tasks, acts)]
    dist.broadcast_object_list(shared)  # ranks may see the disk differently: the first decides
    if any(shared[0].values()):
        _sample(config, sampling, tasks, shared[0], environment, world)
    if world.rank == 0:
        _report(arguments, sampling, tasks, digests, date=date)


def _sample(
    config: Config,
    sampling: Sampling,
    tasks: Sequence[Task],
    remaining: Remaining,
    environment: Environment,
    world: World,
) -> None:
    """Build the engine, and sample the remaining problems."""
    from gapo_megatron import rewards
    from gapo_megatron.compat.vllm import why_no_cpu_fp8
    from gapo_megatron.data.end_tokens import find_end_tokens
    from gapo_megatron.models.quantization import quantization_of
    from gapo_megatron.policy.model import read_hf_config
    from gapo_megatron.rollout.calls import Acting
    from gapo_megatron.rollout.turns import Turns
    from gapo_megatron.rollout.vllm import RolloutEngine
    from gapo_megatron.run.cores import share_of_cores
    from gapo_tools.evaluation.sampler import Sampler

    hf_config, acts = read_hf_config(config.model.hf_dir), config.environment
    method = quantization_of(hf_config)
    if method and world.device.type == "cpu" and (reason := why_no_cpu_fp8()):
        raise ConfigError(
            f"model.hf_dir ({config.model.hf_dir}): this CPU cannot compute with {method} weights "
            f"({reason}): give a folder of floats (docs/conversion.md makes one)"
        )
    num_workers = min(share_of_cores(), 8)
    ends = find_end_tokens(
        tasks[0].tokenizer,
        config.data,
        config.model.hf_dir,
        vocab_size=hf_config.vocab_size,
        field="--model",
    )
    if ends.warning and world.rank == 0:
        print(f"warning: {ends.warning}", file=sys.stderr)
    turns = Turns(tasks[0].tokenizer, acts.stop, eos_token_ids=ends.ids)
    engine = RolloutEngine(config, hf_config, device=world.device, load_weights=True)
    acting = Acting(
        environment,
        acts,
        turns,
        max_response_tokens=sampling.max_response_tokens,
        vocab_size=engine.vocab_size,
    )
    sampler = Sampler(engine, acting, sampling, Path(config.run.output_dir))
    for task in tasks:
        left = {seed: set(ids) for (name, seed), ids in remaining.items() if name == task.name}
        if not any(left.values()):
            continue
        with rewards.start_pool(task.reward, num_workers=num_workers) as pool:
            pool.wait_until_ready()
            for seed, ids in left.items():
                sampler.sample(task, remaining=ids, seed=seed, pool=pool)


def _report(
    arguments: argparse.Namespace,
    sampling: Sampling,
    tasks: Sequence[Task],
    digests: dict[str, str],
    *,
    date: str,
) -> None:
    """Write results.json and results.md of all complete benchmarks and seeds."""
    from gapo_tools.evaluation.result_tables import results_tables
    from gapo_tools.evaluation.results import collect, write_results

    results = collect(
        arguments.output,
        model=arguments.model,
        setting=arguments.setting or "",
        sampling=sampling,
        date=date,
        files=digests,
        problem_ids={task.name: [prompt.id for prompt in task.prompts] for task in tasks},
        seeds=arguments.seeds,
    )
    write_results(results, arguments.output)
    _show(results_tables(results), arguments.output / "results.md")
    console.print(f"results        {arguments.output / 'results.json'} (.md)", soft_wrap=True)


def _compare(arguments: argparse.Namespace, settings: dict[str, Setting]) -> None:
    """Print the tables; with --output also write them."""
    from gapo_tools.evaluation.compare import Method, compare

    tables = compare([Method.read(text) for text in arguments.compare], settings)
    if arguments.output is None:
        _show(tables)
        return
    claim(arguments.output, ["comparison.md"], field="--output", made_by="evaluate")
    _show(tables, arguments.output / "comparison.md")
    console.print(f"written        {arguments.output}/comparison.md", soft_wrap=True)


def _show(tables: Sequence[Table], path: Path | None = None) -> None:
    """Print tables, and write them to a Markdown file."""
    for table in tables:
        console.print(table.to_text(), highlight=False, soft_wrap=True)
    if path is not None:
        write_atomically(path, "\n".join(table.to_markdown() for table in tables))


def _sampling(
    arguments: argparse.Namespace, settings: dict[str, Setting], acts: EnvironmentConfig
) -> Sampling:
    """The paper's setting, if one is named, with the command line's values in place of its own."""
    names = ("num_samples", "temperature", "top_p", "max_response_tokens")
    options = {name: getattr(arguments, name) for name in names}
    given = {name: value for name, value in options.items() if value is not None}
    given["environment"] = acts.kind if acts.is_called else ""
    if acts.is_called or acts.stop:
        section = json.dumps(_settings_of(acts, "kind"), sort_keys=True)
        given["environment_sha256"] = hashlib.sha256(section.encode()).hexdigest()
    if arguments.setting:
        return dataclasses.replace(settings[arguments.setting].sampling, **given)
    given = {"temperature": 1.0, "top_p": 1.0} | given
    for name in ("num_samples", "max_response_tokens"):
        if name not in given:
            raise ConfigError(f"give --{name.replace('_', '-')}, or a --setting that has it")
    return Sampling(**given)


def _settings_of(acts: EnvironmentConfig, *excepted: str) -> dict[str, Any]:
    """What of the section decides on samples."""
    return acts.model_dump(mode="json", exclude={"max_concurrent", *excepted})


def _config(arguments: argparse.Namespace, sampling: Sampling, acts: EnvironmentConfig) -> Config:
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
                "end_tokens": arguments.end_tokens,
                "template_date": arguments.template_date,
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
            "environment": acts.model_dump(),
            "evaluation": {"samples_per_prompt": sampling.num_samples},
            # The kind is every benchmark's own in turn.
            "reward": {"kind": "math", "sandbox": arguments.sandbox or "bubblewrap"},
        },
        source="the command line",
    )


def _keep_settings(
    arguments: argparse.Namespace,
    sampling: Sampling,
    digests: dict[str, str],
    acts: EnvironmentConfig,
    *,
    date: str = "",
) -> None:
    """Refuse to mix samples of other weights, prompts, settings or environments in one folder."""
    from gapo_megatron.data.template_date import DATE, DATE_NAME
    from gapo_megatron.formats.model_folder import TOKENIZER_FILES

    is_ours = (arguments.output / "settings.json").exists()  # `keep_settings` looks at it
    names = ("results.json", "results.md", *digests)
    check_overwritable(arguments.output, names, field="--output", is_ours=is_ours)
    folder, model = Path(arguments.model), hashlib.sha256()
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"--model {folder}: has no .safetensors files")
    # The weights, the end tokens, and the tokenizer with its template.
    kinds = ("*.safetensors", "*.json", "*.jinja", *TOKENIZER_FILES)
    for path in sorted({path for kind in kinds for path in folder.glob(kind)}):
        model.update(bytes.fromhex(file_sha256(path)))
    kept = {
        "model_sha256": model.hexdigest(),
        "chat_template": arguments.chat_template,
        **{key: getattr(arguments, key) for key in _OF_TEMPLATE},
        DATE: date,
        "precision": arguments.precision,
        **dataclasses.asdict(sampling),
        "environment": _settings_of(acts),
    }
    del kept["environment_sha256"]
    keep_settings(arguments.output / "settings.json", kept)
    if date:  # pinned, perhaps
        write_atomically(arguments.output / DATE_NAME, date)
    for name, digest in digests.items():
        keep_settings(arguments.output / name / "problems.json", {"sha256": digest})


def _remaining(
    arguments: argparse.Namespace, tasks: Sequence[Task], acts: EnvironmentConfig
) -> Remaining:
    """Problems left to sample; refuses to mix verdicts of different verifiers in one folder."""
    remaining = {
        (task.name, seed): task.remaining(arguments.output, seed)
        for task in tasks
        for seed in arguments.seeds
    }
    for task in tasks:
        if not any(remaining[task.name, seed] for seed in arguments.seeds):
            continue
        judged_by: dict[str, Any] = {"code": code_sha256(*_JUDGE_CODE)}
        if acts.is_called:
            judged_by["environment_code"] = code_sha256(*_ENVIRONMENT_CODE)
        if "code" in [one.kind for one in task.reward.by_setting.values()]:
            judged_by["sandbox"] = task.reward.sandbox
        decides = {"kind", "settings", "correct_above", "components", "verifiers", "timeout_s"}
        judged_by["reward"] = task.reward.model_dump(include=decides)
        digests = [user_code.digest(one, setting="reward.kind") for one in task.reward.code_names]
        judged_by["reward_sha256"] = digests
        keep_settings(arguments.output / task.name / "judge.json", judged_by, done="judged")
    return remaining


if __name__ == "__main__":
    sys.exit(main())
