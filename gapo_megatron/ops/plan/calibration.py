"""Efficiencies fitted to measured steps: the fit, its tables, and its TOML file.

The fit uses the planner's own model: it varies the efficiencies of `step_time` until the predicted
stages match the measured ones, by least squares on the logarithms. Efficiencies that the
measurements do not determine (such as a link's, on one rank) keep their defaults.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from scipy.optimize import least_squares

from gapo_megatron.errors import ConfigError, shown
from gapo_megatron.io.documents import open_file, read_toml
from gapo_megatron.io.files import naming, write_atomically
from gapo_megatron.ops.plan.hardware import SHARES, Efficiency, Gpu
from gapo_megatron.ops.plan.observation import STAGES, Observation, seconds
from gapo_megatron.ops.plan.workload import DEFAULT_SPREAD

_PRIOR_WEIGHT = 0.02
"""Weight of a factor e between a parameter and its default, relative to a factor e between a
stage's prediction and its measurement."""
_LEAST_S = 1e-9
_MOVED = 0.01
_HEAD = "# Written by tools/plan.py."
_MOST = 1e30
"""Largest value of a rate or a time; anything larger is damage and would give infinities."""
_MAY_BE_0 = ("worst", "workload", "gpu.compute_capability")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fitted efficiencies, the device they are for, and how well they fit."""

    gpu: Gpu
    efficiency: Efficiency
    worst: dict[str, float]
    """Largest |predicted / measured - 1| by stage, over the fitted observations."""
    spread: float = DEFAULT_SPREAD
    clipped_share: float = 0.0
    """Mean over the observations' workloads; a plan without a calibration assumes one."""

    @property
    def measured(self) -> list[str]:
        """Efficiencies that the fit has moved by more than 1 %; the others are assumed."""
        default = Efficiency()
        return [
            field.name
            for field in dataclasses.fields(Efficiency)
            if abs(math.log(getattr(self.efficiency, field.name) / getattr(default, field.name)))
            > _MOVED
        ]


def fit(observations: Sequence[Observation], gpu: Gpu) -> Calibration:
    """Fit efficiencies so that the predicted stages match the measured ones.

    Minimises, over the logarithms x of all parameters,

        sum (log predicted_stage(x) - log measured_stage)^2 + 0.02^2 sum (x - x_default)^2

    so that every parameter stays positive, errors count relative to a stage's time, and the prior
    decides only what the measurements leave open.

    Args:
        observations: at least one; stages of 0 s are left out.
        gpu: the device that was measured.

    Raises:
        ConfigError: a run cannot be predicted, or one of its stages cannot run on that device.
    """
    # Every stage must be predictable at the start of the fit.
    start = Efficiency()
    for one in observations:
        predicted = one.predict(gpu, start)
        for stage in STAGES:
            if not math.isfinite(seconds(predicted, stage)):
                raise ConfigError(
                    f"{one.name}: {stage.replace('_', ' ')} cannot run on {gpu.name} (the KV cache "
                    "does not hold one sequence?): was the run on another device?"
                )

    # The fit, over logarithms; shares are at most 1.
    names = [field.name for field in dataclasses.fields(Efficiency)]
    default = np.log([getattr(start, name) for name in names])
    upper = np.array([0.0 if name in SHARES else math.log(1e3) for name in names])
    lower = np.minimum(default, upper) - math.log(1e4)

    def efficiency_at(point: np.ndarray) -> Efficiency:
        return Efficiency(**{name: math.exp(x) for name, x in zip(names, point, strict=True)})

    def residuals(point: np.ndarray) -> np.ndarray:
        efficiency = efficiency_at(np.minimum(point, upper))
        misses = []
        for one in observations:
            predicted = one.predict(gpu, efficiency)
            for stage in STAGES:
                if (measured := one.seconds(stage)) > 0:
                    misses.append(math.log(max(seconds(predicted, stage), _LEAST_S) / measured))
        return np.concatenate([misses, _PRIOR_WEIGHT * (point - default)])

    inside = np.clip(default, lower + 1e-6, upper - 1e-6)
    found = least_squares(residuals, inside, bounds=(lower, upper), x_scale="jac")
    fitted = efficiency_at(np.minimum(found.x, upper))
    workloads = [one.workload for one in observations]
    return Calibration(
        gpu,
        fitted,
        worst_misses(observations, gpu, fitted),
        spread=statistics.fmean(workload.spread for workload in workloads),
        clipped_share=statistics.fmean(workload.clipped_share for workload in workloads),
    )


