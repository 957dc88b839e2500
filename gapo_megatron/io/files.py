"""Files that are whole or not there, whatever happens. The standard library alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gapo_megatron.errors import ConfigError, GapoError, MachineError


def real(path: str | Path) -> Path:
    """Absolute, without links; of links in a circle what is left (`Path.resolve` raises then)."""
    return Path(os.path.realpath(path))


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """What the system says while the block reads or writes `path`, as an error that names it.

    By itself a write that fails does not say of which file.

    Raises:
        MachineError: instead of any other OSError; a full disk is the usual one.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, GapoError):
            raise
        raise MachineError(f"{path}: {error.strerror or error}") from error


def write_atomically(path: Path, text: str | bytes) -> None:
    """Write a file that a reader sees whole or as it was; so does one after a loss of power.

    Args:
        path: in a folder that exists. A link gives way to the file; what it led to stays.
        text: whole lines; a newline is added to a last one that lacks it. Bytes: as they are.

    Raises:
        MachineError: the disk is full or fails; the file is as it was.
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
        except BaseException:  # also of Ctrl-C
            draft.unlink(missing_ok=True)
            raise


def check_overwritable(
    folder: str | Path, names: Iterable[str], *, field: str, is_ours: bool
) -> None:
    """Refuse to overwrite files that the command did not make; others in the folder do not matter.

    Args:
        folder: to write to; need not exist.
        names: of the files that will be written there, or removed.
        field: setting or option that names the folder, for errors.
        is_ours: what is there is known to be an earlier result of the same command.

    Raises:
        ConfigError: names the field, the folder and the first file in the way.
    """
    for name in [] if is_ours else names:
        if os.path.lexists(Path(folder, name)):
            raise ConfigError(
                f"{field} ({folder}) holds {name}, which this command would overwrite and has not "
                "made: name another folder, or move it away"
            )


def rename(source: Path, target: Path) -> None:
    """Rename a file or a folder so that a loss of power does not undo it."""
    source.rename(target)
    fsync(target.parent)


def flush(folder: Path) -> None:
    """Force everything in a folder to disk."""
    for path in [*folder.rglob("*"), folder]:
        fsync(path)


def fsync(path: Path) -> None:
    """Force a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
