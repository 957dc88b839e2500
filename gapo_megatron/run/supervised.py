"""Supervised fine-tuning before a run; the command is `gapo_megatron.sft`."""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rich.progress import Progress
from transformers import PreTrainedTokenizerBase

from gapo_megatron.config import (
    VERIFIED_SEQUENCES,
    Config,
    DataConfig,
    ObjectiveConfig,
    SupervisedConfig,
)
from gapo_megatron.config.roles import flat
from gapo_megatron.data.end_tokens import find_end_tokens
from gapo_megatron.data.messages import begin_template
from gapo_megatron.data.schema import LengthError, encode_prompt, read_jsonl
from gapo_megatron.data.template_date import DATE
from gapo_megatron.data.tokenizer import load_tokenizer
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.formats.weights import write_hf
from gapo_megatron.learn.checks.range_check import check_range
from gapo_megatron.learn.plan import plan_scoring
from gapo_megatron.learn.score import Scored
from gapo_megatron.learn.update import update
from gapo_megatron.models.config_json import ModelFacts
from gapo_megatron.policy import Policy, initialize
from gapo_megatron.policy.adapters import FULL_WEIGHTS
from gapo_megatron.rewards.final_answer import OPEN, marked_text
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.run import process_group

_FIRST = 16
"""Tokens of a response that may begin a thought."""
_THOUGHT_TWICE = re.compile(rf"\s*{OPEN}\s*{OPEN}")


def run(config: Config, settings: SupervisedConfig, facts: ModelFacts) -> float:
    """Train as `gapo_megatron.sft.train_supervised` documents; it has checked the config."""
    tokenizer = load_tokenizer(
        settings.initial_hf_dir, field="supervised.initial_hf_dir", facts=facts
    )
    is_used = config.data.chat_template
    date = begin_template(tokenizer, config.data, config.run.output_dir, is_used=is_used)
    ends = find_end_tokens(
        tokenizer,
        config.data,
        settings.initial_hf_dir,
        vocab_size=facts.vocab_size,
        field="supervised.initial_hf_dir",
    )
    examples = _read_examples(
        settings.train_path,
        tokenizer,
        end=ends.ids[0],
        data=config.data,
        longest=config.max_sequence_tokens,
    )

    model = str(Path(config.model.hf_dir).absolute())
    alike = {"program": "sft", "model": model, DATE: date, **flat(config)}
    world = process_group.start(config.parallel.timeout_s, alike=alike)
    groups = initialize(config.parallel)
    start = config.model_copy(
        update={
            "model": config.model.model_copy(update={"hf_dir": settings.initial_hf_dir}),
            # Likelihood at temperature 1, whatever temperature rollouts use.
            "rollout": config.rollout.model_copy(update={"temperature": 1.0}),
            "objective": ObjectiveConfig(),  # no reference weights
        }
    )
    # Every weight, also if the run that starts from the result trains an adapter.
    policy = Policy.build(start, groups, world.device, adapter=FULL_WEIGHTS)
    policy.load_initial_weights()
    if config.model.precision == "fp16":
        probe = _sequences(examples[:VERIFIED_SEQUENCES])
        check_range(policy, probe, of="examples of supervised.train_path")

    batches = _shuffled_batches(examples, settings.batch_sequences, seed=config.run.seed)
    loss = float("nan")
    with Progress(disable=world.rank != 0) as progress:
        bar = progress.add_task("supervised", total=settings.num_steps)
        for step in range(settings.num_steps):
            learning_rate = _learning_rate(settings.learning_rate, step, settings.num_steps)
            loss = _supervised_step(
                policy,
                next(batches),
                max_tokens_per_microbatch=config.batch.max_tokens_per_microbatch,
                learning_rate=learning_rate,
            )
            progress.update(bar, advance=1, description=f"supervised  loss {loss:.3f}")
    weights = policy.iterate_hf_weights()
    write_hf(
        weights,
        source_dir=settings.initial_hf_dir,
        output_dir=config.model.hf_dir,
        made_by="sft",
        end_tokens=ends.ids,
        write=world.rank == 0,
    )
    return loss