def worst_misses(
    observations: Sequence[Observation], gpu: Gpu, efficiency: Efficiency
) -> dict[str, float]:
    """Largest |predicted / measured - 1| by stage, and for `total`."""
    worst: dict[str, float] = {}
    for one in observations:
        predicted = one.predict(gpu, efficiency)
        for stage in (*STAGES, "total"):
            if (measured := one.seconds(stage)) > 0:
                miss = abs(seconds(predicted, stage) / measured - 1)
                worst[stage] = max(worst.get(stage, 0.0), miss)
    return worst


def comparison_table(
    observations: Sequence[tuple[Observation, bool]], *, gpu: Gpu, efficiency: Efficiency
) -> Table:
    """Predicted and measured seconds by stage, and whether the run was part of the fit.

    Args:
        observations: (observation, whether it was fitted).
        gpu: device to predict for.
        efficiency: efficiencies to predict with.
    """
    table = Table(title="Predicted and measured times", title_justify="left")
    for heading in ("run", "fitted", "stage", "measured, s", "predicted, s", "ratio"):
        table.add_column(heading, justify="left" if heading in ("run", "stage") else "right")
    for one, is_fitted in observations:
        predicted = one.predict(gpu, efficiency)
        for stage in (*STAGES, "total"):
            measured, value = one.seconds(stage), seconds(predicted, stage)
            table.add_row(
                one.name if stage == STAGES[0] else "",
                ("yes" if is_fitted else "no") if stage == STAGES[0] else "",
                stage.replace("_", " "),
                f"{measured:.3g}",
                f"{value:.3g}",
                f"{value / measured:.2f}" if measured > 0 else "-",
            )
        table.add_section()
    return table


def times_rest_on(calibration: Calibration) -> str:
    """Which efficiencies were measured and which are assumed, as text for people."""
    if not calibration.worst:
        return "Efficiencies are assumed, not measured (tools/plan.py calibrate measures them)."
    worst = ", ".join(f"{stage} {miss:.0%}" for stage, miss in calibration.worst.items())
    names = [field.name for field in dataclasses.fields(Efficiency)]
    measured = calibration.measured
    assumed = [name for name in names if name not in measured]
    return (
        f"Efficiencies measured: {', '.join(measured) or 'none'}; assumed: "
        f"{', '.join(assumed) or 'none'}. Largest error on the fitted runs: {worst}."
    )


def efficiencies_table(calibration: Calibration) -> Table:
    """All efficiencies, and whether each is measured or assumed."""
    table = Table(title="Efficiencies", title_justify="left")
    for heading in ("name", "value", "default", ""):
        table.add_column(heading, justify="right" if heading in ("value", "default") else "left")
    measured = calibration.measured
    for name, default in dataclasses.asdict(Efficiency()).items():
        value = getattr(calibration.efficiency, name)
        basis = "measured" if name in measured else "assumed"
        table.add_row(name, f"{value:.3g}", f"{default:.3g}", basis)
    return table


def check_written(path: str | Path, mark: str, *, option: str) -> None:
    """Raise ConfigError if `path` is a file that tools/plan.py has not written.

    Args:
        path: the file to write.
        mark: text of the first line of a file that may be replaced.
        option: option that names the file, for the error.
    """
    if not os.path.lexists(path):
        return
    with naming(path), open_file(path) as file:
        is_ours = mark.encode() in file.readline(2**12)
    if not is_ours:
        raise ConfigError(
            f"{option} ({path}) exists and was not written by tools/plan.py: choose another name"
        )


def check_calibration(path: str | Path) -> None:
    """Raise ConfigError if `path` is a file that `write_calibration` has not written."""
    check_written(path, _HEAD, option="--calibration")


def write_calibration(calibration: Calibration, path: str | Path) -> None:
    """Write a calibration as TOML, for `read_calibration`."""
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
    """Read a file of `write_calibration`.

    Raises:
        ConfigError: there is no such file, or it is no calibration; names what is wrong.
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
    except (ConfigError, FileNotFoundError, KeyError, TypeError) as error:  # TypeError: unknown key
        raise ConfigError(f"{path} is not a calibration of tools/plan.py: {error}") from None


def _check_table(name: str, table: Any) -> None:
    """Refuse values of the wrong type and rates out of range."""
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
