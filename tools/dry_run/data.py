"""What the dry run and the doctor find in a run's data, which they read as the run does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapo_megatron import rewards
from gapo_megatron.config import Config
from gapo_megatron.config.data_section import REASONING_GYM
from gapo_megatron.config.reward_section import OF_ENVIRONMENT
from gapo_megatron.data.curriculum import MOST_STRATA, check_strata, stratum_of
from gapo_megatron.data.reasoning_gym import Generated, generate
from gapo_megatron.data.row_formats import Problem, Reading, first_row
from gapo_megatron.data.rows import Row, count_rows
from gapo_megatron.data.schema import read_prompts
from gapo_megatron.data.source import check_counts
from gapo_megatron.data.template_date import asks_date, expected_date
from gapo_megatron.errors import ConfigError, GapoError, RewardError, printable
from gapo_megatron.formats.model_folder import check_model_folder
from gapo_megatron.rewards import reasoning_gym
from gapo_megatron.types import Outcome, Prompt, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLE = 100
"""Rows of each file that are read, and of the training files that are judged, by default."""
_NUM_SHOWN, _NUM_FIRST = 3, 3
"""Prompts that are shown; problems after which a verifier that says nothing is not asked again."""
_HELD_OUT = ", held out"
_HEAD, _TAIL = 200, 100
"""Characters of a prompt that are shown."""


@dataclass
class Seen:
    """What a look has found."""

    errors: list[str] = field(default_factory=list)
    """Why the run would end at its start."""
    warnings: list[str] = field(default_factory=list)
    """What no run should begin with, though it would."""
    notes: list[str] = field(default_factory=list)
    """What a person should read before the run starts."""


def look_at_data(config: Config, *, most: int | None = SAMPLE, tokenises: bool = True) -> Seen:
    """Read the problem files that exist as the run does, show prompts, and ask the verifiers.

    Args:
        config: config of the run, whose verifiers can be loaded (`rewards.check`).
        most: rows of each file to read; None: all.
        tokenises: also load the tokenizer, which imports transformers, to encode the prompts and
            to judge reference answers and empty responses.
    """
    seen = Seen()
    data, tokenizer = config.data, None
    try:
        columns = None if config.environment.takes_rows else rewards.row_columns(config.reward)
        made = generate(data.generated, most=most)
        if tokenises:
            tokenizer = _tokenizer(config, seen)
    except GapoError as error:
        seen.errors.append(str(error))
        return seen
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "data": data,
        "reward": config.reward,
        "columns": columns,
        "most": most,
    }
    problems: list[Prompt] = []
    counts: dict[str, int] = {}
    strata = Counter[str]()
    sizes = {one.origin: one.size for one in data.generated}
    sizes |= {f"{one.origin}{_HELD_OUT}": one.eval_size for one in data.generated}
    for path, source, rows in _parts(config, made):
        if rows is None and not Path(path).is_file():
            continue  # in the list of missing inputs
        try:
            found = read_prompts(path, source=source or "", generated=rows, **options)
            num_rows = count_rows(Path(path)) if rows is None else sizes[path]
            first = None if rows is not None else first_row(Path(path), data.row_keys(source or ""))
        except GapoError as error:
            seen.errors.append(str(error))
            continue
        seen.notes.append(_about_rows(path, found, num_rows, reading=first and first[0]))
        if first is not None:
            seen.notes.append(_about_first(found[0], first[1]))
        if source is not None:
            counts[source] = num_rows
            strata.update(map(stratum_of, found))
            problems += found[:SAMPLE]
    if counts.keys() == data.train_files.keys():
        try:
            check_counts(counts, config.batch, data=data, num_steps=config.run.num_steps)
            _look_at_strata(config, strata, seen, num_rows=sum(counts.values()))
        except GapoError as error:
            seen.errors.append(str(error))
    if tokenizer is not None and not seen.errors:
        seen.notes += [_about_prompt(one, tokenizer) for one in problems[:_NUM_SHOWN]]
        _ask_verifiers(config, problems, seen)
    return seen


def _look_at_strata(config: Config, strata: Counter[str], seen: Seen, *, num_rows: int) -> None:
    """Note the strata of a curriculum.

    Raises:
        DataError: see `check_strata`; only if all rows were read, of which the others may have
            further levels.
    """
    if config.data.curriculum is None:
        return
    num_read = strata.total()
    shown = ", ".join(f"{name} {count:,}" for name, count in [*strata.items()][:MOST_STRATA])
    seen.notes.append(
        f"Curriculum: {len(strata)} strata, in {num_read:,} of {num_rows:,} problems: {shown}"
    )
    if num_read == num_rows:
        check_strata(strata, config.data)


def _parts(
    config: Config, made: Generated
) -> Iterator[tuple[str, str | None, Sequence[Row] | None]]:
    """Path, name and generated rows of every part of the data; held-out parts have no name."""
    data = config.data
    yield from ((path, name, made.training.get(name)) for name, path in data.train_files.items())
    if config.evaluation.every_steps and data.eval_path:
        yield data.eval_path, None, None
    for name, rows in made.held_out.items() if config.evaluation.every_steps else ():
        yield f"{data.train_files[name]}{_HELD_OUT}", None, rows


def _tokenizer(config: Config, seen: Seen) -> PreTrainedTokenizerBase:
    """The run's tokenizer, bound to its chat template as in the run; notes what ends a response."""
    from gapo_megatron.data.end_tokens import find_end_tokens
    from gapo_megatron.data.messages import bind_template
    from gapo_megatron.data.tokenizer import load_tokenizer

    hf_dir = config.model.hf_dir
    facts = check_model_folder(hf_dir, weights=False, field="model.hf_dir")
    tokenizer = load_tokenizer(hf_dir, facts=facts)
    date = ""
    if asks_date(tokenizer.chat_template):
        date = expected_date(config.run.output_dir, pinned=config.data.template_date)
    bind_template(tokenizer, config.data, date=date)
    ends = find_end_tokens(tokenizer, config.data, hf_dir, vocab_size=facts.vocab_size)
    seen.notes.append(f"A response ends at: {ends}.")
    seen.warnings += [ends.warning] if ends.warning else []
    return tokenizer


