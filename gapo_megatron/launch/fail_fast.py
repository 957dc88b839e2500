"""The outermost frame of a program: what an error becomes. The standard library alone."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from gapo_megatron.errors import ConfigError, FencedError, GapoError
from gapo_megatron.launch.run_folder import write_atomically

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def fail_fast() -> Iterator[None]:
    """Wrap a program's `main`: an error ends this process at once, without any collective.

    Peers may be waiting in a collective this rank will never join; tearing the process group down
    would hang here too. The launcher sees the exit code and ends the peers.

    Exit codes: 2 for a ConfigError, 3 for a FencedError, 1 for any other error, 130 for Ctrl-C.
    Errors a user can act on print one message; anything else prints its traceback. The launcher
    finds the error in the attempt's folder, where the earliest of all ranks explains the others.
    """
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:  # the boundary of the program: nothing is above this frame
        exit_code = _exit_code(error)
        _record_failure(error, exit_code=exit_code, trace=traceback.format_exc())
        rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID")
        where = f" (rank {rank})" if rank else ""
        if isinstance(error, GapoError):
            print(f"error{where}: {error}", file=sys.stderr)
        elif isinstance(error, KeyboardInterrupt):
            print(f"interrupted{where}", file=sys.stderr)
        else:
            print(f"uncaught error{where}:", file=sys.stderr)
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, FencedError):
        return 3
    return 2 if isinstance(error, ConfigError) else 1


def _record_failure(error: BaseException, *, exit_code: int, trace: str) -> None:
    """Leave what went wrong in the attempt's folder, where the launcher looks for the first one.

    Does nothing without a launcher. A disk that takes nothing more must not hide the error itself.
    """
    folder = os.environ.get("GAPO_ATTEMPT_DIR")
    if not folder:
        return
    rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
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
        write_atomically(Path(folder) / f"failure_{rank}.json", json.dumps(record))
    except OSError as problem:
        logger.error("cannot write failure_%d.json: %s", rank, problem)
