"""Samples and judges a benchmark, in pieces that are saved as soon as they are judged."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gapo_megatron import rewards
from gapo_megatron.data.benchmarks import Benchmark, Problem
from gapo_megatron.data.messages import check_template
from gapo_megatron.data.schema import encode_problem, read_prompts
from gapo_megatron.evaluate.evaluate import evaluation_seed
from gapo_megatron.evaluate.paper import Sampling
from gapo_megatron.evaluate.samples import Sample, Solved, read_ids, seed_folder, write_samples
from gapo_megatron.rewards import instructions
from gapo_megatron.rollout.engine import Engine
from gapo_megatron.rollout.generate import Hooks, generate
from gapo_megatron.rollout.replicas import Replicas
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.types import Episode, Outcome, Prompt, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from gapo_megatron.config import RewardConfig
    from gapo_megatron.config.schema import DataConfig

logger = logging.getLogger("gapo_megatron.evaluate")

SAMPLES_PER_PIECE = 1024
"""Samples that one engine generates before they are judged and saved: enough to keep it busy, and
minutes of work that a kill loses."""


@dataclass(frozen=True, slots=True)
class Task:
    """A benchmark with its problems, tokenised for one model."""

    name: str
    """Name of the benchmark: its folder in the output."""
    reward: RewardConfig
    """Verifier of the benchmark, and its options."""
    problems: tuple[Problem, ...]
    prompts: tuple[Prompt, ...]
    """Prompts of `problems`, in their order."""
    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of the model."""

    @classmethod
    def read(
        cls,
        benchmark: Benchmark,
        *paths: Path,
        reward: RewardConfig,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
    ) -> Task:
        """Read and tokenise a benchmark's files.

        Raises:
            ConfigError: the tokenizer's chat template does not go with the settings of `data`.
            DataError: a file has an unexpected format, or a prompt is too long; names the problem.
        """
        check_template(data, tokenizer)
        problems = benchmark.load(*paths)
        prompts = []
        for problem in problems:
            token_ids = encode_problem(
                problem.prompt,
                tokenizer,
                data,
                id=problem.id,
                where=str(paths[0].parent),
                setting="--max-prompt-tokens",
            )
            prompts.append(Prompt(problem.id, token_ids, problem.answers[0], problem.level))
        return cls(benchmark.name, reward, tuple(problems), tuple(prompts), tokenizer)

    @classmethod
    def of_file(
        cls,
        name: str,
        path: Path,
        *,
        reward: RewardConfig,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
    ) -> Task:
        """Read and tokenise a file of problems in the format of training data.

        Raises:
            DataError: see `read_prompts`.
        """
        prompts = read_prompts(
            path,
            tokenizer=tokenizer,
            data=data,
            reward=reward,
            columns=rewards.row_columns(reward),
        )
        problems = [Problem(one.id, "", (one.answer,), one.level) for one in prompts]
        return cls(name, reward, tuple(problems), tuple(prompts), tokenizer)

    def remaining(self, output_dir: Path, seed: int) -> list[str]:
        """Ids of the problems without saved samples, in order."""
        kept = read_ids(seed_folder(output_dir, self.name, seed))
        return [prompt.id for prompt in self.prompts if prompt.id not in kept]


