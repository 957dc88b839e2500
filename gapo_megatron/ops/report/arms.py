"""Arms: runs that differ in the seed alone. Their labels name what sets them apart."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath

from gapo_megatron.config import Config
from gapo_megatron.config.methods import Method
from gapo_megatron.config.roles import is_input, role_of
from gapo_megatron.errors import DataError
from gapo_megatron.io.files import file_sha256, real
from gapo_megatron.ops.report.runs import Run

K = "batch.rollouts_per_prompt"
CLIP = "objective.eps_high_max"
SIZES = ("batch.rollout_prompts", "batch.minibatch_prompts")
_METHOD = "objective.method"
_REPLAY = "objective.routing_replay"
_ABLATED = (K, CLIP, *SIZES)
"""Settings that ablations vary; prompts change with k where the number of rollouts is fixed."""
_LONGEST_VALUE, _LONGEST_LABEL = 40, 80
_MOST_COMPARED = 2**30
"""Bytes of files that are compared; larger ones are the same if their paths are."""

Settings = dict[str, Hashable]
"""`section.key` -> value."""


@dataclass(frozen=True)
class Arm:
    """Runs that differ in the seed alone, in seed order."""

    label: str
    """The method, and this arm's unusual settings where another arm has the same method."""
    runs: list[Run]
    settings: Settings

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
    """In the order in which their runs were given; a method's usual arm before its others."""

    @classmethod
    def of(cls, runs: Sequence[Run], *, first: str | None = None) -> Comparison:
        """Sort runs into arms.

        Args:
            runs: in the order in which they were given.
            first: label of the arm that is compared with every other; None: the first run's.

        Raises:
            DataError: two runs of an arm have the same seed; more than one run may be the one that
                a branch left; no curve is called `first`.
        """
        of_runs = _by_content([settings_of(run) for run in runs])
        members: dict[tuple[tuple[str, Hashable], ...], list[Run]] = {}
        for run, settings in zip(runs, of_runs, strict=True):
            members.setdefault(tuple(settings.items()), []).append(run)
            _left(run, runs)  # refuse an ambiguous branch before any figure is drawn
        labels = _labels([dict(key) for key in members], of_runs)
        arms = [
            Arm(label, sorted(alike, key=lambda run: run.seed), dict(key))
            for label, (key, alike) in zip(labels, members.items(), strict=True)
        ]
        for arm in arms:
            for before, run in zip(arm.runs, arm.runs[1:], strict=False):
                if before.seed == run.seed:
                    raise DataError(
                        f"{run.folder} and {before.folder}: two runs of {arm.label} with "
                        f"run.seed = {run.seed} and the same settings; leave out one of them"
                    )
        origins = list(dict.fromkeys(map(_origin, of_runs)))
        arms.sort(
            key=lambda a: (origins.index(_origin(a.settings)), len(_unusual(a.settings, of_runs)))
        )
        found = cls(arms)
        if first is None:
            return found
        known = [arm.label for arm in found.curves]
        if first not in known:
            raise DataError(f"no method is called {first!r} here; known: {', '.join(known)}")
        origin = _origin(next(arm for arm in arms if arm.label == first).settings)
        return cls(sorted(arms, key=lambda a: (_origin(a.settings) != origin, a.label != first)))

    @property
    def changes(self) -> dict[str, dict[int, str]]:
        """Arms of the curves that were resumed with other settings.

        Arm's label -> first step with the new settings -> their names and values.
        """
        found: dict[str, dict[int, str]] = {}
        for arm in self.curves:
            by_step: dict[int, dict[str, None]] = {}
            for one in (one for run in arm.runs for one in run.changes):
                names = by_step.setdefault(one["step"], {})
                for key, (was, now) in one["changes"].items():
                    names[f"{_part(key, now)} (was {was})"] = None
            if by_step:
                found[arm.label] = {step: ", ".join(by_step[step]) for step in sorted(by_step)}
        return found

    @property
    def curves(self) -> list[Arm]:
        """Arms of the figures over training: the usual one of those that differ in k or clip alone.

        All of them if that leaves a single curve; never a branch whose parent arm is here.
        """
        whole = [arm for arm in self.arms if self.parent(arm) is None]
        usual = [arms[0] for arms in _alike(whole)]
        return usual if len(usual) > 1 else whole

    @property
    def first(self) -> Arm:
        """The arm that is compared with every other."""
        return self.curves[0]

    def over(self, *keys: str) -> list[list[Arm]]:
        """Groups of arms that differ in `keys` alone, the usual arm first."""
        fixed = [key for key in _ABLATED if key not in keys]
        found = []
        for arms in _alike(self.arms):
            usual = arms[0].settings
            found.append([a for a in arms if all(a.settings[key] == usual[key] for key in fixed)])
        return found

    def parent(self, arm: Arm) -> Arm | None:
        """The arm whose runs a branch left, seed by seed; None: no branch, or it is not here."""
        runs = [run for one in self.arms for run in one.runs]
        left = [_left(run, runs) for run in arm.runs]
        return next((other for other in self.arms if all(one in other.runs for one in left)), None)


def learned_settings(config: Config) -> Settings:
    """Settings that decide what a run learns, except its seed.

    The objective is resolved; paths inside the run's folder are relative to it.
    """
    settings: Settings = {}
    for section, values in config.model_dump(mode="json", exclude_none=True).items():
        for key, value in values.items():
            if not role_of(f"{section}.{key}").arm:
                continue
            if isinstance(value, str) and PurePath(value).is_relative_to(config.run.output_dir):
                value = f"./{PurePath(value).relative_to(config.run.output_dir)}"
            if isinstance(value, list | dict):  # settings are keys, too
                value = json.dumps(value)
            settings[f"{section}.{key}"] = value
    settings.pop("objective.own_method", None)  # its values follow
    method = asdict(config.objective.resolve())
    settings[_METHOD] = method.pop("name")
    unset = config.objective.model_copy(update={"routing_replay": None})
    if settings.get(_REPLAY) == unset.replayed_routes:
        del settings[_REPLAY]  # a default that is spelled out
    return settings | {f"objective.{key}": value for key, value in method.items()}


