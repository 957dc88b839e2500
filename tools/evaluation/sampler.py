"""Samples and judges a benchmark, in pieces that are saved as soon as they are judged."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapo_megatron import rewards
from gapo_megatron.data.rows import Row
from gapo_megatron.data.schema import encode_problem, kept_columns, read_prompts
from gapo_megatron.evaluate.evaluate import evaluation_seed
from gapo_megatron.rewards import instructions
from gapo_megatron.rewards.final_answer import marked_text
from gapo_megatron.rollout.call_metrics import num_turns
from gapo_megatron.rollout.calls import Acting, CallCounts, Calls
from gapo_megatron.rollout.engine import Engine
from gapo_megatron.rollout.generate import Hooks, begin_all, generate
from gapo_megatron.rollout.process_state import generators_restored
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.types import Episode, Outcome, Prompt, Verdict
from gapo_tools.evaluation.benchmarks import Benchmark, Problem
from gapo_tools.evaluation.paper import Sampling
from gapo_tools.evaluation.samples import Sample, Solved, read_ids, seed_folder, write_samples

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

    @property
    def follows_instructions(self) -> bool:
        """Whether an answer is a list of instructions, each judged by itself, strict and loose."""
        return self.reward.kind == "instructions"

    @property
    def answers(self) -> dict[str, Sequence[str]]:
        """What a response is compared with, by the problem's id."""
        if self.follows_instructions:
            return {one.id: instructions.split(one.answers[0]) for one in self.problems}
        return {one.id: one.answers for one in self.problems}

    @classmethod
    def read(
        cls,
        benchmark: Benchmark,
        *paths: Path,
        reward: RewardConfig,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        columns: Collection[str] | None = (),
    ) -> Task:
        """Read and tokenise a benchmark's files.

        Args:
            benchmark: how its rows are read.
            paths: its files.
            reward: its verifier, and options.
            tokenizer: the model's.
            data: the longest prompt, and the chat template.
            columns: columns of a row for verifier and environment, as in `read_prompts`.

        Raises:
            ConfigError: the tokenizer's chat template refuses a prompt.
            DataError: a file has an unexpected format, or a prompt is too long; names the problem.
                Or a row lacks a column that the verifier requires.
        """

        def keep(row: Row, where: str) -> Row:
            shown = {key: row[key] for key in row if key not in benchmark.references}
            return kept_columns(shown, columns, reward, where=where)

        problems = benchmark.load(*paths, keep=keep)
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
            answer, row = problem.answers[0], problem.row
            if columns is None or "prompt" in columns:  # as asked: the row may have it otherwise
                row = row | {"prompt": problem.prompt}
            prompts.append(Prompt(problem.id, token_ids, answer, problem.level, row=row))
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
        columns: Collection[str] | None = (),
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
            columns=columns,
        )
        problems = [Problem(one.id, "", (one.answer,), one.level) for one in prompts]
        return cls(name, reward, tuple(problems), tuple(prompts), tokenizer)

    def remaining(self, output_dir: Path, seed: int) -> list[str]:
        """Ids of the problems without saved samples, in order."""
        kept = read_ids(seed_folder(output_dir, self.name, seed))
        return [prompt.id for prompt in self.prompts if prompt.id not in kept]


