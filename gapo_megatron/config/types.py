"""Types of settings; their limits are those of the code and libraries that use them.

A value beyond them passes as a number or a string, and fails only after minutes: in a C library, in
vLLM, in a file that cannot be read again. So the schema refuses it.
"""

from __future__ import annotations

import os
import unicodedata
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

# --- whole numbers --------------------------------------------------------------------------------

_COUNTS = 2**31
"""Offsets of packed sequences, and what vLLM counts, have 32 bits and a sign."""

_STEPS = 2**63
"""Counted in Python alone; TOML's numbers have 64 bits and a sign."""

Count = Annotated[int, Field(gt=0, lt=_COUNTS)]
CountOrZero = Annotated[int, Field(ge=0, lt=_COUNTS)]

Steps = Annotated[int, Field(gt=0, lt=_STEPS)]
StepsOrZero = Annotated[int, Field(ge=0, lt=_STEPS)]

Seed = Annotated[int, Field(ge=0, lt=2**64)]
"""Seed in the range of `torch.manual_seed`; NumPy's and Python's generators take any."""

Seconds = Annotated[int, Field(gt=0, le=2_000_000)]
"""23 days: `poll` counts milliseconds in 32 bits, and there are callers that add a minute."""

Tokens = Annotated[int, Field(gt=0, le=2**24)]
"""Tokens of one sequence at most: vLLM makes a table of rotary positions as long before it starts.
The longest contexts that models are trained on have 10 million."""

GroupSize = Annotated[int, Field(ge=2, le=2**12)]
"""Samples that are compared with each other: one alone has nothing to compare with, and metrics
have columns for each number of correct ones."""

Workers = Annotated[int, Field(ge=0, le=1024)]
"""Processes of one rank, started all at once."""

# --- numbers --------------------------------------------------------------------------------------

_MOST = 1e30
"""Computed with in float32, where it may be multiplied: torch refuses a scalar beyond 3.4e38."""

Positive = Annotated[float, Field(gt=0, le=_MOST)]
NonNegative = Annotated[float, Field(ge=0, le=_MOST)]

Bound = Annotated[float, Field(gt=0)]
"""Compared with in Python alone: so large that it never applies is a way to switch it off."""

Temperature = Annotated[float, Field(ge=0.01, le=2)]
"""vLLM refuses more, and takes less for 0.01 with a warning."""

LearningRate = Annotated[float, Field(gt=0, le=1)]
"""Adam moves every weight by about as much in each update."""

AdamEps = Annotated[float, Field(ge=1e-30, le=1)]
"""Below float32's smallest number it is 0, and a weight without gradient becomes 0/0."""

# --- names ----------------------------------------------------------------------------------------


def _read_older_offload(value: object) -> object:
    return ("optimizer" if value else "none") if isinstance(value, bool) else value


Offload = Annotated[Literal["none", "optimizer", "all"], BeforeValidator(_read_older_offload)]
"""A boolean in older versions."""

# --- text -----------------------------------------------------------------------------------------


def check_text(text: str) -> str:
    """Refuse all but one printable line, the same in TOML, in a shell script and in a log.

    Raises:
        ValueError: says which character.
    """
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
            raise ValueError(f"must be one line without control characters: {character!a}")
    return text


_PATH_BYTES = 2048
"""Half of what Linux takes: the rest is for the files in a folder, and the working directory."""
_NAME_BYTES, _MADE_NAME_BYTES = 255, 200
"""Between two slashes: as Linux takes it, and less what the drafts of what is made add to it."""


def _check_spelling(path: str) -> str:
    if path != path.strip():
        raise ValueError("must not begin or end with a blank")
    if path.startswith("~"):
        raise ValueError("must be written out: nobody replaces the ~ (a folder of that name: ./~)")
    return path


def _check_read(path: str) -> str:
    return _check_bytes(path, of_a_name=_NAME_BYTES)


def _check_made(path: str) -> str:
    return _check_bytes(path, of_a_name=_MADE_NAME_BYTES)


def _check_bytes(path: str, *, of_a_name: int) -> str:
    encoded = os.fsencode(path)
    if len(encoded) > _PATH_BYTES or max(map(len, encoded.split(b"/"))) > of_a_name:
        raise ValueError(
            f"must have at most {_PATH_BYTES} bytes, and {of_a_name} between two slashes"
        )
    return path


def _check_given(path: str) -> str:
    if not path:
        raise ValueError("must not be empty, which would be the working directory")
    return path


Text = Annotated[str, Field(max_length=_PATH_BYTES), AfterValidator(check_text)]
_Spelled = Annotated[str, AfterValidator(check_text), AfterValidator(_check_spelling)]
OptionalPath = Annotated[_Spelled, AfterValidator(_check_read)]
"""Empty: none."""
PathText = Annotated[OptionalPath, AfterValidator(_check_given)]
MadePath = Annotated[_Spelled, AfterValidator(_check_made), AfterValidator(_check_given)]
"""Path of a folder that a command makes."""

WandbProject = Annotated[Text, Field(max_length=128, pattern=r"^[^/\\#?%:]*$")]
"""Project name that Weights & Biases accepts."""
