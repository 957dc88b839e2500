"""The date that a chat template prints: frozen when a run, or an evaluation, begins.

Templates such as Llama 3.2's and gpt-oss' print today's date in every prompt (`strftime_now`). So
that prompts are the same on every rank, after a requeue, in a branch and in an environment's turns,
the first process that needs the date records it in the folder, and all others read it there.
Imports no torch and no transformers.
"""

from __future__ import annotations

import datetime
import os
import re
import socket
from pathlib import Path

from gapo_megatron.errors import ConfigError
from gapo_megatron.io.documents import read_text
from gapo_megatron.io.files import naming

DATE = "date in the chat template"
"""What a difference of dates is called."""
DATE_NAME = "template_date.txt"
"""The date of a run or an evaluation, in its folder; only if its chat template asks for it."""


def asks_date(template: object) -> bool:
    """Whether a tokenizer's chat template (a text, or texts by name) asks what day it is."""
    return bool(re.search(r"\bstrftime_now\b", str(template)))


def read_date(folder: str | Path) -> str:
    """The date that a run or an evaluation has recorded, as YYYY-MM-DD; empty: none.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    path = Path(folder, DATE_NAME)
    try:
        return datetime.date.fromisoformat(read_text(path).strip()).isoformat()
    except FileNotFoundError:
        return ""
    except ValueError as error:
        raise ConfigError(
            f"{path} must hold the date of the prompts, as 2026-07-01: {error}"
        ) from None


def expected_date(folder: str | Path, *, pinned: str = "", inherited: str = "") -> str:
    """The date that `freeze_date` would return; records nothing."""
    return pinned or read_date(folder) or inherited or str(datetime.date.today())


def freeze_date(folder: str | Path, *, pinned: str = "", inherited: str = "") -> str:
    """The date of a run's or an evaluation's prompts, as YYYY-MM-DD.

    Without a pinned date it is the recorded one. If there is none, it is recorded: of several
    processes that start around midnight, the first decides for all.

    Args:
        folder: folder of the run or evaluation, shared by its ranks.
        pinned: `data.template_date`; the caller records it once the prompts are accepted.
        inherited: date of the run that this one continues; empty: today.

    Raises:
        ConfigError: see `read_date`.
        MachineError: the folder cannot be written.
    """
    if pinned or (found := read_date(folder)):
        return pinned or found
    path = Path(folder, DATE_NAME)
    draft = path.with_name(f".{DATE_NAME}.{socket.gethostname()}.{os.getpid()}")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            date = expected_date(folder, inherited=inherited)
            draft.write_text(f"{date}\n", encoding="utf-8")
            os.link(draft, path)
        except FileExistsError:  # another rank was first
            pass
        finally:
            draft.unlink(missing_ok=True)
    return read_date(folder)
