"""Section `data`: the training problems, of files or generated, and how they become prompts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from gapo_megatron.config.section import CHECKED, HELD_OUT, INPUT_PATH, LEARNED, SAMPLED, Section
from gapo_megatron.config.types import (
    CountOrZero,
    Lines,
    OptionalDate,
    OptionalPath,
    Positive,
    Seed,
    Settings,
    StepsOrZero,
    Text,
    Tokens,
    check_text,
)
from gapo_megatron.errors import shown

SourceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
"""Part of metric names and of the ids of problems."""


def _check_scalar(value: Any) -> Any:
    if isinstance(value, str):
        return check_text(value)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("must be a string, a finite number, or true or false")
    return value


EndToken = Annotated[Text, Field(min_length=1)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Scalar = Annotated[Any, AfterValidator(_check_scalar)]


RowFormat = Literal["auto", "gapo", "verl", "slime", "orz", "trl", "openai"]
"""Names of `data.row_formats.FORMATS`; `auto`: the one that the first row has."""


@dataclass(frozen=True, slots=True)
class RowKeys:
    """How the rows of a file are to be read; an empty key is the format's."""

    format: RowFormat = "auto"
    prompt_key: str = ""
    answer_key: str = ""
    id_key: str = ""


REASONING_GYM = "reasoning_gym"
"""The kind of a source whose problems that package generates, and the verifier that it scores with.
"""


