"""Files that are complete or absent after any failure, and digests. Standard library only."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from gapo_megatron.errors import ConfigError, DataError, GapoError, MachineError


def real(path: str | Path) -> Path:
    """The absolute path without links; unlike `Path.resolve`, accepts links in a circle."""
    return Path(os.path.realpath(path))


def lock(file: int | IO[bytes], operation: int) -> bool:
    """`fcntl.flock`; False where the file system has no locks, as Lustre without `-o flock`."""
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        return False
    return True


def file_name(text: str) -> str:
    """A file name for `text`: itself if it is a word of at most 100 bytes; else it has a digest."""
    if re.fullmatch(r"\w[\w.+-]*", text) and len(text.encode()) <= 100:
        return text
    head = re.sub(r"[^A-Za-z0-9]+", "_", text)[:40]
    return f"{head}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Name `path` in OSErrors of the block, because errors of a write do not say which file.

    Raises:
        MachineError: in place of any OSError; usually a full disk.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, GapoError):
            raise
        raise MachineError(f"{path}: {error.strerror or error}") from error


def write_atomically(path: Path, text: str | bytes) -> None:
    """Replace a file's content at once: readers see the old or the new file, even after power loss.

    Args:
        path: in an existing folder. A link is replaced by the file; its target is not changed.
        text: lines; a missing final newline is added. Bytes are written unchanged.

    Raises:
        MachineError: the disk is full or fails; the file is unchanged.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    if isinstance(text, str):
        text = (text if not text or text.endswith("\n") else f"{text}\n").encode()
    with naming(path):
        try:
            with open(draft, "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            rename(draft, path)
        except BaseException:  # also on Ctrl-C
            draft.unlink(missing_ok=True)
            raise


def check_overwritable(
    folder: str | Path, names: Iterable[str], *, field: str, is_ours: bool
) -> None:
    """Refuse to overwrite files that the command did not make; ignores other files in the folder.

    Args:
        folder: to write to; need not exist.
        names: names of the files that will be written or removed.
        field: setting or option that names the folder, for errors.
        is_ours: existing files are known to be results of the same command.

    Raises:
        ConfigError: names the field, the folder and the first file in the way.
    """
    for name in [] if is_ours else names:
        if os.path.lexists(Path(folder, name)):
            raise ConfigError(
                f"{field} ({folder}) holds {name}, which this command did not make and would "
                "overwrite: name another folder, or move the file away"
            )


def rename(source: Path, target: Path) -> None:
    """Rename a file or a folder, and flush the change to disk."""
    source.rename(target)
    fsync(target.parent)


def flush(folder: Path) -> None:
    """Flush everything in a folder to disk."""
    for path in [*folder.rglob("*"), folder]:
        fsync(path)


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- digests -------------------------------------------------------------------------------------


def file_sha256(path: Path) -> str:
    """Digest of a file.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