@dataclass(frozen=True, slots=True)
class Sampler:
    """Samples and judges benchmarks with an engine, in the environment of training."""

    engine: Engine
    """Holds the weights to evaluate."""
    acting: Acting
    """What answers the model, and how it is called; without a journal: calls of samples that a kill
    loses are made again."""
    sampling: Sampling
    output_dir: Path
    """Folder of the evaluation, on a disk that all ranks share."""

    def sample(
        self, task: Task, *, remaining: Collection[str], seed: int, pool: rewards.Pool
    ) -> None:
        """Sample, judge and save the remaining problems of a benchmark, for one seed.

        The samples depend only on seed and problem: not on the number of ranks or on samples saved
        earlier, up to the rounding of a batched forward pass.

        Args:
            task: the same on every rank.
            remaining: ids of the problems to sample, the same on every rank. One rank calls
                `Task.remaining` for all, because ranks may see a shared disk differently.
            seed: seed of the samples.
            pool: workers with the benchmark's verifier.

        Collectives: those of `rollout.generate` and `Replicas.gather`, on every rank.
        """
        folder = seed_folder(self.output_dir, task.name, seed)
        prompts = [prompt for prompt in task.prompts if prompt.id in remaining]
        num_done = len(task.prompts) - len(prompts)
        replicas = self.engine.replicas
        settings = SamplingSettings(
            num_samples=self.sampling.num_samples,
            max_response_tokens=self.sampling.max_response_tokens,
            seed=evaluation_seed(seed),
            step=0,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
        )
        for piece in _pieces(prompts, num_replicas=replicas.count, sampling=self.sampling):
            logger.info(
                "%s, seed %d: %d of %d problems done, sampling the next %d",
                task.name,
                seed,
                num_done,
                len(task.prompts),
                len(piece),
            )
            calls = self.acting.calls(f"{task.name}_{seed}", replicas)
            mine = begin_all(self.acting.environment, replicas.share(piece), calls)
            hooks = Hooks(shows_progress=True)
            groups = generate(self.engine, mine, settings, calls=calls, hooks=hooks)
            assert groups is not None, "generation without should_abort is never aborted"
            groups = replicas.part(groups)
            solved = self._judge(groups, task, calls, pool=pool)
            if groups:
                write_samples(folder, solved)
            num_done += len(piece)
        replicas.gather([None])  # a barrier: all samples are saved after it

    def _judge(
        self, groups: Sequence[Sequence[Episode]], task: Task, calls: Calls, *, pool: rewards.Pool
    ) -> list[Solved]:
        """Judge this rank's part of the samples. Collective, see `sample`."""
        gather = self.engine.replicas.gather
        answers = task.answers
        episodes = [one for group in groups for one in group]
        with generators_restored() if calls.is_called else nullcontext():
            asked = [self._questions(one, answers[one.prompt.id], pool) for one in episodes]
        questions = [item for items in asked if not isinstance(items, Verdict) for item in items]
        # All ranks return together, so none waits long in the next collective.
        verdicts = iter(pool.judge(questions, may_end=lambda done: all(gather([done]))))
        samples = []
        for one, items in zip(episodes, asked, strict=True):
            own = [items] if isinstance(items, Verdict) else [next(verdicts) for _ in items]
            sample = Sample(
                response=marked_text(
                    task.tokenizer, one.token_ids.tolist(), before=one.prompt.token_ids
                ),
                verdict=any_of(own),
                num_tokens=one.num_sampled_tokens,
                truncated=one.truncated,
                **_cost(one, calls),
            )
            if task.follows_instructions and len(own) > 1:
                outcomes = tuple(verdict.outcome for verdict in own)
                verdict = all_of(own[: len(own) // 2])
                sample = replace(sample, verdict=verdict, instructions=outcomes)
            samples.append(sample)
        judged = iter(samples)
        return [
            Solved(group[0].prompt.id, group[0].prompt.level, tuple(next(judged) for _ in group))
            for group in groups
        ]

    def _questions(
        self, episode: Episode, answers: Sequence[str], pool: rewards.Pool
    ) -> list[rewards.Item] | Verdict:
        """What the verifier gets for each reference answer; or the environment's verdict.

        An environment may have another answer than the problem's: it is then the only one.
        """
        acting = self.acting
        judged = rewards.ask_judge(
            acting.environment.judge, episode, pool=pool, turns=acting.turns.messages
        )
        if isinstance(judged, Verdict):
            return judged
        right = answers if judged.answer == episode.prompt.answer else (judged.answer,)
        return [
            judged._replace(answer=one, group=f"{judged.group} {number}")
            for number, one in enumerate(right)
        ]


def _cost(episode: Episode, calls: Calls) -> dict[str, Any]:
    """Turns, calls and failed calls of an episode, if an environment answers."""
    if not calls.is_called:
        return {}
    cost = calls.counts.get((episode.prompt.id, episode.sample), CallCounts())
    return {
        "num_turns": num_turns(episode),
        "num_calls": cost.num_calls,
        "num_errors": cost.num_errors,
    }


def _pieces(
    prompts: Sequence[Prompt], *, num_replicas: int, sampling: Sampling
) -> Iterator[Sequence[Prompt]]:
    """Split into parts of about equal size: a small last part would leave engines idle."""
    count = math.ceil(len(prompts) * sampling.num_samples / (num_replicas * SAMPLES_PER_PIECE))
    for piece in range(count):
        yield prompts[piece * len(prompts) // count : (piece + 1) * len(prompts) // count]


def any_of(verdicts: Sequence[Verdict]) -> Verdict:
    """Combine verdicts on alternative answers: correct, else unknown, else wrong."""
    return _first(verdicts, (Outcome.CORRECT, Outcome.UNKNOWN, Outcome.WRONG))


def all_of(verdicts: Sequence[Verdict]) -> Verdict:
    """Combine verdicts on instructions, all required: wrong, else unknown, else correct."""
    return _first(verdicts, (Outcome.WRONG, Outcome.UNKNOWN, Outcome.CORRECT))


def _first(verdicts: Sequence[Verdict], order: Sequence[Outcome]) -> Verdict:
    return min(verdicts, key=lambda verdict: order.index(verdict.outcome))