def sample_task(
    engine: Engine,
    task: Task,
    *,
    remaining: Collection[str],
    seed: int,
    sampling: Sampling,
    pool: rewards.Pool,
    output_dir: Path,
) -> None:
    """Sample, judge and save the remaining problems of a benchmark, for one seed.

    The samples depend only on seed and problem: not on the number of ranks or on samples saved
    earlier, up to the rounding of a batched forward pass.

    Args:
        engine: holds the weights to evaluate.
        task: the same on every rank.
        remaining: ids of the problems to sample, the same on every rank. One rank calls
            `Task.remaining` for all, because ranks may see a shared disk differently.
        seed: seed of the samples.
        sampling: sampling settings.
        pool: workers with the benchmark's verifier.
        output_dir: folder of the evaluation, on a disk that all ranks share.

    Collectives: those of `rollout.generate` and `Replicas.gather`, on every rank.
    """
    folder = seed_folder(output_dir, task.name, seed)
    prompts = [prompt for prompt in task.prompts if prompt.id in remaining]
    num_done = len(task.prompts) - len(prompts)
    replicas = engine.replicas
    settings = SamplingSettings(
        num_samples=sampling.num_samples,
        max_response_tokens=sampling.max_response_tokens,
        seed=evaluation_seed(seed),
        step=0,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
    )
    for piece in _pieces(prompts, num_replicas=replicas.count, sampling=sampling):
        logger.info(
            "%s, seed %d: %d of %d problems done, sampling the next %d",
            task.name,
            seed,
            num_done,
            len(task.prompts),
            len(piece),
        )
        mine = replicas.share(piece)
        groups = generate(engine, mine, settings, hooks=Hooks(shows_progress=True))
        assert groups is not None, "generation without should_abort is never aborted"
        groups = replicas.part(groups)
        samples = _judge(replicas, groups, task, pool=pool)
        if groups:
            write_samples(folder, samples)
        num_done += len(piece)
    replicas.gather([None])  # a barrier: all samples are saved after it


def _pieces(
    prompts: Sequence[Prompt], *, num_replicas: int, sampling: Sampling
) -> Iterator[Sequence[Prompt]]:
    """Split into parts of about equal size: a small last part would leave engines idle."""
    count = math.ceil(len(prompts) * sampling.num_samples / (num_replicas * SAMPLES_PER_PIECE))
    for piece in range(count):
        yield prompts[piece * len(prompts) // count : (piece + 1) * len(prompts) // count]


def _judge(
    replicas: Replicas,
    groups: Sequence[Sequence[Episode]],
    task: Task,
    *,
    pool: rewards.Pool,
) -> list[Solved]:
    answers = {problem.id: problem.answers for problem in task.problems}
    follows = task.reward.kind == "instructions"
    if follows:  # each instruction is judged separately, strict and loose
        answers = {name: tuple(instructions.split(one)) for name, (one,) in answers.items()}
    episodes = [one for group in groups for one in group]
    token_ids = [one.token_ids.tolist() for one in episodes]
    # An empty list is one empty text to `batch_decode`; a rank may have no problem.
    texts = task.tokenizer.batch_decode(token_ids, skip_special_tokens=True) if token_ids else []
    questions = [
        (text, answer, one.prompt.verifier, one.prompt.row)
        for text, one in zip(texts, episodes, strict=True)
        for answer in answers[one.prompt.id]
    ]
    # All ranks return together, so none waits long in the next collective.
    verdicts = iter(pool.judge(questions, may_end=lambda done: all(replicas.gather([done]))))
    samples = []
    for text, one in zip(texts, episodes, strict=True):
        own = [next(verdicts) for _ in answers[one.prompt.id]]
        samples.append(
            Sample(
                response=text,
                verdict=all_of(own[: len(own) // 2]) if follows else any_of(own),
                num_tokens=len(one.token_ids),
                truncated=one.truncated,
                instructions=tuple(verdict.outcome for verdict in own) if follows else (),
            )
        )
    judged = iter(samples)
    return [
        Solved(group[0].prompt.id, group[0].prompt.level, tuple(next(judged) for _ in group))
        for group in groups
    ]


def any_of(verdicts: Sequence[Verdict]) -> Verdict:
    """Combine verdicts on alternative answers: correct, else unknown, else wrong."""
    return _first(verdicts, (Outcome.CORRECT, Outcome.UNKNOWN, Outcome.WRONG))


def all_of(verdicts: Sequence[Verdict]) -> Verdict:
    """Combine verdicts on instructions, all required: wrong, else unknown, else correct."""
    return _first(verdicts, (Outcome.WRONG, Outcome.UNKNOWN, Outcome.CORRECT))


def _first(verdicts: Sequence[Verdict], order: Sequence[Outcome]) -> Verdict:
    return min(verdicts, key=lambda verdict: order.index(verdict.outcome))