class Family(Section):
    """A family of generated problems in a data source."""

    role = LEARNED

    name: SourceName
    """Its name in the package reasoning-gym, such as `chain_sum`."""
    weight: Positive = 1.0
    """The source has problems of its families in proportion to their weights."""
    settings: Settings = Field(default_factory=dict)
    """Settings of the family in the package, which decide how hard its problems are."""
    levels: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] = ()
    """Levels of the package's curriculum, from 0, with equal parts of the family's problems;
    `settings` override. Empty: `settings` alone."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for level in self.levels:
            if self.levels.count(level) > 1:
                raise ValueError(f"levels: {level} is there {self.levels.count(level)} times")
        for key in ("seed", "size"):
            if key in self.settings:
                raise ValueError(f"settings.{key} ({self.settings[key]!r}): set it for the source")
        return self


_REQUIRED = ("path", "families", "size")
"""Keys that a source of their kind must have."""


def _family(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class DataSource(Section):
    """Training problems of one origin among several, with their own epochs (docs/data.md)."""

    role = LEARNED

    name: SourceName
    """Name in metrics, `data/<name>/...`, and before the ids of its problems: `<name>/<id>`."""
    kind: Literal["file", "reasoning_gym"] = "file"
    """`file`: the problems of `path`. `reasoning_gym`: that package generates them at the start,
    and scores the answers ([data.md](data.md#generated-problems))."""
    path: Annotated[OptionalPath, INPUT_PATH, Field(validate_default=True)] = ""
    """File with problems, as `data.train_path`."""
    format: RowFormat | None = None
    """Unset: `data.format`."""
    prompt_key: Text = ""
    """Empty: `data.prompt_key`."""
    answer_key: Text = ""
    """Empty: `data.answer_key`."""
    id_key: Text = ""
    """Empty: `data.id_key`."""
    families: Annotated[
        tuple[Annotated[Family, BeforeValidator(_family)], ...],
        Field(strict=False, validate_default=True),
    ] = ()
    """Families of generated problems: names, or tables with `name`, `weight`, `settings` and
    `levels`."""
    size: Annotated[CountOrZero, Field(validate_default=True)] = 0
    """Number of generated training problems."""
    eval_size: CountOrZero = 0
    """Number of held-out ones."""
    shots: Annotated[int, Field(ge=0, le=64)] = 0
    """Solved problems of the family before each question; for models that continue a text."""
    seed: Seed = 0
    """Seed of the generated problems."""
    weight: Positive = 1.0
    """A step draws prompts from its sources in proportion to their weights."""
    first_step: StepsOrZero = 0
    """First step that draws from it; steps count from 0."""
    last_step: StepsOrZero | None = None
    """Last step that draws from it. Unset: the last of the run."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.last_step is not None and self.last_step < self.first_step:
            raise ValueError(
                f"last_step ({self.last_step}) must not be below first_step ({self.first_step})"
            )
        return self

    @field_validator("path", "families", "size", "eval_size", "shots", "seed")
    @classmethod
    def _check_kind(cls, value: Any, info: ValidationInfo) -> Any:
        """Every kind has keys that it needs, and keys of another kind."""
        kind, of_file = info.data.get("kind"), info.field_name == "path"
        if kind and of_file != (kind == "file") and value:
            raise ValueError(f"does not go with kind {kind!r}")
        if kind and of_file == (kind == "file") and not value and info.field_name in _REQUIRED:
            raise ValueError(f"required with kind {kind!r}")
        return value

    @property
    def is_generated(self) -> bool:
        """Whether its problems are in no file."""
        return self.kind == REASONING_GYM

    @property
    def origin(self) -> str:
        """Where its problems are from, for messages: the path, or the generator."""
        return self.path or f"{self.kind} {self.name!r}"

    def is_drawn(self, step: int) -> bool:
        """Whether a step draws from it."""
        return self.first_step <= step and (self.last_step is None or step <= self.last_step)


class DataConfig(Section):
    """The problems that the policy trains on and is evaluated on."""

    role = LEARNED
    kept = "the branch continues with the same problems"

    train_path: Annotated[OptionalPath, INPUT_PATH] = ""
    """File with the training problems, .jsonl, .json, .csv, .tsv, a .gz of these, or .parquet
    (docs/data.md). Or use `[[data.source]]`."""
    source: Annotated[tuple[DataSource, ...], Field(strict=False)] = ()
    """Several origins of training problems instead of `train_path`: a table `[[data.source]]` for
    each, with the settings below."""
    curriculum: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Part of a step's prompts that goes to levels in proportion to what their recent groups taught
    ([data.md](data.md#a-curriculum-by-pass-rate)). Unset: no curriculum."""
    eval_path: Annotated[OptionalPath, HELD_OUT, INPUT_PATH] = ""
    """Held-out problems in the same format. Empty: no evaluation during training."""
    format: RowFormat = "auto"
    """Where rows have prompt and answer ([data.md](data.md#rows-of-other-frameworks)). `auto`: as
    in the file's first row."""
    prompt_key: Text = ""
    """Key of the prompt instead of the format's; with dots within a value."""
    answer_key: Text = ""
    """Key of the answer, likewise: `reward_model.ground_truth`."""
    id_key: Text = ""
    """Key of the id, likewise. Empty: `id`, or the row's number."""
    max_prompt_tokens: Tokens = 2048
    """Longest prompt, chat template included. A longer one is an error at the start."""
    chat_template: bool = False
    """Wrap prompts in the tokenizer's chat template: `prompt` as a user message, `messages` as they
    are."""
    system_prompt: Lines = ""
    """System message before every prompt, except before `messages` that begin with their own. Needs
    `chat_template`."""
    chat_template_kwargs: Annotated[dict[VariableName, Scalar], Field(default_factory=dict)]
    """Variables for the chat template, such as `enable_thinking = false`. Needs `chat_template`."""
    end_tokens: Annotated[tuple[EndToken, ...], SAMPLED, Field(strict=False)] = ()
    """Tokens that end a response, such as `<|im_end|>`; training examples (`sft`) end with the
    first. Empty: the chat template's end of turn, the tokenizer's `eos_token`, and those of
    generation_config.json and config.json ([data.md](data.md#ends-of-responses))."""
    template_date: Annotated[OptionalDate, CHECKED] = ""
    """Date for a chat template that asks for today's (Llama 3.x, gpt-oss), as `2026-07-01`. Empty:
    the day on which the run began, recorded in its folder; a branch has its run's."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.train_path) == bool(self.source):
            hint = '. If `base` has the other, empty it: train_path = "" or source = []'
            raise ValueError(
                f"set either train_path ({self.train_path!r}) or [[data.source]] tables "
                f"({len(self.source)} given){hint if self.source else ''}"
            )
        names = [one.name for one in self.source]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"source: the name {name!r} is used {names.count(name)} times")
        for key in ("system_prompt", "chat_template_kwargs"):
            if getattr(self, key) and not self.chat_template:
                raise ValueError(f"{key} ({shown(getattr(self, key))}) needs chat_template = true")
        return self

    @property
    def train_files(self) -> dict[str, str]:
        """Origins of the training problems by name of the source; the name of a single file is ''.

        A path, but for generated problems (`DataSource.origin`).
        """
        return {one.name: one.origin for one in self.source} or {"": self.train_path}

    @property
    def generated(self) -> tuple[DataSource, ...]:
        """The sources whose problems are generated."""
        return tuple(one for one in self.source if one.is_generated)

    @property
    def has_held_out(self) -> bool:
        """Whether there are held-out problems, of a file or generated."""
        return bool(self.eval_path) or any(one.eval_size for one in self.generated)

    def row_keys(self, source: str = "") -> RowKeys:
        """How the rows of a source are read; of `train_path` and `eval_path` without a name."""
        given = next((one for one in self.source if one.name == source), None)
        return RowKeys(
            given.format if given and given.format else self.format,
            (given and given.prompt_key) or self.prompt_key,
            (given and given.answer_key) or self.answer_key,
            (given and given.id_key) or self.id_key,
        )

    def stages(self, num_steps: int) -> list[tuple[range, dict[str, float]]]:
        """Ranges of steps that draw from the same sources, with each source's share; in order."""
        edges = {0, num_steps}
        edges |= {one.first_step for one in self.source}
        edges |= {one.last_step + 1 for one in self.source if one.last_step is not None}
        starts = sorted(edge for edge in edges if edge <= num_steps)
        return [
            (range(start, end), shares(self.source, start))
            for start, end in itertools.pairwise(starts)
        ]


def shares(sources: Sequence[DataSource], step: int) -> dict[str, float]:
    """Share of a step's prompts by source, for those that it draws from; they add up to 1."""
    drawn = [one for one in sources if one.is_drawn(step)]
    total = math.fsum(one.weight for one in drawn)
    return {one.name: one.weight / total for one in drawn}
