"""A calibration as a TOML file: what `tools/plan.py calibrate` writes, and a plan reads."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from gapo_megatron.errors import ConfigError, shown
from gapo_megatron.io.documents import open_file, read_toml
from gapo_megatron.io.files import naming, write_atomically
from gapo_megatron.ops.plan.calibration import Calibration
from gapo_megatron.ops.plan.efficiency import Efficiency
from gapo_megatron.ops.plan.hardware import Gpu

_HEAD = "# Written by tools/plan.py."
_MOST = 1e30
"""Largest value of a rate or a time; more is damage, and would lead to infinities."""
_MAY_BE_0 = ("worst", "workload", "gpu.compute_capability")


def check_calibration(path: str | Path) -> None:
    """Refuse, by a ConfigError, to overwrite a file that `write_calibration` has not written."""
    if not os.path.lexists(path):
        return
    with naming(path), open_file(path) as file:
        is_ours = file.readline(2**12).startswith(_HEAD.encode())
    if not is_ours:
        raise ConfigError(f"--calibration ({path}) is another file: name one that may be written")


def write_calibration(calibration: Calibration, path: str | Path) -> None:
    """A TOML file that `read_calibration` reads."""
    sections = {
        "gpu": dataclasses.asdict(calibration.gpu),
        "efficiency": dataclasses.asdict(calibration.efficiency),
        "worst": calibration.worst,
        "workload": {"spread": calibration.spread, "clipped_share": calibration.clipped_share},
    }
    lines = [f"{_HEAD} [worst]: largest |predicted / measured - 1| by stage."]
    for name, values in sections.items():
        # JSON's strings and numbers are TOML's.
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(v)}" for key, v in values.items())]
    write_atomically(Path(path), "\n".join(lines))


def read_calibration(path: str | Path) -> Calibration:
    """Read what `write_calibration` wrote.

    Raises:
        ConfigError: no such file, or not one of these; names what is wrong.
    """
    try:
        tree = read_toml(path)
        for name in ("gpu", "efficiency", "worst", "workload"):
            _check_table(name, tree[name])
        return Calibration(
            gpu=Gpu(**tree["gpu"]),
            efficiency=Efficiency(**tree["efficiency"]),
            worst=tree["worst"],
            **tree["workload"],
        )
    except (ConfigError, FileNotFoundError, KeyError, TypeError) as error:  # TypeError: of a key
        raise ConfigError(f"{path} is not a calibration of tools/plan.py: {error}") from None


def _check_table(name: str, table: Any) -> None:
    """Refuse values of other types than a calibration's, and rates of which nothing can be made."""
    if not isinstance(table, dict):
        raise ConfigError(f"{name} ({shown(table)}) must be a table")
    for key, value in table.items():
        field = f"{name}.{key}"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if field == "gpu.name":
            fits, rule = isinstance(value, str), "a string"
        elif field == "gpu.gpus_per_node":
            fits, rule = isinstance(value, int) and is_number and value > 0, "a positive integer"
        elif field.startswith(_MAY_BE_0):
            fits, rule = is_number and 0 <= value < _MOST, f"a number from 0 to {_MOST:g}"
        else:
            fits, rule = is_number and 0 < value < _MOST, f"a number above 0, up to {_MOST:g}"
        if not fits:
            raise ConfigError(f"{field} ({shown(value)}) must be {rule}")
