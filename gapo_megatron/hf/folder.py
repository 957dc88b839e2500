"""Output folders that are whole or not there: written under another name, flushed, renamed once.

- OUT/: whole.
- .OUT.0123abcd.tmp/: being written, or half-written when the process died.
- .OUT.0123abcd.old/: what was there before, for the moment between two renames.
- .OUT.0123abcd.lock: locked for as long as the process that writes the two others lives.
- OUT/.gapo_megatron.json: says who made OUT and where; see `check_replaceable`.
- OUT/.gapo_megatron_COMMAND.json: OUT is anybody's, and COMMAND made some files of it; see `claim`.
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
from gapo_megatron.io.files import check_overwritable, flush, real, rename, write_atomically

REPORT_NAME = "conversion.json"
"""What a folder was converted from; of that folder alone, so it is not carried on."""
MARKER_NAME = ".gapo_megatron.json"
"""In a model folder that may be replaced: which command made it, and at which path and inode.

A folder that was moved is still the command's own; a copy of it, which has neither, is not."""


def check_replaceable(
    output: str | Path,
    *,
    field: str,
    is_ours: bool,
    inputs: Mapping[str, str | Path] | None = None,
) -> None:
    """Refuse to replace a folder that the command did not make, or that holds what is read.

    Args:
        output: folder to make, or to replace. Links are followed, here and in `inputs`.
        field: setting that names it, for errors.
        is_ours: what is there is known to be an earlier result of the same command.
        inputs: what the command reads, by the setting that names it; empty paths are left out.

    Raises:
        ConfigError: names the field, the folder and what is in the way.
    """
    folder = real(output)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{field} ({output}) is a file; it must be a folder")
    for name, path in (inputs or {}).items():
        if str(path) and real(path).is_relative_to(folder):
            raise ConfigError(
                f"{field} ({output}) is written anew, so {name} ({path}) must not lie in it"
            )
    if Path.cwd().is_relative_to(folder):
        raise ConfigError(f"{field} ({output}) must not hold the working directory ({Path.cwd()})")
    try:
        is_empty = not folder.is_dir() or not any(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"{field} ({output}) cannot be read: {error.strerror}") from None
    if not (is_empty or is_ours):
        raise ConfigError(
            f"{field} ({output}) is not an earlier result of this command, made there (see its "
            f"{MARKER_NAME}, if any): it must be new, empty or such a result; name another folder, "
            "or move that one away"
        )


def claim(
    folder: Path, names: Iterable[str], *, field: str, made_by: str, or_ours: bool = False
) -> None:
    """Make or take a folder to write files of these names to; a later call may replace them alone.

    Args:
        folder: may hold other files, which do not matter.
        names: of the files that will be written, or removed.
        field: setting or option that names the folder, for errors.
        made_by: command that writes them.
        or_ours: they are known to be of an earlier call, without a marker.

    Raises:
        ConfigError: one of them is there, and somebody else's; or another command made the whole
            folder, and would replace it together with them.
        OSError: the folder cannot be made or written to.
    """
    if (folder / MARKER_NAME).exists() and (owner := _maker(folder)) not in (None, made_by):
        raise ConfigError(
            f"{field} ({folder}) is a result of `{owner}`, which may replace all of it (see its "
            f"{MARKER_NAME}): name another folder"
        )
    name = f".gapo_megatron_{made_by}.json"
    is_ours = or_ours or ((folder / name).exists() and _maker(folder, name) == made_by)
    check_overwritable(folder, names, field=field, is_ours=is_ours)
    folder.mkdir(parents=True, exist_ok=True)
    mark(folder, made_by=made_by, made_at=folder, name=name)


def mark(folder: Path, *, made_by: str, made_at: Path, name: str = MARKER_NAME) -> None:
    """Let a later call of the same command replace the folder that `folder` is to become."""
    marker = {
        "made_by": made_by,
        "made_at": str(real(made_at)),
        "inode": folder.stat().st_ino,
    }
    # Never in place: in a copy of hard links the original's marker is the same file.
    write_atomically(folder / name, json.dumps(marker) + "\n")


def is_marked(folder: str | Path, *, made_by: str, or_unmarked: bool = False) -> bool:
    """Whether the command made `folder`; `or_unmarked`: also one without a marker, not a link."""
    try:
        return _maker(folder) == made_by
    except FileNotFoundError:
        return or_unmarked and not Path(folder).is_symlink()


def adopt(folder: Path, *, made_by: str, made_at: Path) -> bool:
    """Mark a copy of what the command made at `made_at`, as made here; False if it is no such copy.

    For a caller that knows by other files that they were copied together.
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
    """Command that a marker speaks of; None where it speaks of another folder, or is damaged."""
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

    It lies beside `output`, so that one rename publishes it, after every byte is on disk. What
    killed processes left of the same output is removed first.

    Args:
        output: folder to make.
        num_bytes: that will be written, about; compared with the free space.
        replace: an earlier result there steps aside when the new one is whole; else what exists is
            an error.
        is_ours: see `check_replaceable`.
        advice: what the command line offers against that error.

    Raises:
        ConfigError: the output exists or cannot be made, or there is not enough space; raised
            before the block is entered. Or, when it ends: somebody else has made the output.
    """
    given, output = output, real(output)
    stem = output.with_name(f".{output.name}.{uuid.uuid4().hex[:8]}")
    temporary = Path(f"{stem}.tmp")
    with contextlib.ExitStack() as stack:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            # First of all: they may be what fills the disk, or what `output` was.
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
                f"output folder {given} cannot be made: {error.filename or output.parent}: "
                f"{error.strerror}"
            ) from None
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        yield temporary
        flush(temporary)
        _publish(temporary, output, aside=Path(f"{stem}.old") if replace else None)


def _publish(temporary: Path, output: Path, *, aside: Path | None) -> None:
    """Rename; what is there steps aside, if it may: rename(2) wants an empty target."""
    try:
        if aside and output.exists():
            os.rename(output, aside)
        rename(temporary, output)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        raise ConfigError(f"output folder {output} has been made by somebody else") from None
    finally:
        if aside:
            _put_back_or_remove(aside, output)


def _put_back_or_remove(aside: Path, output: Path) -> None:
    """What stepped aside goes back, unless something has taken its place."""
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
    """Hold a lock that the system releases when this process dies, however it dies."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Another process may have taken it for a leftover between these two calls.
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            break
        os.close(descriptor)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _remove_leftovers(output: Path) -> None:
    """Remove what processes that died half-way left of the same output."""
    # The whole name: OUT.v2 has leftovers of its own.
    pattern = re.compile(rf"(\.{re.escape(output.name)}\.[0-9a-f]{{8}})\.(tmp|old|lock)")
    names = (pattern.fullmatch(path.name) for path in output.parent.iterdir())
    for stem in {output.with_name(found[1]) for found in names if found}:
        lock = Path(f"{stem}.lock")
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(f"{stem}.tmp", ignore_errors=True)
            _put_back_or_remove(Path(f"{stem}.old"), output)  # died between the two renames
            lock.unlink(missing_ok=True)
        except BlockingIOError:
            pass  # alive
        finally:
            os.close(descriptor)
