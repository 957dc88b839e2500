"""Turn exceptions of libraries, over users' files or broken installations, into ConfigError.

Standard library only, because `fail_fast` imports it.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

from gapo_megatron.errors import ConfigError, GapoError, said


@contextlib.contextmanager
def as_config_error(where: str) -> Iterator[None]:
    """Turn any exception of a library that reads a file within the block into a ConfigError.

    Args:
        where: names file or folder and what is read; messages begin with it.

    Raises:
        ConfigError: in place of the library's exception, with its type and message; a MemoryError
            is passed on.
    """
    try:
        yield
    except (GapoError, MemoryError):
        raise
    except BaseException as error:
        # No list of types is complete: transformers checks little, `tokenizers` raises plain
        # `Exception`, and Rust code a `PanicException`, which is not an `Exception`.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # Ctrl-C
        raise ConfigError(f"{where}: {said(error)}") from error


@contextlib.contextmanager
def naming_transformer_engine() -> Iterator[None]:
    """Name Transformer Engine in errors of its import within the block.

    Megatron-core imports it if it is installed, and only accepts an ImportError of the package
    itself as its absence. A partly failed build leaves packages that raise others.

    Raises:
        ConfigError: in place of such an exception, with its type and message.
    """
    # Uses: what `import transformer_engine.pytorch` and Megatron-core's question for its version
    #     raise: FileNotFoundError (no compiled PyTorch side), ImportError (one for another torch),
    #     RuntimeError (no core, no cuDNN), OSError (a core that does not load), AssertionError
    #     (parts of several versions), AttributeError (the core alone, a folder without a version)
    # Versions: transformer-engine 2.20.2; megatron-core 0.19.2
    # Upstream: none found
    try:
        yield
    except (AssertionError, AttributeError, ImportError, OSError, RuntimeError) as error:
        if not _is_of_transformer_engine(error):
            raise
        raise ConfigError(
            f"transformer_engine: importing it fails: {said(error)}. Build it "
            "for this torch as tools/setup_gpu_env.sh does, or uninstall every package whose name "
            "begins with transformer-engine"
        ) from error


def _is_of_transformer_engine(error: Exception) -> bool:
    """Whether its import, or a look-up of the package or its version, raised this."""
    absent = error.name or "" if isinstance(error, ImportError) else ""
    asked = getattr(error.obj, "__name__", "") if isinstance(error, AttributeError) else ""
    if "transformer_engine" in (absent.partition(".")[0], asked):
        return True
    modules = (
        frame.f_globals["__name__"]
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name == "<module>"
    )
    return any(name.partition(".")[0] == "transformer_engine" for name in modules)
