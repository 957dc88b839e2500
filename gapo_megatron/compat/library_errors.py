"""Whatever a library raises over a file that somebody else wrote, as one of our errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gapo_megatron.errors import ConfigError, GapoError


@contextlib.contextmanager
def as_config_error(where: str) -> Iterator[None]:
    """Around a library's reading of a file: what it raises there is about the file.

    Args:
        where: names file or folder, and what is read from it; messages begin with it.

    Raises:
        ConfigError: in place of the library's exception, whose kind and message it has; memory that
            runs out is not the file's fault.
    """
    try:
        yield
    except (GapoError, MemoryError):
        raise
    except BaseException as error:
        # transformers checks little of what it reads, `tokenizers` raises plain `Exception`, and
        # Rust code that gives up a `PanicException`, which is none: no list of kinds is whole.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # Ctrl-C
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
