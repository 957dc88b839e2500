"""Arms: runs that differ in the seed alone. Labels say what one arm has and another has not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath

from gapo_megatron.config import Config
from gapo_megatron.config.methods import Method
from gapo_megatron.config.roles import role_of
from gapo_megatron.errors import DataError
from gapo_megatron.io.files import real
from gapo_megatron.ops.report.runs import Run

K = "batch.rollouts_per_prompt"
CLIP = "objective.eps_high_max"
SIZES = ("batch.rollout_prompts", "batch.minibatch_prompts")
_METHOD = "objective.method"
_ABLATED = (K, CLIP, *SIZES)
"""Settings that ablations vary; prompts go with k where a study keeps the number of rollouts."""
_SHORT = {K: "k"}


@dataclass(frozen=True)
class Arm:
    """Runs that differ in the seed alone, by seed."""

    label: str
    """The method, and where another arm has it too, what is unusual about this one."""
    runs: list[Run]
    settings: dict[str, Hashable]

    @property
    def method(self) -> Method:
        return self.runs[0].method

    @property
    def k(self) -> int:
        return self.runs[0].k

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs]


@dataclass(frozen=True)
class Comparison:
    """Arms that a report compares."""

    arms: list[Arm]
    """In the order in which their runs were named; a method's usual arm before its others."""

    @classmethod
    def of(cls, runs: Sequence[Run], *, first: str | None = None) -> Comparison:
        """Sort runs into arms.

        Args:
            runs: in the order in which they were named.
            first: label of the arm that is compared with every other; None: the first run's.

        Raises:
            DataError: two runs of an arm have the same seed, several may be the one that a branch
                left, or no curve is called `first`.
        """
        sorted_in: dict[tuple[tuple[str, Hashable], ...], list[Run]] = {}
        for run in runs:
            sorted_in.setdefault(tuple(settings_of(run).items()), []).append(run)
        settings = [dict(key) for key in sorted_in]
        of_runs = [settings_of(run) for run in runs]
        arms = [
            Arm(label, sorted(members, key=lambda run: run.seed), one)
            for label, one, members in zip(
                _labels(settings, of_runs), settings, sorted_in.values(), strict=True
            )
        ]
        for arm in arms:
            _check_seeds(arm)
        for run in runs:
            _left(run, runs)  # refused now, not in the midst of the figures
        origins = list(dict.fromkeys(_origin(one) for one in of_runs))
        arms.sort(
            key=lambda a: (origins.index(_origin(a.settings)), len(_unusual(a.settings, of_runs)))
        )
        return cls(arms) if first is None else cls(arms)._led_by(first)

    @property
    def changes(self) -> dict[str, dict[int, str]]:
        """By the label of a curve's arm, steps before which it was resumed with other settings.

        And with which. Arms that never were are left out.
        """
        return {arm.label: found for arm in self.curves if (found := _changes_of(arm.runs))}

    @property
    def curves(self) -> list[Arm]:
        """Arms in figures over training: of those that differ in k or clip alone, the usual one.

        All of them where there would be one curve; never a branch beside the arm that it left.
        """
        whole = [arm for arm in self.arms if self.parent(arm) is None]
        usual = [arms[0] for arms in _alike(whole)]
        return usual if len(usual) > 1 else whole

    @property
    def first(self) -> Arm:
        """The one that is compared with every other."""
        return self.curves[0]

    def over(self, *keys: str) -> list[list[Arm]]:
        """Arms that differ in `keys` alone, the usual one first: one list for each such one."""
        fixed = [key for key in _ABLATED if key not in keys]
        found = []
        for arms in _alike(self.arms):
            usual = arms[0].settings
            found.append([a for a in arms if all(a.settings[key] == usual[key] for key in fixed)])
        return found

    def parent(self, arm: Arm) -> Arm | None:
        """The arm with the runs that those of a branch left, seed by seed; None: no such arm."""
        runs = [run for one in self.arms for run in one.runs]
        left = [_left(run, runs) for run in arm.runs]
        return next((other for other in self.arms if all(one in other.runs for one in left)), None)

    def _led_by(self, label: str) -> Comparison:
        known = [arm.label for arm in self.curves]
        if label not in known:
            raise DataError(f"no method is called {label!r} here; known: {', '.join(known)}")
        origin = _origin(next(arm for arm in self.arms if arm.label == label).settings)
        return Comparison(
            sorted(self.arms, key=lambda a: (_origin(a.settings) != origin, a.label != label))
        )


def learned_settings(config: Config) -> dict[str, Hashable]:
    """Settings that decide what a run learns, except its seed: `section.key` -> value.

    The objective stands resolved; paths inside the run's folder count relative to it.
    """
    settings: dict[str, Hashable] = {}
    for section, values in config.model_dump(mode="json", exclude_none=True).items():
        for key, value in values.items():
            if role_of(f"{section}.{key}").arm:
                settings[f"{section}.{key}"] = _relative(value, config.run.output_dir)
    method = asdict(config.objective.resolve())
    settings["objective.method"] = method.pop("name")
    return settings | {f"objective.{key}": value for key, value in method.items()}


def settings_of(run: Run) -> dict[str, Hashable]:
    """`learned_settings`, sorted; of a branch what it left, and what was changed on the way."""
    settings = learned_settings(run.config)
    if run.branch is not None:
        settings["branch"] = json.dumps([run.branch["step"], _changes(run)], sort_keys=True)
    if run.changes:
        settings["changes"] = json.dumps(run.changes, sort_keys=True)
    return dict(sorted(settings.items()))


