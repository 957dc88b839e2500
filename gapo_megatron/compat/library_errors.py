"""Whatever a library raises over a file of somebody else's, or half installed, as our error.

The standard library alone: `fail_fast` imports it.
"""

from __future__ import annotations

import contextlib
import traceback
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


@contextlib.contextmanager
def naming_transformer_engine() -> Iterator[None]:
    """Around a program: an installed Transformer Engine that cannot be imported is named.

    Megatron-core imports it wherever it is installed, and takes no more than an ImportError of the
    package itself for its absence. A build that failed half-way leaves packages that raise others.

    Raises:
        ConfigError: in place of such an exception, whose kind and message it has.
    """
    # Uses: what `import transformer_engine.pytorch` and Megatron-core's question for its version
    #     raise: FileNotFoundError (no compiled PyTorch side), ImportError (one for another torch),
    #     RuntimeError (no core, no cuDNN), OSError (a core that does not load), AssertionError
    #     (parts of several versions), PackageNotFoundError (the core alone)
    # Versions: transformer-engine 2.20.2; megatron-core 0.16.1, 0.19.2
    # Upstream: none found
    try:
        yield
    except (AssertionError, ImportError, OSError, RuntimeError) as error:
        if not _is_of_transformer_engine(error):
            raise
        raise ConfigError(
            f"transformer_engine: importing it fails: {type(error).__name__}: {error}. Where it is "
            "installed it must load beside this torch: compile it as tools/setup_gpu_env.sh does, "
            "or uninstall every package whose name begins with transformer-engine"
        ) from error


def _is_of_transformer_engine(error: Exception) -> bool:
    """Whether its import raised this, or the question for it or its version."""
    absent = error.name or "" if isinstance(error, ImportError) else ""
    if absent.partition(".")[0] in ("transformer_engine", "transformer-engine"):
        return True
    modules = (
        frame.f_globals["__name__"]
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name == "<module>"
    )
    return any(name.partition(".")[0] == "transformer_engine" for name in modules)
