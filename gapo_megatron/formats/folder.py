"""Output folders that are complete or absent: written under another name, flushed, then renamed.

- OUT/: complete.
- .OUT.0123abcd.tmp/: being written, or left by a process that died.
- .OUT.0123abcd.old/: the previous OUT, between the two renames that replace it.
- .OUT.0123abcd.lock: locked while the process that writes the two others is alive, where the file
  system has locks.
- OUT/.gapo_megatron.json: which command made OUT, and where; see `check_replaceable`.
- OUT/.gapo_megatron_COMMAND.json: COMMAND made some of the files in OUT; see `claim`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from gapo_megatron.errors import ConfigError
from gapo_megatron.io.documents import read_json
from gapo_megatron.io.files import check_overwritable, flush, lock, real, rename, write_atomically

REPORT_NAME = "conversion.json"
"""The report of a conversion; describes its own folder only, so it is never copied to another."""
MARKER_NAME = ".gapo_megatron.json"
"""Marks a folder that its command may replace: command, path and inode.

A moved folder keeps its inode and may still be replaced; a copy has neither, and may not."""


def check_replaceable(
    output: str | Path,
    *,
    field: str,
    is_ours: bool,
    inputs: Mapping[str, str | Path] | None = None,
) -> None:
    """Refuse to replace a folder that the command did not make, or that contains its inputs.

    Args:
        output: folder to make or replace. Links are followed, here and in `inputs`.
        field: setting that names it, for errors.
        is_ours: an existing folder is known to be an earlier result of the same command.
        inputs: paths that the command reads, by the setting that names them; may be empty.

    Raises:
        ConfigError: names the field, the folder and what is in the way.
    """
    folder = real(output)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{field} ({output}) is a file; it must be a folder")
    for name, path in (inputs or {}).items():
        if str(path) and real(path).is_relative_to(folder):
            raise ConfigError(
                f"{field} ({output}) will be replaced, so {name} ({path}) must not lie in it"
            )
    if Path.cwd().is_relative_to(folder):
        raise ConfigError(f"{field} ({output}) must not hold the working directory ({Path.cwd()})")
    try:
        is_empty = not folder.is_dir() or not any(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"{field} ({output}) cannot be read: {error.strerror}") from None
    if not (is_empty or is_ours):
        raise ConfigError(
            f"{field} ({output}) must be new, empty or an earlier result of this command at that "
            f"path (see its {MARKER_NAME}): name another folder, or move that one away"
        )


def claim(folder: Path, names: Iterable[str], *, field: str, made_by: str) -> None:
    """Create or reuse a folder for files of these names; later calls may replace only these files.

    Args:
        folder: may hold other files, which are ignored.
        names: names of the files that will be written or removed.
        field: setting or option that names the folder, for errors.
        made_by: command that writes them.

    Raises:
        ConfigError: one of the files exists and the command did not make it; or another command
            made the whole folder, and may replace it together with the files.
        OSError: the folder cannot be created or written to.
    """
    if (folder / MARKER_NAME).exists() and (owner := _maker(folder)) not in (None, made_by):
        raise ConfigError(
            f"{field} ({folder}) is a result of `{owner}` (see its {MARKER_NAME}), which may "
            "replace the whole folder: name another one"
        )
    name = f".gapo_megatron_{made_by}.json"
    is_ours = (folder / name).exists() and _maker(folder, name) == made_by
    check_overwritable(folder, names, field=field, is_ours=is_ours)
    folder.mkdir(parents=True, exist_ok=True)
    mark(folder, made_by=made_by, made_at=folder, name=name)


def mark(folder: Path, *, made_by: str, made_at: Path, name: str = MARKER_NAME) -> None:
    """Mark `folder`, so that a later call of the same command may replace it."""
    marker = {
        "made_by": made_by,
        "made_at": str(real(made_at)),
        "inode": folder.stat().st_ino,
    }
    # Never in place: a copy by hard links shares the marker file with the original.
    write_atomically(folder / name, json.dumps(marker) + "\n")


def is_marked(folder: str | Path, *, made_by: str) -> bool:
    """Whether the command made `folder`."""
    try:
        return _maker(folder) == made_by
    except FileNotFoundError:
        return False


def adopt(folder: Path, *, made_by: str, made_at: Path) -> bool:
    """Mark a copy of the command's folder at `made_at` as made here; False if it is no such copy.

    For a caller that knows from other files that they were copied together.
    """
    try:
        marker = read_json(folder / MARKER_NAME)
        is_copy = (marker["made_by"], marker["made_at"]) == (made_by, str(made_at))
    except (ConfigError, FileNotFoundError, KeyError, TypeError):
        return False
    if is_copy:
        mark(folder, made_by=made_by, made_at=folder)
    return is_copy


def _maker(folder: str | Path, name: str = MARKER_NAME) -> object:
    """Command in a marker; None if the marker is damaged or belongs to another folder."""
    folder = real(folder)
    try:
        marker = read_json(folder / name)
        is_here = marker["made_at"] == str(folder) or marker["inode"] == folder.stat().st_ino
        return marker["made_by"] if is_here else None
    except (ConfigError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def new_folder(
    output: str | Path,
    *,
    num_bytes: int,
    replace: bool = False,
    is_ours: bool = False,
    advice: str = "",
) -> Iterator[Path]:
    """A temporary folder that becomes `output` when the block ends without an exception.

    It lies beside `output`, so that a single rename publishes it after every byte is on disk.
    Leftovers of killed processes for the same output are removed first.

    Args:
        output: folder to make.
        num_bytes: about to be written; compared with the free space.
        replace: replace an earlier result when the new one is complete; else an existing output is
            an error.
        is_ours: see `check_replaceable`.
        advice: hint of the command line, appended to that error.

    Raises:
        ConfigError: the output exists or cannot be created, or there is too little space; raised
            before the block is entered. At its end: another process has created the output.
    """
    given, output = output, real(output)
    stem = output.with_name(f".{output.name}.{uuid.uuid4().hex[:8]}")
    temporary = Path(f"{stem}.tmp")
    with contextlib.ExitStack() as stack:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            # First: leftovers may fill the disk, or be the previous `output`.
            _remove_leftovers(output)
            if output.exists() and not output.is_dir():
                raise ConfigError(f"output folder {given} is a file")
            if output.exists() and not replace:
                raise ConfigError(f"output folder {given} exists already{advice}")
            if replace:
                check_replaceable(output, field="output folder", is_ours=is_ours)
            _require_space(output.parent, num_bytes)
            stack.enter_context(_lock(Path(f"{stem}.lock")))
            temporary.mkdir()
        except OSError as error:
            raise ConfigError(
                f"cannot create output folder {given}: {error.filename or output.parent}: "
                f"{error.strerror}"
            ) from None
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        yield temporary
        flush(temporary)
        _publish(temporary, output, aside=Path(f"{stem}.old") if replace else None)


def _publish(temporary: Path, output: Path, *, aside: Path | None) -> None:
    """Rename to `output`, moving an earlier one to `aside`: rename(2) needs an empty target."""
    try:
        if aside and output.exists():
            os.rename(output, aside)
        rename(temporary, output)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        raise ConfigError(f"another process has created output folder {output}") from None
    finally:
        if aside:
            _put_back_or_remove(aside, output)


def _put_back_or_remove(aside: Path, output: Path) -> None:
    """Move the earlier output back, or remove it if the new one is in place."""
    if aside.exists() and not output.exists():
        os.rename(aside, output)
    shutil.rmtree(aside, ignore_errors=True)


def _require_space(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ConfigError(
            f"{folder} has {free / 1e9:.3g} GB free; {num_bytes / 1e9:.3g} GB are needed"
        )


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock that the system releases when this process ends in any way."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        lock(descriptor, fcntl.LOCK_EX)
        # Between these two calls another process may have removed it as a leftover.
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            break
        os.close(descriptor)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _remove_leftovers(output: Path) -> None:
    """Remove leftovers of processes that died while writing the same output.

    Where there are no locks they stay: nothing tells them from those of a process that is alive.
    """
    # Match the whole name: leftovers of OUT.v2 belong to another output.
    pattern = re.compile(rf"(\.{re.escape(output.name)}\.[0-9a-f]{{8}})\.(tmp|old|lock)")
    names = (pattern.fullmatch(path.name) for path in output.parent.iterdir())
    for stem in {output.with_name(found[1]) for found in names if found}:
        path = Path(f"{stem}.lock")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(f"{stem}.tmp", ignore_errors=True)
                _put_back_or_remove(Path(f"{stem}.old"), output)  # it died between the two renames
                path.unlink(missing_ok=True)
        except BlockingIOError:
            pass  # its process is alive
        finally:
            os.close(descriptor)