def _about_rows(
    path: str, found: Sequence[Prompt], num_rows: int, *, reading: Reading | None
) -> str:
    lengths = [len(one.token_ids) for one in found]
    text = f"Data: {path}: {reading or 'generated'}; read {len(found):,} of {num_rows:,} rows"
    if len(found) < num_rows:
        text += " (--dry-run=data reads all)"
    return text + (f", prompts of {min(lengths)} to {max(lengths)} tokens" if max(lengths) else "")


def _about_first(prompt: Prompt, problem: Problem) -> str:
    """The first row as it was read: the end of its prompt, and its answer."""
    given, number = problem.prompt, ""
    if isinstance(given, list):
        number, given = f" of {len(given)} messages", given[-1]["content"]
    end = printable(given[-_TAIL:], most=2 * _TAIL)
    answer = printable(prompt.answer[:_TAIL], most=2 * _TAIL)
    return f'First row {prompt.id[:60]!r}: prompt{number} ends in "{end}", answer "{answer}"'


def _about_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> str:
    """A prompt as the model sees it, with its special tokens; of a long one both ends."""
    text: str = tokenizer.decode(prompt.token_ids)
    if len(text) > _HEAD + _TAIL:
        text = f"{text[:_HEAD]} [...] {text[-_TAIL:]}"
    shown = printable(text, most=2 * (_HEAD + _TAIL))
    return f"Prompt {prompt.id[:60]!r}, {len(prompt.token_ids)} tokens: {shown}"


def _ask_verifiers(config: Config, problems: Sequence[Prompt], seen: Seen) -> None:
    """Judge each problem's reference answer and an empty response; warn of odd verdicts.

    They are notes where a user environment may make other responses.
    """
    reward, is_own = config.reward, bool(config.environment.code_names)
    for name, one in reward.by_name.items():
        if one.kind == OF_ENVIRONMENT:
            continue
        asked = [problem for problem in problems if problem.verifier == name]
        wanted = {"empty responses": Outcome.WRONG}
        kinds = {part.kind for part in one.parts}
        if not kinds & {"code", "instructions"}:  # whose answers are no responses
            wanted["reference answers"] = Outcome.CORRECT
        found: dict[str, list[Verdict]] = {what: [] for what in wanted}
        try:
            for part in (asked[:_NUM_FIRST], asked[_NUM_FIRST:]):
                for what in wanted if part and _says_something(found) else ():
                    texts = [_answer(kinds, p) if "answers" in what else "" for p in part]
                    items = [
                        (text, p.answer, name, p.row) for text, p in zip(texts, part, strict=True)
                    ]
                    found[what] += rewards.try_verifiers(reward, items)
        except (ConfigError, RewardError) as error:
            seen.errors.append(str(error))
            continue
        for what, outcome in wanted.items():
            verdicts = found[what]
            counts = Counter(verdict.outcome.value for verdict in verdicts)
            note = f"{one.label}, {what}: {', '.join(f'{n} {k}' for k, n in counts.items())}"
            odd = [
                pair for pair in zip(asked, verdicts, strict=False) if pair[1].outcome != outcome
            ]
            if odd:
                problem, verdict = odd[0]
                note += f". First {verdict.outcome}: {problem.id[:60]!r}: {verdict.reason}"
            if verdicts:
                (seen.warnings if odd and not is_own else seen.notes).append(f"Verifier {note}")


def _says_something(found: Mapping[str, Sequence[Verdict]]) -> bool:
    """Whether a verdict is known, or there is none yet: each unknown one may take a time limit."""
    verdicts = [verdict for some in found.values() for verdict in some]
    return not verdicts or any(verdict.outcome is not Outcome.UNKNOWN for verdict in verdicts)


def _answer(kinds: Collection[str], problem: Prompt) -> str:
    """The reference answer as a response; of several accepted ones the first."""
    if REASONING_GYM in kinds:
        return reasoning_gym.reference_answer(problem.answer) or ""
    if "math" not in kinds:
        return problem.answer
    from gapo_megatron.rewards.math import accepted_answers  # and sympy with it

    answer = accepted_answers(problem.answer)[0]
    return answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"
