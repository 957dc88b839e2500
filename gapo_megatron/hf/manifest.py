"""What makes a checkpoint folder whole: a manifest with the size and SHA-256 of every file.

- checkpoints/step_00000040/: whole, or damaged after the fact (the manifest tells).
- checkpoints/step_00000052_3/: likewise, after 52 steps and 3 updates of the next (a stop).
- checkpoints/.tmp_step_00000060.ATTEMPT/: being written, or half-written when the job died.
- checkpoints/.damaged_step_00000040/: refused by a resume; removed when the run is as
  far again.

A folder gets its final name by one rename, after every byte of it is on disk. Files only: nothing
here knows torch or Megatron-core.
"""

from __future__ import annotations

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
VERSION = 2
_STEP_NAME = re.compile(r"step_([0-9]+)(?:_([0-9]+))?")
_READ_BYTES = 2**20


def is_plain_name(name: str) -> bool:
    """Whether it names a file inside of a folder: relative, without `..`, in one spelling."""
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
    """Where a run left another one: the branch point."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    run: Annotated[str, Field(pattern=r"^[^\x00]+$")]
    """Folder of the other run, absolute."""
    checkpoint: _Name
    """Name of its checkpoint's folder."""
    step: _Count
    """Steps finished there."""
    manifest_sha256: _Sha256
    """Digest of that checkpoint's manifest, which has a digest of every file."""
    changes: Mapping[str, Annotated[list[Any], Field(min_length=2, max_length=2)]]
    """Settings that decide what is computed: name -> [there, here] where they differ."""
    parent: Branch | None = None
    """Where the other run had left a third one, if it had."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of manifest.json: what the checkpoint is, and what must be in its folder."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    step: _Count
    """Steps finished when it was written: the step a resumed run starts with."""
    model: Mapping[str, Any]
    """Fields of the Hugging Face config that decide names and shapes of the weights."""
    config: Mapping[str, Mapping[str, Any] | None]
    """The resolved run config."""
    layout: Mapping[str, Annotated[int, Field(ge=1)]]
    """Parallel sizes of the run that wrote it."""
    megatron_version: str
    files: Mapping[_Name, FileEntry]
    """By name relative to the folder; every file but the manifest."""
    open_updates: _Count | None = None
    """Updates done of a step that is not finished; None between steps."""
    branch: Branch | None = None
    """None for a run that began by itself."""
    version: int = VERSION

    @property
    def sha256(self) -> str:
        """Digest of all of it, as manifest.json has it."""
        return hashlib.sha256(_canonical(self.document())).hexdigest()

    def document(self) -> dict[str, Any]:
        """What manifest.json holds beside its own digest."""
        return asdict(self) | {"config_sha256": hashlib.sha256(_canonical(self.config)).hexdigest()}


_MANIFEST = TypeAdapter(Manifest)


def step_dir(checkpoints_dir: Path, step: int, open_updates: int | None = None) -> Path:
    """Final name of the checkpoint after `step` steps, and some updates of the next if given."""
    suffix = "" if open_updates is None else f"_{open_updates}"
    return checkpoints_dir / f"step_{step:08d}{suffix}"


def list_steps(checkpoints_dir: Path) -> list[Path]:
    """Published checkpoints, newest first; half-written and refused ones are not listed.

    Whatever has a checkpoint's name is listed: a file, or a link to nothing, is a damaged one.

    Raises:
        CheckpointError: the folder is there, and cannot be read.
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
    """Whether a checkpoint's name says that it lies within a step."""
    match = _STEP_NAME.fullmatch(folder.name)
    return match is not None and match[2] is not None


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Size and digest of each named file."""
    return {
        name: FileEntry(num_bytes=(folder / name).stat().st_size, sha256=_digest(folder / name))
        for name in names
    }


def list_files(folder: Path) -> list[str]:
    """Names of the files in `folder`, relative to it, sorted; the manifest is left out."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in paths if path.name != MANIFEST_NAME)


