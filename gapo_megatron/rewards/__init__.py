"""Verifiers judge responses as correct, wrong or unknown, in worker processes."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapo_megatron import user_code
from gapo_megatron.errors import ConfigError, DataError, printable, said
from gapo_megatron.rewards import reasoning_gym, verifiers
from gapo_megatron.rewards.judging import MOST_CHARACTERS, Judge, Judging, ask_judge, score
from gapo_megatron.rewards.pool import Item, Pool
from gapo_megatron.rewards.results import UNREADABLE
from gapo_megatron.rewards.sandbox import Limits, start_timeout_s
from gapo_megatron.rewards.sandbox.check import check_sandbox
from gapo_megatron.rewards.unknown import UnknownWatch, share_unknown
from gapo_megatron.rewards.verdict_metrics import Carrier, Sums, sum_metrics, verifier_metrics
from gapo_megatron.rewards.verifiers import Shape
from gapo_megatron.types import Verdict

if TYPE_CHECKING:  # a worker imports this package too, and must start fast
    from gapo_megatron.config import RewardConfig
    from gapo_megatron.config.reward_section import VerifierConfig


def timeout_s(one: VerifierConfig, config: RewardConfig) -> int:
    """Seconds to judge one response with one of the config's verifiers."""
    return one.timeout_s or config.timeout_s or {"code": 60}.get(one.kind, 10)


def check(config: RewardConfig) -> None:
    """Check, before any model is built, that the verifiers can run on this machine.

    User code is imported here, in this process, as later in every worker.

    Raises:
        ConfigError: programs cannot be isolated here; names the options. Or user code
            cannot be used; names setting, code and reason.
    """
    for setting, one in config.by_setting.items():
        if one.kind == "code":
            limits = Limits(total_s=timeout_s(one, config))
            check_sandbox(sandbox=config.sandbox, python=config.python, limits=limits)
        elif one.kind == "reasoning_gym":
            reasoning_gym.installed_version()
        elif user_code.is_code(one.kind):
            verifiers.load(one.kind, one.settings, setting=setting)


def check_answer(kind: str, answer: str, *, settings: Mapping[str, Any] = {}) -> None:
    """Refuse a reference answer that the verifier cannot read.

    Args:
        kind: verifier, as in `reward.kind`.
        answer: reference answer of a problem.
        settings: settings of a user verifier.

    Raises:
        DataError: says why the answer cannot be read.
    """
    own = user_code.is_code(kind)
    check = _loaded(kind, json.dumps(dict(settings), sort_keys=True)).check_answer
    if check is None:
        return
    try:
        with user_code.contained():
            check(answer)
    except Exception as error:
        if not own and not isinstance(error, ValueError | OSError):
            raise
        # It may quote the whole answer.
        why = said(error) if own else printable(str(error), most=300)
        raise DataError(f"the verifier of reward.kind {kind!r} cannot read it: {why}") from None


def row_columns(config: RewardConfig) -> frozenset[str] | None:
    """Columns of a row that user verifiers take; None: all.

    Raises:
        ConfigError: as `check`.
    """
    columns: frozenset[str] = frozenset()
    for setting, one in config.by_setting.items():
        taken = _shape(one, setting).columns
        if taken is None:
            return None
        columns |= taken
    return columns


def _shape(one: VerifierConfig, setting: str) -> Shape:
    """How a verifier is called."""
    if not user_code.is_code(one.kind):
        return Shape(frozenset())
    return verifiers.load(one.kind, one.settings, setting=setting).shape


def check_row(kind: str, row: Mapping[str, Any], *, settings: Mapping[str, Any] = {}) -> None:
    """Refuse a row without a column that a user verifier cannot do without.

    Args:
        kind: verifier, as in `reward.kind`.
        row: the columns that it would get.
        settings: settings of a user verifier.

    Raises:
        DataError: names column and verifier.
    """
    if user_code.is_code(kind):
        required = _loaded(kind, json.dumps(dict(settings), sort_keys=True)).required
        if missing := sorted(required - row.keys()):
            raise DataError(
                f"column {missing[0]!r} is missing, which the verifier {kind!r} requires; a "
                f"parameter with a default ({missing[0]}=None) may be absent"
            )


