"""Time of a whole step with and without leaving out what cannot change the weights.

    make demo && python benchmarks/skip.py

Samples many problems with the demo's warm start and vLLM, once, then builds batches of 32 groups
with a chosen share of groups that all or none of the rollouts solve (A = 0). Takes the same step on
each from the same weights: as the trainer does it, and computing everything (sequences with A = 0
enter the model, every row and every micro-batch runs its backward pass). The old pass of the first
mini-batch is left out on both sides. Prints seconds of `learn` (median of interleaved repeats), the
shares of work left out, and how far apart the weights end, relative to how far they moved.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from gapo_megatron import rewards
from gapo_megatron.batching import plan, sequence_lengths
from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import Config, load_config
from gapo_megatron.data.schema import read_prompts
from gapo_megatron.data.source import PromptSource
from gapo_megatron.data.tokenizer import load_tokenizer
from gapo_megatron.hf.weights import read_hf
from gapo_megatron.learn import step as learn_module
from gapo_megatron.learn.step import learn
from gapo_megatron.objective import make_batch
from gapo_megatron.policy import Policy, initialize
from gapo_megatron.policy.model import read_hf_config
from gapo_megatron.policy.parallel import ParallelGroups
from gapo_megatron.rollout.describe import describe
from gapo_megatron.rollout.environments.one_turn import OneTurn
from gapo_megatron.rollout.generate import Watch, generate
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.rollout.vllm import RolloutEngine
from gapo_megatron.run import process_group
from gapo_megatron.types import Group

Weights = dict[str, torch.Tensor]


def main() -> None:
    """Sample, run both ways for every share, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", default="configs/demo.toml", help="default: %(default)s")
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=[0.0, 0.25, 0.5, 0.75],
        help="of groups with A = 0 (default: %(default)s)",
    )
    parser.add_argument("--repeats", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--learning-rate", type=float, default=None, help="default: the config's")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    arguments = parser.parse_args()
    config = load_config(arguments.config)
    if not (Path(config.model.hf_dir) / "config.json").exists():
        raise SystemExit("the demo's warm start is not there: run `make demo` first")
    optimizer = {"warmup_steps": 0}
    if arguments.learning_rate is not None:
        optimizer["learning_rate"] = arguments.learning_rate
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update=optimizer)})
    world = process_group.start(600.0)
    groups = initialize(config.parallel)
    torch.set_num_threads(arguments.threads)
    judged = sample(config, world.device, num_prompts=16 * config.batch.rollout_prompts)

    table = Table(title=f"one step of {arguments.config}, {arguments.repeats} repeats")
    columns = "A = 0 groups|all, s|skipping, s|ratio|forward skipped|head backward skipped"
    for column in (columns + "|weights apart / moved").split("|"):
        table.add_column(column, justify="right")
    for share in arguments.shares:
        chosen = choose(judged, share=share, number=config.batch.rollout_prompts)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(arguments.repeats + 1):
            weights: dict[bool, Weights] = {}
            for skipping in seconds:
                spent, metrics, weights[skipping] = run(
                    config, groups, world.device, chosen, skipping=skipping
                )
                seconds[skipping].append(spent)
                if skipping:
                    shown = metrics
        fast, slow = (statistics.median(seconds[s][1:]) for s in (True, False))
        row = {
            "share": share,
            "all_s": slow,
            "skipping_s": fast,
            "ratio": fast / slow,
            "forward": shown["skip/forward_token_share"],
            "head_backward": shown["skip/head_backward_token_share"],
            "apart": distance(weights[True], weights[False], read_hf(config.model.hf_dir)),
        }
        print(json.dumps(row), flush=True)
        table.add_row(
            f"{share:.0%}",
            f"{slow:.3f}",
            f"{fast:.3f}",
            f"{fast / slow:.2f}",
            f"{row['forward']:.1%}",
            f"{row['head_backward']:.1%}",
            f"{row['apart']:.1e}",
        )
    Console(width=120).print(table)


def sample(config: Config, device: torch.device, *, num_prompts: int) -> list[Group]:
    """Real rollouts of real problems, judged."""
    tokenizer = load_tokenizer(config.model.hf_dir)
    problems = read_prompts(
        config.data.train_path,
        tokenizer=tokenizer,
        max_prompt_tokens=config.data.max_prompt_tokens,
        kind=config.reward.kind,
    )
    hf_config = read_hf_config(config.model.hf_dir)
    engine = RolloutEngine(config, hf_config, device=device, load_weights=True)
    prompts = PromptSource(problems, seed=config.run.seed).next_batch(num_prompts)
    settings = SamplingSettings(
        config.batch.rollouts_per_prompt,
        config.rollout.max_response_tokens,
        seed=config.run.seed,
        step=0,
        temperature=config.rollout.temperature,
    )
    with rewards.start_pool(config.reward, num_workers=2) as pool:
        judging = rewards.Judging(pool, prompts, judge=OneTurn(tokenizer).judge)
        watch = Watch(on_ended=judging.add, shows_progress=True)
        rollouts = generate(engine, prompts, settings, watch=watch)
        verdicts = rewards.score(judging, prompts, rollouts)
    engine.sleep()
    return [Group(*one) for one in zip(prompts, rollouts, verdicts, strict=True)]


def choose(judged: Sequence[Group], *, share: float, number: int) -> list[Group]:
    """The first groups of each kind, in the order in which they were drawn."""
    num_zero = round(share * number)
    left = {True: num_zero, False: number - num_zero}
    chosen = []
    for group in judged:
        is_zero = len(set(group.rewards)) == 1
        if left[is_zero]:
            left[is_zero] -= 1
            chosen.append(group)
    if any(left.values()):
        raise SystemExit(f"too few groups for a share of {share}: {left} more with A = 0 or not")
    return chosen


def run(
    config: Config,
    groups: ParallelGroups,
    device: torch.device,
    judged: Sequence[Group],
    *,
    skipping: bool,
) -> tuple[float, dict[str, float], Weights]:
    """Seconds and metrics of one step from the warm start, and the weights after it."""
    policy = Policy.build(config, groups, device)
    policy.load_hf_weights(read_hf(config.model.hf_dir))
    facts, tokens = describe(judged)
    batch = make_batch(facts, config.objective.resolve()).with_tokens(dict(enumerate(tokens)))
    packing = plan(
        sequence_lengths(batch),
        batch.advantages,
        num_response_tokens=batch.num_response_tokens,
        valid=batch.valid,
        num_minibatches=config.batch.num_minibatches,
        max_tokens_per_microbatch=config.batch.max_tokens_per_microbatch,
        data_parallel_size=groups.dp_size,
        keep_zero_advantage=not skipping,
    )
    with contextlib.nullcontext() if skipping else everything_computed():
        start = time.perf_counter()
        metrics = learn(policy, batch, packing, config, Stopwatch())
        spent = time.perf_counter() - start
    return spent, metrics, {name: weight.clone() for name, weight in policy.iterate_hf_weights()}


@contextlib.contextmanager
def everything_computed() -> Iterator[None]:
    """Take every row for one with a gradient."""
    with patch.object(learn_module, "may_lose_gradients", lambda *_, **__: False):
        yield


def distance(first: Weights, second: Weights, start: Iterator[tuple[str, torch.Tensor]]) -> float:
    """Norm of the difference between two sets of weights, over that of the step to the first."""
    apart = moved = 0.0
    for name, weight in start:
        apart += float((first[name] - second[name]).double().square().sum())
        moved += float((first[name] - weight).double().square().sum())
    return (apart / moved) ** 0.5


if __name__ == "__main__":
    main()