def find_damage(
    folder: Path,
    files: Mapping[str, FileEntry],
    *,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> str | None:
    """First way in which the files differ from their entries, naming the file; None if they do not.

    Sizes are compared before any content is read, so a missing or cut file costs nothing. A file
    that cannot be read is damaged, whatever the reason.

    Args:
        folder: of the files.
        files: by name; some of a manifest's, or all.
        on_bytes: called with the bytes that have been read.
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
    """Write manifest.json, with a digest of its own content."""
    text = json.dumps(manifest.document() | {"sha256": manifest.sha256}, indent=1)
    (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read manifest.json.

    Raises:
        CheckpointError: the manifest is missing, cut, altered, misshapen, or of a newer format; or
            it is not that of the step which the folder's name tells.
    """
    path = folder / MANIFEST_NAME
    try:
        document = read_json(path, error=CheckpointError)
    except (FileNotFoundError, NotADirectoryError):
        kind = "" if folder.is_dir() else f": {folder} is no folder, or a link to none"
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
    if isinstance(document.get("layout"), dict):
        # Manifests from before there was context parallelism have no word of it.
        document["layout"].setdefault("context_parallel_size", 1)
    try:
        found = _MANIFEST.validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        raise CheckpointError(f"{path}: {first_flaw(error)}") from None
    named = _STEP_NAME.fullmatch(folder.name)
    if named and (int(named[1]), named[2] and int(named[2])) != (found.step, found.open_updates):
        raise CheckpointError(
            f"{path} has step {found.step} and open_updates {found.open_updates}, which is not "
            "what the name of its folder says"
        )
    return found


def first_flaw(error: ValidationError) -> str:
    """Field, value and rule of the first thing that is wrong with a document."""
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"]))
    return f"{field} ({first['input']!r:.40}) is wrong: {first['msg']}"


def stored_sha256(folder: Path) -> str:
    """Digest of a manifest that `read_manifest` has read, as manifest.json has it.

    That of an older format, read and written again, would be another one.

    Raises:
        CheckpointError: it cannot be read any more.
    """
    try:
        digest: str = read_json(folder / MANIFEST_NAME, error=CheckpointError)["sha256"]
    except FileNotFoundError:
        raise CheckpointError(f"{folder / MANIFEST_NAME} is missing") from None
    return digest


def newest_manifest(checkpoints_dir: Path) -> tuple[Path, Manifest] | None:
    """The newest checkpoint whose manifest can be read, or None; its files are not looked at."""
    for folder in list_steps(checkpoints_dir):
        try:
            return folder, read_manifest(folder)
        except CheckpointError:
            continue
    return None


def remove_half_written(checkpoints_dir: Path) -> None:
    """Remove what was being written when an attempt died, or is still by one that lost the run."""
    for path in checkpoints_dir.glob(".tmp_step_*"):
        shutil.rmtree(path, ignore_errors=True)


def publish(temporary: Path, final: Path) -> None:
    """Give `temporary`, flushed, its final name; whole, or not there at all.

    A folder of that name (a refused checkpoint's leftover) makes way first.
    """
    if os.path.lexists(final):
        set_aside(final)
    rename(temporary, final)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint so that no later resume considers it; returns the new path."""
    aside = folder.with_name(f".damaged_{folder.name}")
    if os.path.lexists(aside):
        _remove(aside)
    rename(folder, aside)
    return aside


def prune(checkpoints_dir: Path, settings: CheckpointConfig) -> list[Path]:
    """Remove old checkpoints, and refused ones that the run has passed; returns what was removed.

    Keeps: the newest checkpoint; the newest at a step boundary; those of `keep_steps`; then the
    `keep_last` newest at a step boundary, scheduled ones before those written on preemption, so
    that a run which is stopped often keeps as many scheduled ones. A checkpoint within a step does
    not count: only the same parallel layout can resume from it. A checkpoint that a resume refused
    stays until the run is as far again: a disk that failed for a moment may recover.

    Call it after `publish` only: the checkpoint just published is the newest (a resume sets aside
    what it refused), hence at least one whole checkpoint stays whatever the others are worth.
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
    removed = [*(path for path in steps if path not in kept), *refused]
    removed = [path for path in removed if not path.is_symlink()]  # somebody else's
    for path in removed:
        _remove(path)
    return removed


def _remove(path: Path) -> None:
    """Remove a checkpoint; of a link the link alone, for what it leads to is somebody else's."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _step(folder: Path) -> int:
    """Steps finished, of a published checkpoint or a refused one."""
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
