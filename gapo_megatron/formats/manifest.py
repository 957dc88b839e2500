"""Checkpoint folders and their manifest, which has the size and SHA-256 of every file.

- checkpoints/step_00000040/: complete, unless damaged later (the manifest tells).
- checkpoints/step_00000052_3/: the same, stopped after 52 steps and 3 updates of the next.
- checkpoints/.tmp_step_00000060.ATTEMPT/: being written, or left by a job that died.
- checkpoints/.tmp_step_00000020.old/: no longer kept, being removed.
- checkpoints/.damaged_step_00000040/: refused by a resume; removed when the run has reached that
  step again.

A folder gets its final name by a rename, after every byte is on disk. Imports neither torch nor
Megatron-core.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from gapo_megatron.errors import CheckpointError
from gapo_megatron.io.documents import open_file, read_json
from gapo_megatron.io.files import rename

if TYPE_CHECKING:
    from gapo_megatron.config import CheckpointConfig

MANIFEST_NAME = "manifest.json"
VERSION = 5
_STEP_NAME = re.compile(r"step_([0-9]+)(?:_([0-9]+))?")
_READ_BYTES = 2**20


def is_plain_name(name: str) -> bool:
    """Whether it names a file inside of a folder: a relative, normalised path without `..`."""
    parts = PurePosixPath(name).parts
    return name == "/".join(parts) != "" and not {"/", ".."} & {*parts} and "\0" not in name


def _plain(name: str) -> str:
    if not is_plain_name(name):
        raise ValueError("must name a file inside of the folder")
    return name


_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Name = Annotated[str, AfterValidator(_plain)]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    num_bytes: _Count
    sha256: _Sha256
    """Hexadecimal digest of the content."""


@dataclass(frozen=True, slots=True)
class Branch:
    """The point at which a run branched off another run."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    run: Annotated[str, Field(pattern=r"^[^\x00]+$")]
    """Absolute path of the other run."""
    checkpoint: _Name
    """Folder name of the checkpoint in the other run."""
    step: _Count
    """Number of finished steps in that checkpoint."""
    manifest_sha256: _Sha256
    """Digest of that checkpoint's manifest, which covers all its files."""
    changes: Mapping[str, Annotated[list[Any], Field(min_length=2, max_length=2)]]
    """Settings that affect the results and differ: name -> [other run, this run]."""
    parent: Branch | None = None
    """The point at which the other run branched off a third one, if it did."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of manifest.json: what the checkpoint holds, and its files."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    step: _Count
    """Number of finished steps: the step at which a resumed run starts."""
    model: Mapping[str, Any]
    """Fields of the Hugging Face config that determine names and shapes of the weights."""
    config: Mapping[str, Mapping[str, Any] | None]
    """The resolved run config."""
    layout: Mapping[str, Annotated[int, Field(ge=1)]]
    """Parallel sizes of the run that wrote it."""
    megatron_version: str
    files: Mapping[_Name, FileEntry]
    """All files but the manifest, by path relative to the folder."""
    open_updates: _Count | None = None
    """Finished updates of an unfinished step; None between steps."""
    branch: Branch | None = None
    """None for a run that is not a branch."""
    base_sha256: _Sha256 | None = None
    """Digest of the frozen weights beneath an adapter, which are not among the files; None: all
    weights are."""
    implementation: str | None = None
    """Whose optimizer wrote it: what `optimizer.implementation` led to."""
    version: int = VERSION

    @property
    def sha256(self) -> str:
        """Digest of the content, as stored in manifest.json."""
        return hashlib.sha256(_canonical(self.document())).hexdigest()

    def document(self) -> dict[str, Any]:
        """The content of manifest.json without its own digest."""
        return asdict(self) | {"config_sha256": hashlib.sha256(_canonical(self.config)).hexdigest()}


_MANIFEST = TypeAdapter(Manifest)


def step_dir(checkpoints_dir: Path, step: int, open_updates: int | None = None) -> Path:
    """Final path of the checkpoint after `step` steps and, if given, updates of the next step."""
    suffix = "" if open_updates is None else f"_{open_updates}"
    return checkpoints_dir / f"step_{step:08d}{suffix}"


def list_steps(checkpoints_dir: Path) -> list[Path]:
    """Published checkpoints, newest first, without unfinished and refused ones.

    Every path with a checkpoint's name is listed: a file or a dangling link is a damaged one.

    Raises:
        CheckpointError: the folder exists and cannot be read.
    """
    try:
        named = [(_STEP_NAME.fullmatch(path.name), path) for path in checkpoints_dir.iterdir()]
        steps = [
            # The end of a step comes before the first update of the next.
            (int(match[1]), -1 if match[2] is None else int(match[2]), path)
            for match, path in named
            if match
        ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{checkpoints_dir} cannot be read: {error.strerror}") from None
    return [path for _, _, path in sorted(steps, reverse=True)]


def is_open(folder: Path) -> bool:
    """Whether a checkpoint, by its name, is of an unfinished step."""
    match = _STEP_NAME.fullmatch(folder.name)
    return match is not None and match[2] is not None


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Size and digest of each named file."""
    return {
        name: FileEntry(num_bytes=(folder / name).stat().st_size, sha256=_digest(folder / name))
        for name in names
    }


