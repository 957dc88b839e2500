"""The command line of both conversion tools. Imports no torch, so that --help is quick."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gapo_megatron.compat.library_errors import naming_transformer_engine
from gapo_megatron.errors import ConfigError, GapoError
from gapo_megatron.run.processes import quiet_libraries
from gapo_tools.arguments import positive

if TYPE_CHECKING:
    from gapo_tools.conversion.directions import Options

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}

EXIT_CODES = """\
exit codes: 0 converted; 1 damaged weights, a failed check or a full disk; 2 invalid options,
config or folder; 130 interrupted. Only exit code 0 leaves an output. docs/conversion.md describes
the checks and the layouts.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that both tools share."""
    parser.add_argument(
        "--verify",
        choices=("none", "sample", "full"),
        default="sample",
        help="how much of the output is read back and compared bit for bit: nothing, some tensors "
        "of every kind and file (default), or all; sample and full also compare the logits",
    )
    parser.add_argument(
        "--dtype",
        choices=("keep", *_DTYPES),
        default="keep",
        help="cast every tensor (default: keep the dtype of each)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the result of an earlier conversion, after all checks pass",
    )
    parser.add_argument(
        "--workers",
        type=positive,
        default=4,
        metavar="N",
        help="threads; each holds a few parameters in memory (default: 4)",
    )


def options(arguments: argparse.Namespace) -> Options:
    """Parse the options of `add_options`."""
    import torch  # seconds

    from gapo_tools.conversion.directions import Options

    name = _DTYPES.get(arguments.dtype)
    return Options(
        mode=arguments.verify,
        dtype=getattr(torch, name) if name else None,
        replace=arguments.overwrite,
        num_threads=arguments.workers,
    )


def require_folders(**folders: Path | None) -> None:
    """Raise ConfigError unless every folder to read exists; None: the option was not given."""
    for name, folder in folders.items():
        if folder is not None and not folder.is_dir():
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} ({folder}) must be a folder that exists")


def run(convert: Callable[[], None]) -> int:
    """Call `convert`; returns the exit code: 0, 1 failed, 2 usage or config, 130 interrupted."""
    quiet_libraries()
    try:
        with naming_transformer_engine():
            convert()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (GapoError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; no output was written", file=sys.stderr)
        return 130
    return 0


def to_bytes(text: str) -> int:
    """Parse a size in Hugging Face's notation: 5GB is 5 * 10^9 bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]B)", text.upper())
    number = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 5GB")
    return number
