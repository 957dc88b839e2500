"""What a run reads at its start, and checks before any process waits for another."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from gapo_megatron import checkpoint, rewards
from gapo_megatron.checkpoint import BranchPoint
from gapo_megatron.config import Config
from gapo_megatron.data.curriculum import check_strata, stratum_of
from gapo_megatron.data.end_tokens import find_end_tokens
from gapo_megatron.data.messages import begin_template, prompts_made_of
from gapo_megatron.data.reasoning_gym import generate
from gapo_megatron.data.row_formats import first_row
from gapo_megatron.data.schema import read_prompts, read_training_prompts
from gapo_megatron.data.source import PromptSource, check_counts
from gapo_megatron.data.template_date import DATE
from gapo_megatron.data.tokenizer import load_tokenizer
from gapo_megatron.io.run_folder import is_finished
from gapo_megatron.objective.families import find_family
from gapo_megatron.objective.groups import find_advantages
from gapo_megatron.policy.load import check_megatron_dir
from gapo_megatron.policy.model import read_hf_config
from gapo_megatron.rollout import environments
from gapo_megatron.rollout.environment import Environment
from gapo_megatron.rollout.turns import Turns
from gapo_megatron.run.engines import find_engine
from gapo_megatron.run.processes import is_first
from gapo_megatron.types import Outcome, Prompt
from gapo_megatron.user_code import is_code

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs that a run reads at its start; the same on every rank."""

    hf_config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    environment: Environment
    turns: Turns
    """Where the model's turns end."""
    problems: list[Prompt]
    held_out: list[Prompt]
    """Problems of the evaluation; empty if the run does not evaluate."""
    source: PromptSource
    branch_point: BranchPoint | None
    """Checkpoint of another run to branch from; None without a branch, or once the run has begun.
    """


def check_inputs(config: Config) -> Inputs:
    """Read model config, tokenizer and data; refuse checkpoints that the run cannot resume.

    No collective: it runs before there is a process group.

    Raises:
        GapoError: names field, file or line, value and rule.
    """
    for find in (find_family, find_advantages):  # load the user's code, if any; so does the next
        find(config.objective.resolve())
    find_engine(config.rollout.engine)
    run_dir, hf_config = Path(config.run.output_dir), read_hf_config(config.model.hf_dir)
    if config.model.megatron_dir:
        check_megatron_dir(config, hf_config)
    if is_first():
        checkpoint.check_resume(run_dir, hf_config, config)
    branch_point = checkpoint.check_branch(config, hf_config)
    tokenizer = load_tokenizer(config.model.hf_dir, facts=hf_config)
    begun = branch_point.state().source if branch_point else checkpoint.newest_source(run_dir)
    date = begin_template(
        tokenizer,
        config.data,
        run_dir,
        is_used=config.data.chat_template or config.environment.is_called,
        inherited=begun["dataset"].get(DATE, "") if begun else "",
    )
    problems, held_out = read_problems(config, tokenizer)
    if is_first():
        _try_own_verifiers(config, problems)
    source = PromptSource(
        problems,
        seed=config.run.seed,
        sources=config.data.source,
        made_of=prompts_made_of(tokenizer, config.data, date=date),
        curriculum=config.data.curriculum,
    )
    if begun and is_first() and not is_finished(run_dir, num_steps=config.run.num_steps):
        source.require_same(begun)
    environment = environments.build(
        config.environment, tokenizer, chat_template=config.data.chat_template
    )
    ends = find_end_tokens(
        tokenizer, config.data, config.model.hf_dir, vocab_size=hf_config.vocab_size
    )
    if ends.warning and is_first():
        logger.warning("%s", ends.warning)
    turns = Turns(tokenizer, config.environment.stop, eos_token_ids=ends.ids)
    return Inputs(
        hf_config, tokenizer, environment, turns, problems, held_out, source, branch_point
    )


def read_problems(
    config: Config, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Prompt], list[Prompt]]:
    """Training and held-out problems; none are held out if the run does not evaluate.

    Raises:
        DataError: names file and line; or there are too few problems for a step, or no strata for
            a curriculum.
        ConfigError: problems cannot be generated; see `reasoning_gym.generate`.
    """
    data = config.data
    evaluates = config.evaluation.every_steps > 0
    made = generate(data.generated)
    if made.num_repeated and is_first():
        logger.info("%d generated problems were left out: repetitions", made.num_repeated)
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "reward": config.reward,
        "columns": None if config.environment.takes_rows else rewards.row_columns(config.reward),
    }
    problems = read_training_prompts(data, generated=made.training, **options)
    counts = Counter(problem.source for problem in problems)
    check_counts(counts, config.batch, data=data, num_steps=config.run.num_steps)
    check_strata(Counter(map(stratum_of, problems)), data)
    if not evaluates:
        return problems, []
    held_out = read_prompts(data.eval_path, data=data, **options) if data.eval_path else []
    for name, rows in made.held_out.items():
        path = f"{data.train_files[name]}, held out"
        held_out += read_prompts(path, data=data, source=name, generated=rows, **options)
    return problems, held_out


def log_readings(config: Config) -> None:
    """Log how the rows of each training file are read, where a rank logs such things.

    `check_inputs` reads them before there is a log.
    """
    for name, path in config.data.train_files.items():
        if logger.isEnabledFor(logging.INFO) and Path(path).is_file():
            first = first_row(Path(path), config.data.row_keys(name))
            logger.info("%s: %s", path, first[0] if first else "no rows")


def _try_own_verifiers(config: Config, problems: Sequence[Prompt]) -> None:
    """Call each user verifier once, with a reference answer as the response.

    A user environment may make other responses: their unknown verdicts say nothing.

    Raises:
        ConfigError: it returned what is no verdict.
    """
    own = {
        name
        for name, one in config.reward.by_name.items()
        if any(is_code(part.kind) for part in one.parts)
    }
    first = {one.verifier: one for one in reversed(problems) if one.verifier in own}
    items = [(one.answer, one.answer, one.verifier, one.row) for one in first.values()]
    verdicts = rewards.try_verifiers(config.reward, items) if items else []
    for problem, verdict in zip(first.values(), verdicts, strict=True):
        if verdict.outcome is Outcome.UNKNOWN and not config.environment.code_names:
            logger.warning(
                "the reference answer of problem %r, as a response, has an unknown verdict: %s",
                problem.id,
                verdict.reason,
            )