def list_files(folder: Path) -> list[str]:
    """Sorted paths of the files in `folder`, relative to it, without the manifest."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in paths if path.name != MANIFEST_NAME)


def find_damage(
    folder: Path,
    files: Mapping[str, FileEntry],
    *,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> str | None:
    """The first difference between the files and their entries, with the file; None if none.

    All sizes are compared before any content is read. A file that cannot be read counts as
    damaged, whatever the reason.

    Args:
        folder: where the files are.
        files: some or all entries of a manifest.
        on_bytes: called with each number of bytes read.
    """
    path = folder
    try:
        for name, entry in files.items():
            path = folder / name
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                return f"{path} is not a regular file"
            if status.st_size != entry.num_bytes:
                return f"{path} has {status.st_size} bytes instead of {entry.num_bytes}"
        for name, entry in files.items():
            path = folder / name
            if _digest(path, on_bytes) != entry.sha256:
                return f"{path} does not match its SHA-256"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json, including a digest of its content."""
    text = json.dumps(manifest.document() | {"sha256": manifest.sha256}, indent=1)
    (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read manifest.json.

    Raises:
        CheckpointError: the manifest is missing, truncated, altered, invalid or of another format,
            or its step differs from the folder's name.
    """
    path = folder / MANIFEST_NAME
    try:
        document = read_json(path, error=CheckpointError)
    except (FileNotFoundError, NotADirectoryError):
        kind = "" if folder.is_dir() else f": {folder} is not a folder"
        raise CheckpointError(f"{path} is missing{kind}") from None
    if not isinstance(document, dict) or not {"sha256", "version"} <= document.keys():
        raise CheckpointError(f"{path} is not a manifest: {document!r:.40}")
    digest = document.pop("sha256")
    if hashlib.sha256(_canonical(document)).hexdigest() != digest:
        raise CheckpointError(f"{path} does not match its own SHA-256")
    if document["version"] != VERSION:
        raise CheckpointError(
            f"{path} has format version {document['version']!r:.40}; this program reads {VERSION}"
        )
    document.pop("config_sha256", None)
    try:
        found = _MANIFEST.validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        raise CheckpointError(f"{path}: {first_flaw(error)}") from None
    named = _STEP_NAME.fullmatch(folder.name)
    if named and (int(named[1]), named[2] and int(named[2])) != (found.step, found.open_updates):
        raise CheckpointError(
            f"{path} has step {found.step} and open_updates {found.open_updates}, but the name of "
            "its folder says otherwise"
        )
    return found


def first_flaw(error: ValidationError) -> str:
    """Field, value and rule of the first error in a document."""
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"]))
    return f"{field} ({first['input']!r:.40}) is wrong: {first['msg']}"


def stored_sha256(folder: Path) -> str:
    """The digest stored in the manifest.json of a folder.

    Computing it from `read_manifest` would give another digest for a manifest of an older format.

    Raises:
        CheckpointError: it can no longer be read.
    """
    try:
        digest: str = read_json(folder / MANIFEST_NAME, error=CheckpointError)["sha256"]
    except FileNotFoundError:
        raise CheckpointError(f"{folder / MANIFEST_NAME} is missing") from None
    return digest


def newest_manifest(checkpoints_dir: Path) -> tuple[Path, Manifest] | None:
    """The newest checkpoint with a valid manifest, or None; its files are not checked."""
    for folder in list_steps(checkpoints_dir):
        try:
            return folder, read_manifest(folder)
        except CheckpointError:
            continue
    return None


def remove_half_written(checkpoints_dir: Path) -> None:
    """Remove what attempts that died or no longer own the run were writing, or removing."""
    for path in checkpoints_dir.glob(".tmp_step_*"):
        remove(path)


def publish(temporary: Path, final: Path) -> None:
    """Rename the flushed folder `temporary` to its final name.

    An existing folder of that name, left by a refused checkpoint, is set aside first.
    """
    if os.path.lexists(final):
        set_aside(final)
    rename(temporary, final)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that later resumes ignore it; returns the new path."""
    aside = folder.with_name(f".damaged_{folder.name}")
    if os.path.lexists(aside):
        remove(aside)
    rename(folder, aside)
    return aside


def prune(checkpoints_dir: Path, settings: CheckpointConfig) -> dict[Path, Path]:
    """Hide old checkpoints, and refused ones that the run has passed, for `remove`.

    A rename takes no time, whatever the size, and no kill leaves half a checkpoint under its name.
    The next save removes what a kill has left (`remove_half_written`).

    Keeps the newest checkpoint, the newest at a step boundary, those of `keep_steps`, and the
    `keep_last` newest at a step boundary; among these, scheduled checkpoints come before those
    written on preemption, so that a run that is stopped often keeps as many scheduled ones. A
    checkpoint within a step does not count, because only the same parallel layout can resume from
    it. A refused checkpoint stays until the run has reached its step again, in case its disk
    recovers.

    Call it only after `publish`: the published checkpoint is then the newest (a resume sets refused
    ones aside), so at least one valid checkpoint is kept.

    Returns:
        Where they are now, by former path.
    """
    steps = list_steps(checkpoints_dir)
    between = [path for path in steps if not is_open(path)]
    by_rank = sorted(between, key=lambda path: not settings.is_due(_step(path)))  # stable
    kept = {*steps[:1], *between[:1], *by_rank[: settings.keep_last]}
    kept |= {path for path in between if _step(path) in settings.keep_steps}
    refused = [
        path
        for path in sorted(checkpoints_dir.glob(".damaged_step_*"))
        if not steps or _step(path) <= _step(steps[0])
    ]
    hidden: dict[Path, Path] = {}
    for path in [*(path for path in steps if path not in kept), *refused]:
        if path.is_symlink():  # links belong to the user
            continue
        kind = "refused" if path in refused else "old"
        hidden[path] = path.with_name(f".tmp_{path.name.removeprefix('.damaged_')}.{kind}")
        remove(hidden[path])
        rename(path, hidden[path])
    return hidden


def earliest_resume(checkpoints_dir: Path, settings: CheckpointConfig) -> int | None:
    """Finished steps of the oldest checkpoint that a resume falls back to; None without any.

    The many that `keep_steps` may keep are left aside, but for the newest.
    """
    steps = list_steps(checkpoints_dir)[: settings.keep_last + 2]  # see `prune`
    return min(map(_step, steps), default=None)


def remove(path: Path) -> bool:
    """Remove a checkpoint; of a link only the link, not its target. Returns whether it is gone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    return not os.path.lexists(path)


def _step(folder: Path) -> int:
    """Finished steps of a published or refused checkpoint, by its name."""
    return int(folder.name.removeprefix(".damaged_").split("_")[1])


def _digest(path: Path, on_bytes: Callable[[int], None] = lambda num_bytes: None) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
    with open_file(path) as file:
        while number := file.readinto(buffer):  # type: ignore[attr-defined]
            digest.update(buffer[:number])
            on_bytes(number)
    return digest.hexdigest()


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