@functools.cache  # a data set has many rows
def _loaded(kind: str, settings: str) -> verifiers.Verifier:
    code = kind if user_code.is_code(kind) else f"{__name__}.{kind}"
    return verifiers.load(code, json.loads(settings), setting="reward.kind")


def check_excerpt(kind: str, head: bytes, tail: bytes) -> None:
    """Check the two ends of an answer in a separate file, which may be too large to read.

    Args:
        kind: verifier, as in `reward.kind`.
        head: first bytes of the answer.
        tail: last bytes of the answer.

    Raises:
        DataError: the ends do not fit the kind, or its verifier reads no separate files.
    """
    if kind != "code":
        raise DataError(f"reward.kind {kind!r} reads answers from the row only, not from a file")
    from gapo_megatron.rewards.code import check_excerpt as check

    try:
        check(head, tail)
    except (ValueError, OSError) as error:
        raise DataError(f"the verifier of reward.kind {kind!r} cannot read it: {error}") from None


def try_verifiers(config: RewardConfig, items: Sequence[tuple[Any, ...]]) -> list[Verdict]:
    """Judge a few responses as a run does, in one worker process that ends with the call.

    For a check before a run: that verifiers can be called, what they say of a reference answer or
    of an empty response. It has the time limits of a run and writes no file.

    Args:
        config: section `reward`.
        items: (response, answer, name of the verifier, other columns of the row) of each; the last
            two may be left out: `(p.answer, p.answer, p.verifier, p.row)` of a `Prompt`.

    Returns:
        A verdict on each, in order; an unknown one has the reason.

    Raises:
        ConfigError: a verifier returned what is no verdict (a generator, a text, NaN, a list that
            is too short); names setting, code and type.
        RewardError: the worker cannot start.
    """
    with start_pool(config, num_workers=1) as pool:
        verdicts = pool.judge(items)
    for item, verdict in zip(items, verdicts, strict=True):
        name = item[2] if len(item) > 2 else ""
        if UNREADABLE in verdict.reason:
            usual = "reward.components" if config.components else "reward.kind"
            setting = f"reward.verifiers.{name}" if name else usual
            raise ConfigError(
                f"{setting}: {verdict.reason}; a verifier is a function (no yield) that returns a "
                "bool, a number, a dict with a score, a Verdict or None"
            )
    return verdicts


def start_pool(config: RewardConfig, *, num_workers: int, output: Path | None = None) -> Pool:
    """Start the worker processes of the verifiers without waiting until they have imported them.

    Args:
        config: verifiers and their options.
        num_workers: processes of this rank; `config.num_workers` is ignored.
        output: see `Pool`.
    """
    named: dict[str, VerifierConfig] = {**config.verifiers, **config.components}
    main: tuple[str, float, Mapping[str, Any]] = ("reward.components", 0.0, {})
    shapes = {name: _shape(one, f"reward: {name!r}") for name, one in named.items()}
    if not config.components:
        main, shapes[""] = _for_workers(config, config), _shape(config, "reward.kind")
    verifier, limit_s, options = main
    return Pool(
        verifier,
        num_workers=num_workers,
        timeout_s=limit_s,
        options=options,
        others={name: _for_workers(one, config) for name, one in named.items()},
        correct_above=config.correct_above,
        weights={name: one.weight for name, one in config.components.items()},
        shapes=shapes,
        output=output,
    )


def _for_workers(one: VerifierConfig, config: RewardConfig) -> tuple[str, float, Mapping[str, Any]]:
    """A verifier's name for `verifiers.load`, its time limit, and its options."""
    limit_s: float = timeout_s(one, config)
    if user_code.is_code(one.kind):
        return one.kind, limit_s, one.settings
    options: dict[str, Any] = {}
    if one.kind == "code":
        options = {
            "limits": {"total_s": limit_s},
            "sandbox": config.sandbox,
            "python": config.python,
        }
        limit_s += start_timeout_s(config.sandbox)
    return f"{__name__}.{one.kind}", limit_s, options


__all__ = [
    "MOST_CHARACTERS",
    "Carrier",
    "Item",
    "Judge",
    "Judging",
    "Pool",
    "Sums",
    "UnknownWatch",
    "ask_judge",
    "check",
    "check_answer",
    "check_excerpt",
    "check_row",
    "row_columns",
    "score",
    "share_unknown",
    "start_pool",
    "sum_metrics",
    "timeout_s",
    "try_verifiers",
    "verifier_metrics",
]
