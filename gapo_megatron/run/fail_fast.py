"""Outermost frame of a program: errors become messages and exit codes. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import logging
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from gapo_megatron.compat.library_errors import naming_transformer_engine
from gapo_megatron.errors import (
    ConfigError,
    ConversionError,
    DataError,
    FencedError,
    GapoError,
    printable,
)
from gapo_megatron.io.files import write_atomically
from gapo_megatron.run import processes

logger = logging.getLogger(__name__)

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
# Errors that a retry, or another node, may not have.
_PASSING = (
    *(*_DISK, errno.ETIMEDOUT, errno.ESHUTDOWN, errno.ENOTCONN),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
)
# Messages of torch's store, gloo and NCCL when the process at the other end has exited.
_LOST = re.compile(
    r"connection (?:was )?(?:likely )?(?:closed|reset|refused)|connectfullmesh|broken pipe"
    r"|remote process exited",
    re.IGNORECASE,
)
WATCH_THREAD = "presence"
"""Name of the thread that learns which rank is gone and ends this process (`run/presence.py`)."""
_NAMED_WITHIN_S = 2.0
"""How long a rank that lost a peer waits for that thread to name it."""
_MAX_FRAMES = 6
_MAX_QUOTED = 160


@contextlib.contextmanager
def fail_fast() -> Iterator[None]:
    """Wrap a program's `main`: an error ends this process at once, without any collective.

    Peers may be waiting in a collective that this rank will never join; destroying the process
    group would hang here too. The launcher sees the exit code and ends the peers.

    Exit codes: 2 for errors that a restart would repeat (a ConfigError, DataError or
    ConversionError, unless a full or failing disk caused it), 3 for a FencedError, 1 for any other
    error, 130 for Ctrl-C. Errors a user can act on, a full or failing disk and the loss of a peer
    print one message; anything else prints its traceback. The error is also written to the
    attempt's folder, where the launcher takes the earliest of all ranks as the cause.
    """
    try:
        with naming_transformer_engine():
            yield
    except SystemExit:
        raise
    except BaseException as error:  # the outermost frame of the program
        if is_lost_peer(error) and any(one.name == WATCH_THREAD for one in threading.enumerate()):
            time.sleep(_NAMED_WITHIN_S)
        exit_code = _exit_code(error)
        _record_failure(error, exit_code=exit_code, trace=traceback.format_exc())
        rank = processes.stated_rank()
        where = f" (rank {rank})" if rank else ""
        with contextlib.suppress(OSError, ValueError):  # stderr is on the full disk, or closed
            text = printable(_message(error, where), most=sys.maxsize, kept="\n\t")
            print(text, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(exit_code)


def end_after(timeout_s: float) -> None:
    """End this process, with its stacks printed, unless this is called again in time.

    The watch runs outside Python: it also ends a process that is stuck in a C call.
    """
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=stderr())


def stderr() -> TextIO:
    """The process's own stderr: faulthandler needs a file descriptor; `sys.stderr` may lack it."""
    assert sys.__stderr__ is not None
    return sys.__stderr__


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, FencedError):
        return 3
    stays = isinstance(error, ConfigError | DataError | ConversionError)
    return 2 if stays and not _is_passing(error) else 1


def _is_passing(error: BaseException | None) -> bool:
    """Whether a state of the machine caused an error; also reads the context of `from None`."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _PASSING:
            return True
        error = error.__cause__ or error.__context__
    return False


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error of a collective, or of the store, says that the other end is gone."""
    # Excludes errors of this package and of Python's own sockets.
    is_torchs = isinstance(error, RuntimeError) and not isinstance(error, GapoError)
    return is_torchs and bool(_LOST.search(str(error)))


def _message(error: BaseException, where: str) -> str:
    if isinstance(error, GapoError):
        return f"error{where}: {error}"
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted{where}"
    if isinstance(error, OSError) and error.errno in _DISK and error.filename:
        return f"error{where}: {error.filename}: {error.strerror}"
    if is_lost_peer(error):
        said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:_MAX_QUOTED]
        return (
            f"error{where}: lost the connection to another rank, which has exited; its own output "
            f"says why, unless it was killed ({said}; in {_innermost_frames(error)})"
        )
    return f"uncaught error{where}:\n{traceback.format_exc().rstrip()}"


def _innermost_frames(error: BaseException) -> str:
    """Where an error was raised, on one line: the innermost frame first."""
    frames = reversed(traceback.extract_tb(error.__traceback__)[-_MAX_FRAMES:])
    return " < ".join(f"{one.name} {Path(one.filename).name}:{one.lineno}" for one in frames)


def _record_failure(error: BaseException, *, exit_code: int, trace: str) -> None:
    """Write the error to the attempt's folder, where the launcher looks for the earliest.

    Does nothing without a launcher. A full disk must not hide the error itself.
    """
    folder = processes.attempt_folder()
    if folder is None:
        return
    rank = int(processes.stated_rank() or 0)
    record = {
        "rank": rank,
        "host": socket.gethostname(),
        "unix_s": time.time(),
        "exit_code": exit_code,
        "error": type(error).__name__,
        "message": " ".join(str(error).split()),
        "traceback": trace,
    }
    try:
        write_atomically(folder / f"failure_{rank}.json", json.dumps(record))
    except OSError as problem:
        logger.error("cannot write failure_%d.json: %s", rank, problem)
