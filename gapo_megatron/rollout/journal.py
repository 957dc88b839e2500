"""Journal of an environment's calls: no call is made twice, whenever a run is killed.

A file for each step and replica in the run folder. A line is on disk before the call begins, and
another before its answer is used. A resumed run samples the same tokens, and so asks for the same
calls: it reads their answers here, unless another environment gave them. A call that had begun, but
has no answer, may have had its side effects; it is not repeated, and the verdict on its episode is
unknown, unless the environment says that it may be (`may_repeat`). Each line begins with a digest
of its rest, so a line that has changed is not read.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gapo_megatron.errors import DataError
from gapo_megatron.io.documents import open_file
from gapo_megatron.io.files import naming
from gapo_megatron.io.run_folder import JOURNAL_FOLDER
from gapo_megatron.types import Episode, TurnSettings


@dataclass(frozen=True, slots=True)
class Reply:
    """An environment's answer to a turn of the model, or why there is none."""

    prompt: str
    """Id of the problem."""
    sample: int
    """Number of the response among those to the problem."""
    tokens: tuple[int, ...] | None = None
    """Tokens to append; None: the episode has ended."""
    failure: str = ""
    """Why the call failed: the verdict on the episode is unknown. Empty if it did not."""
    seconds: float = 0.0
    """Duration of the call."""
    text: str | None = None
    """Text with which the environment ended the episode (`Episode.final_text`)."""
    turn: TurnSettings = field(default_factory=TurnSettings)
    """Settings of the model's next turn."""
    began_s: float | None = None
    """Seconds from the start of the generation to that of the call, on the first rank of the
    replica; not recorded, so None if an earlier attempt made the call."""


class Journal:
    """The calls of one step, or of one evaluation, of a replica. Threads may share it."""

    def __init__(
        self,
        run_dir: Path,
        name: str,
        *,
        replica: int,
        environment: str = "",
        may_repeat: bool = False,
    ) -> None:
        """Read what earlier attempts have recorded, with any number of replicas.

        Args:
            run_dir: the run folder.
            name: name of the step (`step_name`) or the evaluation.
            replica: number of this replica, which writes a file of its own.
            environment: what answers, and its limits: the calls of another one are other calls.
            may_repeat: a call without an answer counts as never made (`Environment.may_repeat`).

        Raises:
            DataError: a file is damaged, other than by an interrupted last line; names file and
                line.
            MachineError: a file cannot be read, or is no regular one; names it.
        """
        folder = run_dir / JOURNAL_FOLDER
        self._path = folder / f"{name}_{replica}.jsonl"
        self._environment = environment
        self._may_repeat = may_repeat
        self._lock = threading.Lock()
        self._begun: set[str] = set()
        self._replies: dict[str, Reply] = {}
        for path in sorted(folder.glob(f"{name}_*.jsonl")):
            self._read(path)
        self._mends = self._path.exists()

    def find(self, episode: Episode) -> Reply | None:
        """The recorded answer to the last turn of an episode; None if it was never asked for."""
        name = self._key(episode)
        if name in self._replies:
            return self._replies[name]
        if name not in self._begun or self._may_repeat:
            return None
        why = "the run was interrupted during the environment's call"
        return Reply(episode.prompt.id, episode.sample, failure=why)

    def begin(self, episode: Episode) -> None:
        """Record, on disk, that a call begins."""
        self._write({"begun": self._key(episode)})

    def end(self, episode: Episode, reply: Reply) -> None:
        """Record its answer, on disk."""
        record = {"call": self._key(episode), **asdict(reply)}
        del record["began_s"]
        self._write(record)

    def _key(self, episode: Episode) -> str:
        """Name of a call: the environment, problem, sample, and a digest of the tokens so far."""
        names = [self._environment, episode.prompt.id, episode.sample]
        digest = hashlib.sha256(json.dumps(names).encode())
        for tokens in (episode.prompt.token_ids, episode.token_ids):
            digest.update(np.asarray([len(tokens), *tokens], dtype="<i8").tobytes())
        return digest.hexdigest()

    def _write(self, record: dict[str, Any]) -> None:
        with self._lock, naming(self._path):
            self._path.parent.mkdir(exist_ok=True)
            with open(self._path, "ab") as file:
                if self._mends:  # the line that a kill has interrupted
                    file.truncate(len(_whole_lines(self._path)))
                    self._mends = False
                file.write(to_line(record))
                file.flush()
                os.fsync(file.fileno())

    def _read(self, path: Path) -> None:
        with naming(path):
            content = _whole_lines(path)
        for number, line in enumerate(content.splitlines(), 1):
            digest, _, text = line.partition(b" ")
            if digest != _digest(text):
                raise DataError(
                    f"{path}:{number}: the record of a call does not match its digest; remove the "
                    "file, and calls of this step are made again"
                )
            record = json.loads(text)
            if "begun" in record:
                self._begun.add(record["begun"])
                continue
            try:
                name, reply = _to_reply(record)
            except (LookupError, TypeError) as error:
                raise DataError(
                    f"{path}:{number}: the record of a call is of another version of the code "
                    f"({type(error).__name__}: {error}); resume with that version, or remove the "
                    "file, and calls of this step are made again"
                ) from None
            self._replies.setdefault(name, reply)


def _to_reply(record: dict[str, Any]) -> tuple[str, Reply]:
    """The call that a record names, and its answer; `turn` is not in records of before it."""
    fields = dict(record)
    name, tokens, turn = fields.pop("call"), fields.pop("tokens"), fields.pop("turn", None)
    settings = TurnSettings() if turn is None else TurnSettings.of(turn)
    return name, Reply(**fields, tokens=None if tokens is None else tuple(tokens), turn=settings)


def to_line(record: dict[str, Any]) -> bytes:
    """A line of the file: a digest, and the record as JSON."""
    text = json.dumps(record).encode()
    return _digest(text) + b" " + text + b"\n"


def step_name(step: int) -> str:
    """Name of a training step's journal."""
    return f"step_{step}"


def evaluation_name(step: int) -> str:
    """Name of the journal of the evaluation before a step."""
    return f"evaluation_{step}"


def remove_journals(run_dir: Path, *, before: int) -> None:
    """Remove journals of steps that no resume repeats: those before the oldest checkpoint."""
    for path in (run_dir / JOURNAL_FOLDER).glob("*.jsonl"):
        _, _, numbers = path.stem.partition("_")
        step, _, _ = numbers.partition("_")
        if step.isdecimal() and int(step) < before:
            path.unlink(missing_ok=True)


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:16].encode()


def _whole_lines(path: Path) -> bytes:
    """Content of a file up to the end of its last whole line."""
    with open_file(path) as file:
        content = file.read()
    return content[: content.rfind(b"\n") + 1]