def _left(run: Run, runs: Sequence[Run]) -> Run | None:
    """The one of `runs` that a branch left; None: it is none, or that one is not here.

    By its folder, or by the name of that, for studies move and archives hold names alone.
    """
    if run.branch is None:
        return None
    path = Path(run.branch["run"])
    whole = real(path)
    # Branches of one run may be called as it is.
    others = [
        one
        for one in runs
        if one.seed == run.seed and (one.branch is None or one.branch["run"] != run.branch["run"])
    ]
    exact = [one for one in others if one.folder == whole]
    found = exact or [one for one in others if one.folder.name == path.name]
    if len(found) > 1:
        raise DataError(
            f"{run.folder} left {path}, which is not here, and by its name that may be "
            f"{' or '.join(str(one.folder) for one in found)}: leave out all but the right one"
        )
    return found[0] if found else None


def _changes_of(runs: Sequence[Run]) -> dict[int, str]:
    found: dict[int, dict[str, None]] = {}
    for one in (one for run in runs for one in run.changes):
        names = found.setdefault(one["step"], {})
        for key, (was, now) in one["changes"].items():
            names[f"{_part(key, now)} (was {was})"] = None
    return {step: ", ".join(names) for step, names in sorted(found.items())}


def _changes(run: Run) -> dict[str, list[Hashable]]:
    assert run.branch is not None
    changes: dict[str, list[Hashable]] = run.branch["changes"]
    return {key: pair for key, pair in changes.items() if role_of(key).arm}


def _relative(value: Hashable, output_dir: str) -> Hashable:
    if isinstance(value, str) and PurePath(value).is_relative_to(output_dir):
        return f"./{PurePath(value).relative_to(output_dir)}"
    return value


def _labels(arms: Sequence[dict[str, Hashable]], runs: Sequence[dict[str, Hashable]]) -> list[str]:
    """The method's name; beside it what is unusual: k first, and no sizes that go with it."""
    whole, short = [], []
    for settings in arms:
        keys = sorted(_unusual(settings, runs), key=lambda key: (key != K, key))
        goes_with_k = SIZES if K in keys else ()
        parts = {key: _part(key, settings.get(key)) for key in keys}
        whole.append(" ".join([_origin(settings), *parts.values()]))
        kept = [part for key, part in parts.items() if key not in goes_with_k]
        short.append(" ".join([_origin(settings), *kept]))
    return [
        one if short.count(one) == 1 else other for one, other in zip(short, whole, strict=True)
    ]


def _origin(settings: dict[str, Hashable]) -> str:
    """The method, and what was before a branch or a change: `gspo_asym to 600, gapo`."""
    method = str(settings["objective.method"])
    parts: list[str] = []
    if "branch" in settings:
        step, changes = json.loads(str(settings["branch"]))
        after = [one["changes"] for one in json.loads(str(settings.get("changes", "[]")))]
        # The branch's own method is that before its first change.
        own = next((one[_METHOD][0] for one in after if _METHOD in one), method)
        before, _ = changes.get(_METHOD, (own, own))
        parts.append(f"{before} to {step}")
    changes = json.loads(str(settings.get("changes", "[]")))
    for place, one in enumerate(changes):
        later = (other["changes"] for other in changes[place:])
        before = next((other[_METHOD][0] for other in later if _METHOD in other), method)
        others = [_part(key, pair[0]) for key, pair in one["changes"].items() if key != _METHOD]
        parts.append(f"{' '.join([before, *others])} to {one['step']}")
    return ", ".join([*parts, method])


def _part(key: str, value: Hashable) -> str:
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{_SHORT.get(key, key.rpartition('.')[2])}={shown}"


def _unusual(settings: dict[str, Hashable], runs: Sequence[dict[str, Hashable]]) -> list[str]:
    """Keys that have another value than in most runs (ties: than in the first of them).

    An objective is measured by its own method's runs, for that is what a method's name says; all
    else by the runs of all methods, or a method with another learning rate would hide it.
    """
    alike = [one for one in runs if _origin(one) == _origin(settings)]
    keys = dict.fromkeys([*settings, *(key for one in runs for key in one)])
    found = []
    for key in keys:
        others = alike if key.startswith(("objective.", "branch", "changes")) else runs
        usual = Counter(one.get(key) for one in others).most_common(1)[0][0]
        if settings.get(key) != usual:
            found.append(key)
    return found


def _alike(arms: Sequence[Arm]) -> list[list[Arm]]:
    """Arms that differ in what ablations are over alone, in order."""
    alike: dict[Hashable, list[Arm]] = {}
    for arm in arms:
        alike.setdefault(_without(arm.settings, _ABLATED), []).append(arm)
    return list(alike.values())


def _without(settings: dict[str, Hashable], keys: Sequence[str]) -> Hashable:
    return tuple(pair for pair in settings.items() if pair[0] not in keys)


def _check_seeds(arm: Arm) -> None:
    for before, run in zip(arm.runs, arm.runs[1:], strict=False):
        if before.seed == run.seed:
            raise DataError(
                f"{run.folder} and {before.folder}: two runs of {arm.label} with "
                f"run.seed = {run.seed}; of runs that differ in nothing else only one counts"
            )