def settings_of(run: Run) -> Settings:
    """`learned_settings`, sorted, with its branch point and changes when resumed as JSON."""
    settings = learned_settings(run.config)
    if run.branch is not None:
        changes = {key: pair for key, pair in run.branch["changes"].items() if role_of(key).arm}
        settings["branch"] = json.dumps([run.branch["step"], changes], sort_keys=True)
    if run.changes:
        settings["changes"] = json.dumps(run.changes, sort_keys=True)
    return dict(sorted(settings.items()))


def _left(run: Run, runs: Sequence[Run]) -> Run | None:
    """The one of `runs` that a branch left; None: no branch, or it is not among them.

    Found by its folder, else by the folder's name: studies move, and archives hold names alone.
    """
    if run.branch is None:
        return None
    path = Path(run.branch["run"])
    whole = real(path)
    # Other branches of the same run may have its name.
    others = [
        one
        for one in runs
        if one.seed == run.seed and (one.branch is None or one.branch["run"] != run.branch["run"])
    ]
    exact = [one for one in others if one.folder == whole]
    found = exact or [one for one in others if one.folder.name == path.name]
    if len(found) > 1:
        raise DataError(
            f"{run.folder} branched from {path}, which is not here; "
            f"{' and '.join(str(one.folder) for one in found)} have its name: leave out all but "
            "the right one"
        )
    return found[0] if found else None


def _by_content(of_runs: Sequence[Settings]) -> list[Settings]:
    """The settings with one path for all files, or model folders, that hold the same."""
    found = [dict(settings) for settings in of_runs]
    for key in {key for settings in found for key in settings if is_input(key)}:
        first: dict[Hashable, Hashable] = {}
        paths = dict.fromkeys(settings[key] for settings in found if key in settings)
        if len(paths) > 1:
            paths = {path: first.setdefault(_content(str(path)), path) for path in paths}
            for settings in found:
                if key in settings:
                    settings[key] = paths[settings[key]]
    return found


def _content(path: str) -> Hashable:
    """Digests of a file, or of a folder's model; the path where they cannot be had."""
    root = Path(path)
    files = [root]
    if root.is_dir():
        files = sorted([root / "config.json", *root.glob("*.safetensors")])
    try:
        if sum(file.stat().st_size for file in files) > _MOST_COMPARED:
            return path
        return tuple(file_sha256(file) for file in files)
    except OSError:
        return path


def _labels(arms: Sequence[Settings], runs: Sequence[Settings]) -> list[str]:
    """The method and its unusual settings, k first; batch sizes beside k only if needed.

    Different, and short enough for a legend.
    """
    whole, short = [], []
    for settings in arms:
        keys = sorted(_unusual(settings, runs), key=lambda key: (key != K, key))
        goes_with_k = SIZES if K in keys else ()
        parts = {key: _part(key, settings.get(key)) for key in keys}
        whole.append(" ".join([_origin(settings), *parts.values()]))
        kept = [part for key, part in parts.items() if key not in goes_with_k]
        short.append(" ".join([_origin(settings), *kept]))
    labels = [
        one if short.count(one) == 1 else other for one, other in zip(short, whole, strict=True)
    ]
    labels = [_capped(label, _LONGEST_LABEL) for label in labels]
    numbers = [labels[:place].count(label) + 1 for place, label in enumerate(labels)]
    return [f"{one} ({n})" if n > 1 else one for one, n in zip(labels, numbers, strict=True)]


def _capped(text: str, longest: int) -> str:
    """The text, without its middle if it is too long."""
    half = (longest - 3) // 2
    return text if len(text) <= longest else f"{text[:half]}...{text[-half:]}"


def _origin(settings: Settings) -> str:
    """The method, and what came before a branch or a change: `gspo_asym to 600, gapo`."""
    method = str(settings[_METHOD])
    changes = json.loads(str(settings.get("changes", "[]")))
    parts: list[str] = []

    def before(place: int) -> str:
        """The method before change number `place`."""
        later = (one["changes"] for one in changes[place:])
        return next((str(one[_METHOD][0]) for one in later if _METHOD in one), method)

    if "branch" in settings:
        step, branched = json.loads(str(settings["branch"]))
        parts.append(f"{branched.get(_METHOD, [before(0)])[0]} to {step}")
    for place, one in enumerate(changes):
        others = [_part(key, pair[0]) for key, pair in one["changes"].items() if key != _METHOD]
        parts.append(f"{' '.join([before(place), *others])} to {one['step']}")
    return ", ".join([*parts, method])


def _part(key: str, value: Hashable) -> str:
    shown = f"{value:g}" if isinstance(value, float) else _capped(str(value), _LONGEST_VALUE)
    return f"{'k' if key == K else key.rpartition('.')[2]}={shown}"


def _unusual(settings: Settings, runs: Sequence[Settings]) -> list[str]:
    """Keys with another value than in most runs (ties: than in the first of them).

    Settings of the objective are compared with runs of the same method, whose name stands for
    them; all others with all runs, so that a method with another learning rate says so.
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
    """Groups of arms that differ in ablated settings alone, in order."""
    alike: dict[Hashable, list[Arm]] = {}
    for arm in arms:
        rest = tuple(pair for pair in arm.settings.items() if pair[0] not in _ABLATED)
        alike.setdefault(rest, []).append(arm)
    return list(alike.values())
