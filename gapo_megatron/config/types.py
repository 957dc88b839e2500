"""Types of settings, with the limits of the code and libraries that use them.

Beyond its limit a value would fail only after minutes: in a C library, in vLLM, or in a file that
cannot be read again. So the schema refuses it.
"""

from __future__ import annotations

import datetime
import difflib
import json
import os
import re
import unicodedata
from collections.abc import Collection
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from gapo_megatron.user_code import is_code

# --- whole numbers --------------------------------------------------------------------------------

_COUNTS = 2**31
"""Offsets of packed sequences and vLLM's counters are signed 32-bit integers."""

_STEPS = 2**63
"""Counted in Python only; TOML has signed 64-bit integers."""

Count = Annotated[int, Field(gt=0, lt=_COUNTS)]
CountOrZero = Annotated[int, Field(ge=0, lt=_COUNTS)]

Steps = Annotated[int, Field(gt=0, lt=_STEPS)]
StepsOrZero = Annotated[int, Field(ge=0, lt=_STEPS)]

Seed = Annotated[int, Field(ge=0, lt=2**64)]
"""Seed in the range of `torch.manual_seed`; NumPy and Python accept any."""

Seconds = Annotated[int, Field(gt=0, le=2_000_000)]
"""At most 23 days: `poll` counts milliseconds in 32 bits, and some callers add a minute."""

Tokens = Annotated[int, Field(gt=0, le=2**24)]
"""Largest length of a sequence: vLLM's table of rotary positions has one row per position. The
longest contexts that models are trained on have 10 million tokens."""

GroupSize = Annotated[int, Field(ge=2, le=2**12)]
"""Responses that are compared with each other: at least two, and few enough for metrics by the
number of correct ones."""


def _check_samples(value: object) -> object:
    if value == "all" or (type(value) is int and 0 <= value <= MOST_SAMPLES):
        return value
    raise ValueError(f'must be a whole number from 0 to {MOST_SAMPLES}, or "all"')


MOST_SAMPLES = 64
SamplesPerStep = Annotated[
    Annotated[int, Field(ge=0, le=MOST_SAMPLES)] | Literal["all"], BeforeValidator(_check_samples)
]
"""Responses of a step that people may look at."""

Workers = Annotated[int, Field(ge=0, le=1024)]
"""Processes that one rank starts."""

# --- numbers --------------------------------------------------------------------------------------

_MOST = 1e30
"""Used in float32 products: torch refuses a scalar above 3.4e38."""

Positive = Annotated[float, Field(gt=0, le=_MOST)]
NonNegative = Annotated[float, Field(ge=0, le=_MOST)]

Bound = Annotated[float, Field(gt=0)]
"""Only compared with: a very large value switches the bound off."""

Temperature = Annotated[float, Field(ge=0.01, le=2)]
"""vLLM refuses more, and raises less to 0.01 with a warning."""

LearningRate = Annotated[float, Field(gt=0, le=1)]
"""Adam moves every weight by about this much in each update."""
MinLearningRate = Annotated[float, Field(ge=0, le=1)]

AdamEps = Annotated[float, Field(ge=1e-30, le=1)]
"""Below float32's smallest number it would be 0, and a weight without gradient 0/0."""

# --- names ----------------------------------------------------------------------------------------


Offload = Literal["none", "optimizer", "all"]
OptimizerImplementation = Literal["auto", "transformer_engine", "apex", "torch"]


def require_known(key: str, value: str, known: Collection[str]) -> None:
    """Refuse a value that is neither `known` nor the name of user code.

    Raises:
        ValueError: names both, the known ones, and the nearest of them.
    """
    if value in known or is_code(value):
        return
    near = difflib.get_close_matches(value, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"{key} ({value!r}) must be one of {', '.join(known)}, or code of your own, "
        f"path/to/file.py:NAME or package.module:NAME{hint}"
    )


# --- text -----------------------------------------------------------------------------------------


def check_text(text: str) -> str:
    """Refuse text that is not one printable line in TOML, in a shell script and in a log.

    Raises:
        ValueError: shows the character.
    """
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
            raise ValueError(f"must be one line without control characters: {character!a}")
    return text


def _check_lines(text: str) -> str:
    for line in text.split("\n"):
        check_text(line.replace("\t", " "))
    return text


_PATH_BYTES = 2048
"""Half of Linux's limit: the rest is for the working directory and for file names in a folder."""
_NAME_BYTES, _MADE_NAME_BYTES = 255, 200
"""Between two slashes: Linux's limit, and the limit for folders whose drafts get longer names."""

_VARIABLE = re.compile(r"\$\{?[A-Za-z_]\w*\}?")
"""A variable of the environment, as a shell would expand it."""


def _check_spelling(path: str) -> str:
    if path != path.strip():
        raise ValueError("must not begin or end with a space")
    if path.startswith("~"):
        raise ValueError("must be written out: ~ is not expanded (for a folder named ~: ./~)")
    if found := _VARIABLE.search(path):
        raise ValueError(
            f"must be written out: {found[0]} is not expanded (a folder of this name: rename it)"
        )
    return path


def _check_bytes(path: str, *, of_a_name: int) -> str:
    encoded = os.fsencode(path)
    if len(encoded) > _PATH_BYTES or max(map(len, encoded.split(b"/"))) > of_a_name:
        raise ValueError(
            f"must have at most {_PATH_BYTES} bytes, and {of_a_name} between two slashes"
        )
    return path


def _check_given(path: str) -> str:
    if not path:
        raise ValueError("must not be empty: that would be the working directory")
    return path


def _check_date(text: str) -> str:
    if not text:
        return text
    try:
        return str(datetime.datetime.strptime(check_text(text), "%Y-%m-%d").date())
    except ValueError:
        raise ValueError("must be a date, as 2026-07-01") from None


OptionalDate = Annotated[
    str,
    # TOML has dates, and the command line reads them as TOML.
    BeforeValidator(lambda given: str(given) if type(given) is datetime.date else given),
    AfterValidator(_check_date),
]
"""A day as YYYY-MM-DD, or empty for none."""
Text = Annotated[str, Field(max_length=_PATH_BYTES), AfterValidator(check_text)]
Lines = Annotated[str, Field(max_length=2**16), AfterValidator(_check_lines)]
"""Text of several lines, which may have tabs."""
_Spelled = Annotated[str, AfterValidator(check_text), AfterValidator(_check_spelling)]
OptionalPath = Annotated[_Spelled, AfterValidator(partial(_check_bytes, of_a_name=_NAME_BYTES))]
"""A path, or empty for none."""
PathText = Annotated[OptionalPath, AfterValidator(_check_given)]
MadePath = Annotated[
    _Spelled,
    AfterValidator(partial(_check_bytes, of_a_name=_MADE_NAME_BYTES)),
    AfterValidator(_check_given),
]
"""Path of a folder that a command creates."""


def _check_json(settings: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(settings, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"must hold strings, finite numbers, booleans, lists, tables: {error}"
        ) from None
    return settings


Settings = Annotated[dict[str, Any], AfterValidator(_check_json)]
"""Settings of user code, which this package does not know."""

WandbProject = Annotated[Text, Field(max_length=128, pattern=r"^[^/\\#?%:]*$")]
"""A project name that Weights & Biases accepts."""
