"""A study: a config with a grid of settings, or a list of settings; each combination is a run.

config = "../demo.toml"                 # relative to this file
output_dir = "runs/studies/demo"        # relative to the working directory; one folder per run
[grid]
objective.method = ["gspo", "gapo"]
run.seed = [0, 1]
                                        # several [[grid]] tables: the runs of each
[[runs]]                                # a further run, for settings that belong together
objective.eps_low = 0.002
objective.eps_high_max = 0.004
resources.nodes = 2                     # for this run only; a grid may vary resources too
[resources]                             # for each run; see `Resources`
time = "12:00:00"
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gapo_megatron.config import CONFIG_NAME, Config, load_config, load_recorded
from gapo_megatron.config.errors import place
from gapo_megatron.config.roles import Changes, changed_work
from gapo_megatron.config.types import PathText
from gapo_megatron.errors import ConfigError, shown
from gapo_megatron.io.documents import read_toml
from gapo_megatron.io.run_folder import is_finished
from gapo_megatron.run.processes import quiet_libraries

_RESOURCES = "resources."
_NAMING_RESOURCES = ("resources.nodes", "resources.tasks_per_node", "resources.partition")
"""Resources that are part of a run's name. Others may change between its jobs, and are in the name
only where it would not be unique."""
_NEVER_NAMING = ("resources.time", "resources.account")
_NO_NAMES = ("", ".", "..", "submitit")
"""Names that no run may have, because they are not a folder of its own."""
_MOST_RUNS = 10_000

_TIME = r"^[0-9]{1,7}(-[0-9]{1,7}(:[0-9]{1,7}){0,2}|(:[0-9]{1,7}){0,2})$"
_Slots = Annotated[int, Field(gt=0, lt=2**16)]
"""Number of tasks or CPUs of a node, which Slurm counts in 16 bits."""
_Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_@%+=:,./-]{1,200}$")]
"""A word that needs no quotes in a batch script; Slurm's names use only these characters."""


