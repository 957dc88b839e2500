"""Arms: runs that differ in the seed alone. Their labels name what sets them apart."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath

from gapo_megatron.config import Config
from gapo_megatron.config.methods import Method
from gapo_megatron.config.roles import role_of
from gapo_megatron.errors import DataError
from gapo_tools.reporting.runs import Run

K = "batch.rollouts_per_prompt"
SIZES = ("batch.rollout_prompts", "batch.minibatch_prompts")
_METHOD = "objective.method"
_REPLAY = "objective.routing_replay"
_LONGEST_VALUE, _LONGEST_LABEL = 40, 80

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
            DataError: two runs of an arm have the same seed; no arm is called `first`.
        """
        of_runs = [settings_of(run) for run in runs]
        members: dict[tuple[tuple[str, Hashable], ...], list[Run]] = {}
        for run, settings in zip(runs, of_runs, strict=True):
            members.setdefault(tuple(settings.items()), []).append(run)
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
        known = [arm.label for arm in arms]
        if first is not None and first not in known:
            raise DataError(f"no method is called {first!r} here; known: {', '.join(known)}")
        return cls(sorted(arms, key=lambda arm: arm.label != (first or known[0])))

    @property
    def runs(self) -> list[Run]:
        return [run for arm in self.arms for run in arm.runs]

    @property
    def first(self) -> Arm:
        """The arm that is compared with every other."""
        return self.arms[0]


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


def _labels(arms: Sequence[Settings], runs: Sequence[Settings]) -> list[str]:
    """The method and its unusual settings, k first; different, and short enough for a legend.

    Prompts follow from k where the number of rollouts is fixed: beside k they are named if needed.
    """
    whole, short = [], []
    for settings in arms:
        keys = sorted(_unusual(settings, runs), key=lambda key: (key != K, key))
        parts = {key: _part(key, settings.get(key)) for key in keys}
        kept = [part for key, part in parts.items() if K not in keys or key not in SIZES]
        whole.append(" ".join([_origin(settings), *parts.values()]))
        short.append(" ".join([_origin(settings), *kept]))
    named = (b if short.count(a) > 1 else a for a, b in zip(short, whole, strict=True))
    labels = [_capped(label, _LONGEST_LABEL) for label in named]
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