def _supervised_step(
    policy: Policy, batch: Rollouts, *, max_tokens_per_microbatch: int, learning_rate: float
) -> float:
    """Update on `batch`, the same on every rank; returns the loss before the update. Collective."""
    groups = policy.groups
    packing = plan_scoring(
        batch,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        data_parallel_size=groups.dp_size,
    )
    microbatches = [policy.pack(batch, indices) for indices in packing[groups.dp_rank]]
    scale = 1.0 / int(batch.num_sampled_tokens.sum())

    def negative_log_likelihood(
        scored: Scored,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = -scored.log_probs.sum() * scale
        return loss, {"loss": loss.detach()}

    result = update(policy, microbatches, negative_log_likelihood, learning_rate=learning_rate)
    losses = torch.zeros(1, dtype=torch.float64, device=policy.device)
    if groups.is_first_copy:  # pipeline stages before the last add nothing
        losses += sum(output["loss"] for output in result.outputs)
    dist.all_reduce(losses)
    return float(losses)


def _learning_rate(peak: float, step: int, num_steps: int) -> float:
    """Linear warm-up over a tenth of the steps, then linear decay to a tenth of the peak."""
    warmup = max(num_steps // 10, 1)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (1.0 - 0.9 * (step - warmup) / max(num_steps - warmup, 1))


def _read_examples(
    path: str, tokenizer: PreTrainedTokenizerBase, *, end: int, data: DataConfig, longest: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Token ids of every prompt, as in training with rewards, and of every response, with `end`."""
    examples = []
    for number, row in read_jsonl(path, keys=("prompt", "response")):
        name = "prompt"
        try:
            encode = functools.partial(
                encode_prompt,
                row["prompt"],
                tokenizer,
                chat_template=data.chat_template,
                system_prompt=data.system_prompt,
            )
            prompt = encode(max_tokens=longest - 1)
            name = f"response (with EOS) to a prompt of {len(prompt)} tokens"
            # As it continues the prompt: some tokenizers put a space before every text. Encoded
            # alone if a token would reach back into the prompt, as no sampled one does.
            whole = encode(max_tokens=sys.maxsize, response=row["response"])
            response = [*whole[len(prompt) :], end]
            if whole[: len(prompt)] != prompt:
                response = [*tokenizer.encode(row["response"], add_special_tokens=False), end]
            if len(prompt) + len(response) > longest:
                raise LengthError(len(response))
        except LengthError as error:
            raise DataError(
                f"{path}:{number}: the {name} has {error}; data.max_prompt_tokens + "
                f"rollout.max_response_tokens ({longest}) must hold a prompt and its response, "
                "of at least one token each"
            ) from None
        except ConfigError as error:  # the template or the tokenizer refuses it
            raise ConfigError(f"{path}:{number}: the {name}: {error}") from error
        if data.chat_template and _THOUGHT_TWICE.match(
            marked_text(tokenizer, response[:_FIRST], before=prompt)
        ):
            raise DataError(
                f"{path}:{number}: the response begins with {row['response'].split()[0][:20]!r}, "
                "which the template has at the end of the prompt (data.chat_template): a thought "
                "would begin twice; leave it out of the responses"
            )
        examples.append((np.array(prompt, dtype=np.int32), np.array(response, dtype=np.int32)))
    if not examples:
        raise DataError(f"{path}: has no examples")
    return examples


def _shuffled_batches(
    examples: list[tuple[np.ndarray, np.ndarray]], size: int, *, seed: int
) -> Iterator[Rollouts]:
    """Endless batches of `size` sequences, in a new seeded order every epoch."""
    random = np.random.default_rng(seed)
    order = itertools.chain.from_iterable(
        random.permutation(len(examples)) for _ in itertools.count()
    )
    while True:
        yield _sequences([examples[i] for i in itertools.islice(order, size)])


def _sequences(examples: list[tuple[np.ndarray, np.ndarray]]) -> Rollouts:
    return Rollouts.of([prompt for prompt, _ in examples], [response for _, response in examples])