class _Table(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


class Resources(_Table):
    """Resources that a run asks Slurm for; SBATCH_* or the site set the fields that are unset."""

    nodes: _Slots = 1
    tasks_per_node: _Slots = 8
    """Ranks per node, one per GPU."""
    gpus_per_node: Annotated[int, Field(ge=0, lt=2**16)] | None = None
    """GPUs per node; default: as many as tasks. 0 trains on CPUs."""
    cpus_per_task: _Slots = 12
    time: Annotated[str, Field(pattern=_TIME)] = "1-00:00:00"
    """Time limit of a job: minutes, hh:mm:ss or days-hh:mm:ss. A longer run requeues."""
    exclusive: bool = True
    """Whether to ask for whole nodes, with all their memory."""
    partition: _Word | None = None
    account: _Word | None = None

    @property
    def num_gpus_per_node(self) -> int:
        return self.tasks_per_node if self.gpus_per_node is None else self.gpus_per_node

    def replaced(self, given: dict[str, Any], *, table: str = "") -> Resources:
        """Copy with the fields of `given` in place of these.

        Args:
            given: values by field.
            table: prefix of the field in errors: `resources.` for a file.

        Raises:
            ConfigError: names the field, the value and the rule.
        """
        try:
            return Resources.model_validate(self.model_dump(exclude_unset=True) | given)
        except ValidationError as error:
            explained = "\n  ".join(_explain(item, table=table) for item in error.errors())
            raise ConfigError(explained) from None


class _StudyFile(_Table):
    config: PathText
    output_dir: PathText
    grid: dict[str, Any] | list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    resources: Resources = Resources()


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a study, with its resolved config."""

    name: str
    config: Config
    resources: Resources

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run.output_dir).absolute()


@dataclass(frozen=True, slots=True)
class Study:
    """Runs that are submitted together."""

    name: str
    folder: Path
    """Absolute path of the folder with the runs' folders, or of the only run's folder."""
    runs: list[Run]

    def asking(self, given: dict[str, Any], *, default: dict[str, Any]) -> Study:
        """Copy of the study with other resources.

        Args:
            given: values by field, for every run.
            default: values by field, where neither `given` nor the study sets them.

        Raises:
            ConfigError: a field is wrong, or the study varies a field of `given`.
        """
        for field, value in given.items():
            found = {getattr(run.resources, field) for run in self.runs}
            if len(found) > 1:
                shown = ", ".join(sorted(map(str, found)))
                raise ConfigError(f"{field} ({value}): the study itself varies it ({shown})")
        runs = []
        for run in self.runs:
            said = run.resources.model_dump(exclude_unset=True)
            runs.append(replace(run, resources=run.resources.replaced(default | said | given)))
        return replace(self, runs=runs)


def read_study(path: str | Path, overrides: list[str] | None = None) -> Study:
    """Read a study; a config of a run is a study of one run.

    Args:
        path: a TOML file; a study has a top-level `config`.
        overrides: `section.key=value`, for every run.

    Raises:
        ConfigError: the study or the config of a run is wrong; names file, field or run, value
            and rule.
    """
    path, overrides = Path(path), overrides or []
    try:
        tree = read_toml(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: cannot read the file: {error.strerror}") from None
    if "config" not in tree:
        config = load_config(path, overrides)
        run = Run(Path(config.run.output_dir).name, config, Resources())
        return Study(path.stem, run.run_dir, [run])
    try:
        file = _StudyFile.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{path}: " + "\n  ".join(map(_explain, error.errors()))) from None
    return Study(
        name=path.stem,
        folder=Path(file.output_dir).absolute(),
        runs=_runs(path, file, overrides),
    )


def unfinished(study: Study) -> list[Run]:
    """The runs of a study that have not finished.

    Raises:
        ConfigError: a run was started with other settings that change its results; names run,
            setting and both values. Settings that change only how it computes (such as memory) may
            differ.
    """
    left = []
    for run in study.runs:
        finished = is_finished(run.run_dir, num_steps=run.config.run.num_steps)
        if not finished:
            left.append(run)
        has_begun = finished or (run.run_dir / CONFIG_NAME).exists()
        if has_begun and (changed := _changes(run)):
            shown = ", ".join(
                f"{key} (was {there!r}, now {here!r})" for key, (there, here) in changed.items()
            )
            raise ConfigError(
                f"run {run.name} {'has finished' if finished else 'has begun'} in {run.run_dir} "
                f"with other settings: {shown}. Move that folder away, or choose another output_dir"
            )
    return left


def _changes(run: Run) -> Changes:
    """Settings that change a run's results and differ from those it was started with."""
    before = load_recorded(run.run_dir / CONFIG_NAME)
    changed = changed_work(before.model_dump(mode="json"), run.config)
    began, given = before.checkpoint.branch_from, run.config.checkpoint.branch_from
    if began != given:
        quiet_libraries()
        from gapo_megatron.checkpoint.branch import same_branch_point  # imports torch: seconds

        if not same_branch_point(began, given):
            changed["checkpoint.branch_from"] = (began, given)
    return changed


def _runs(path: Path, file: _StudyFile, overrides: list[str]) -> list[Run]:
    grids = [
        _axes(path, one) for one in (file.grid if isinstance(file.grid, list) else [file.grid])
    ]
    number = len(file.runs) + sum(math.prod(map(len, axes.values())) for axes in grids if axes)
    if number > _MOST_RUNS:
        raise ConfigError(f"{path}: {number} runs; a study may have {_MOST_RUNS}")

    # The settings of every run, none of them given twice.
    chosen = [one for axes in grids if axes for one in _combinations(axes)]
    chosen += [_settings(one) for one in file.runs]
    if not chosen:
        raise ConfigError(
            f"{path}: a study needs [grid] or [[runs]]; to run one config, submit that config"
        )
    varied = {key for settings in chosen for key in settings}
    for key in sorted(varied | {override.partition("=")[0] for override in overrides}):
        if key == "run.output_dir":
            raise ConfigError(
                f"{path}: {key} must not be set: each run gets output_dir/<name of the run>"
            )
    for override in overrides:
        if override.partition("=")[0] in varied:
            raise ConfigError(f"override {override!r}: the study itself varies this key")

    # A name, a folder, a config and resources for each.
    runs: dict[str, Run] = {}
    for settings in chosen:
        name = _name(settings)
        if not name or name in runs:
            name = _name(settings, in_full=True)
        if name in _NO_NAMES:
            raise ConfigError(
                f"{path}: the run with {shown(settings)} would be named {name!r}, which is not a "
                "folder of its own: add a setting that gives it a name"
            )
        if name in runs:
            raise ConfigError(
                f"{path}: two runs are named {shown(name)}: their settings must differ"
            )
        asked = {
            key.removeprefix(_RESOURCES): value
            for key, value in settings.items()
            if key.startswith(_RESOURCES)
        }
        own = {key: one for key, one in settings.items() if not key.startswith(_RESOURCES)}
        own["run.output_dir"] = f"{file.output_dir}/{name}"
        try:
            config = load_config(path.parent / file.config, overrides, settings=own)
            resources = file.resources.replaced(asked, table=_RESOURCES)
        except ConfigError as error:
            raise ConfigError(f"{path}: run {name[:200]}: {error}") from None
        runs[name] = Run(name, config, resources)
    return list(runs.values())


def _axes(path: Path, grid: dict[str, Any]) -> dict[str, list[Any]]:
    axes = _settings(grid)
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{path}: grid.{key} ({shown(values)}) must be a list of values")
    return axes


def _combinations(axes: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _settings(table: dict[str, Any]) -> dict[str, Any]:
    """Values by `section.key`; TOML turns dotted keys into tables, but not quoted ones."""
    settings: dict[str, Any] = {}
    for section, value in table.items():
        if isinstance(value, dict):
            settings |= {f"{section}.{key}": one for key, one in value.items()}
        else:
            settings[section] = value
    return settings


def _name(settings: dict[str, Any], *, in_full: bool = False) -> str:
    """Name of a run, such as `gapo-seed_1`: strings stand alone, other values follow their key.

    The name depends only on the run's own settings, so that its folder stays the same when the
    study grows. The branch point (`seed_1-gspo_asym-step_600`) and resources that rarely matter
    (`seed_1-cpus_per_task_8`) are included only `in_full`: if the name is empty or taken otherwise.
    """
    parts = [
        value if isinstance(value, str) else f"{key.rpartition('.')[2]}_{value}"
        for key, value in settings.items()
        if key not in ("checkpoint.branch_from", *_NEVER_NAMING)  # the first is a path
        and (in_full or key in _NAMING_RESOURCES or not key.startswith(_RESOURCES))
    ]
    if in_full:
        place = PurePath(str(settings.get("checkpoint.branch_from", "")))
        parts += place.parts[-3::2]  # RUN/checkpoints/step_N, without the middle
    return re.sub(r"[^\w.+-]", "_", "-".join(parts))


def _explain(item: Any, *, table: str = "") -> str:
    """One validation error as text; `table` is prefixed to its location."""
    where = table + place(item["loc"])
    if item["type"] == "extra_forbidden":
        of_resources = where.startswith(_RESOURCES)
        fields = Resources.model_fields if of_resources else _StudyFile.model_fields
        return f"{where}: unknown key; known keys: {', '.join(fields)}"
    if item["type"] == "missing":
        return f"{where}: required, but missing"
    return f"{where} ({shown(item['input'])}): {item['msg'].removeprefix('Value error, ')}"
