"""Verifiers judge responses as correct, wrong or unknown, in worker processes."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapo_megatron import user_code
from gapo_megatron.errors import ConfigError, DataError, printable, said, shown
from gapo_megatron.rewards import verifiers
from gapo_megatron.rewards.pool import Pool
from gapo_megatron.rewards.sandbox import Limits, start_timeout_s
from gapo_megatron.rewards.sandbox.check import check_sandbox
from gapo_megatron.rewards.unknown import UnknownWatch, share_unknown
from gapo_megatron.types import Episode, Outcome, Prompt, Verdict

if TYPE_CHECKING:  # a worker imports this package too, and must start fast
    from gapo_megatron.config import RewardConfig
    from gapo_megatron.config.schema import VerifierConfig


MOST_CHARACTERS = 300
"""Longest error message in the reason of a verdict."""


class _AbortedError(Exception):
    pass


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
    for name, one in config.by_name.items():
        if one.kind == "code":
            limits = Limits(total_s=timeout_s(one, config))
            check_sandbox(sandbox=config.sandbox, python=config.python, limits=limits)
        elif user_code.is_code(one.kind):
            setting = f"reward.verifiers.{name}" if name else "reward.kind"
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
    for one in config.by_name.values():
        taken = _columns(one)
        if taken is None:
            return None
        columns |= taken
    return columns


def _columns(one: VerifierConfig) -> frozenset[str] | None:
    """Columns of a row that a verifier takes; None: all."""
    if not user_code.is_code(one.kind):
        return frozenset()
    return verifiers.load(one.kind, one.settings, setting="reward.kind").columns


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
        ConfigError: a verifier returned what is no verdict (a coroutine, a generator, a text, NaN);
            names setting, code and type.
        RewardError: the worker cannot start.
    """
    with start_pool(config, num_workers=1) as pool:
        verdicts = pool.judge(items)
    for item, verdict in zip(items, verdicts, strict=True):
        name = item[2] if len(item) > 2 else ""
        if verifiers.UNREADABLE in verdict.reason:
            setting = f"reward.verifiers.{name}" if name else "reward.kind"
            raise ConfigError(
                f"{setting}: {verdict.reason}; a verifier is a plain function (no async def, no "
                "yield) that returns a bool, a number, a Verdict or None"
            )
    return verdicts


def start_pool(config: RewardConfig, *, num_workers: int, output: Path | None = None) -> Pool:
    """Start the worker processes of the verifiers without waiting until they have imported them.

    Args:
        config: verifiers and their options.
        num_workers: processes of this rank; `config.num_workers` is ignored.
        output: see `Pool`.
    """
    by_name = {name: _for_workers(one, config) for name, one in config.by_name.items()}
    columns = {name: _columns(one) for name, one in config.by_name.items()}
    verifier, limit_s, options = by_name.pop("")
    return Pool(
        verifier,
        num_workers=num_workers,
        timeout_s=limit_s,
        options=options,
        others=by_name,
        correct_above=config.correct_above,
        columns=columns,
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


Judge = Callable[[Episode], tuple[str, str]]
"""What the verifier gets for an episode: (response, answer), as from `Environment.judge`."""


class Judging:
    """Judges responses while others are still generated; `score` waits for the verdicts."""

    def __init__(self, pool: Pool, prompts: Sequence[Prompt], *, judge: Judge) -> None:
        """Start without responses.

        Args:
            pool: workers with the verifier, for the sole use of this object until `score` returns.
            prompts: problems whose responses this rank judges.
            judge: maps an episode to what the verifier gets; called in this process.
        """
        self.pool = pool
        self.numbers: dict[tuple[str, int], int] = {}
        """Item number in the pool, by problem id and index of the response in its group."""
        self.unknown: dict[tuple[str, int], Verdict] = {}
        """Verdicts on episodes that the environment could not answer or judge, by the same keys."""
        self._ids = {prompt.id for prompt in prompts}
        self._judge = judge

    def add(self, ended: Sequence[Episode]) -> None:
        """Submit finished episodes, and keep the workers busy. Never waits.

        Args:
            ended: finished episodes, possibly none. Those of other ranks' problems are skipped.

        Raises:
            RewardError: see `Pool.poll`.
        """
        items: dict[tuple[str, int], tuple[str, str, str, Mapping[str, Any]]] = {}
        for one in ended:
            if one.prompt.id not in self._ids:
                continue
            key, asked = (one.prompt.id, one.sample), ask_judge(self._judge, one)
            if isinstance(asked, Verdict):
                self.unknown[key] = asked
            else:
                items[key] = (*asked, one.prompt.verifier, one.prompt.row)
        self.numbers |= zip(items, self.pool.submit(items.values()), strict=True)
        self.pool.poll()


def ask_judge(judge: Judge, episode: Episode) -> tuple[str, str] | Verdict:
    """What the verifier gets for an episode; or an unknown verdict, if the environment failed."""
    if episode.failure:
        return Verdict(Outcome.UNKNOWN, printable(episode.failure))
    try:
        with user_code.contained():
            return _check_texts(judge(episode.for_user()))
    except Exception as error:  # whatever a user's environment raises
        return Verdict(Outcome.UNKNOWN, f"judge: {said(error)}"[:MOST_CHARACTERS])


def _check_texts(judged: Any) -> tuple[str, str]:
    """What `Environment.judge` returned, if it is (response, answer)."""
    texts = judged if isinstance(judged, tuple | list) else ()
    if [isinstance(one, str) for one in texts] != [True] * 2:
        raise TypeError(f"must be two strings, response and answer, not {shown(judged)}")
    return texts[0], texts[1]


def score(
    judging: Judging,
    groups: Sequence[Sequence[Episode]],
    *,
    gather: Callable[[Sequence[tuple[bool, bool]]], list[tuple[bool, bool]]] = list,
    should_abort: Callable[[float], bool] | None = None,
) -> list[tuple[Verdict, ...]] | None:
    """Wait for the verdicts on these episodes; other submitted ones are dropped.

    Args:
        judging: all of these episodes have been added to it.
        groups: finished episodes of problems that this rank judges.
        gather: all-gather over the ranks that judge at the same time, as one list. All ranks return
            together, so none waits long in a later collective.
        should_abort: called every few seconds with the seconds since the start; True aborts.

    Returns:
        One verdict per episode, shaped as `groups`; None on every rank if any rank aborted.

    Collectives: `gather`, equally often on every rank.

    Raises:
        RewardError: see `Pool.poll`.
    """
    start = time.monotonic()

    def may_end(is_done: bool) -> bool:
        wants_out = should_abort is not None and should_abort(time.monotonic() - start)
        answers = gather([(is_done, wants_out)])
        if all(is_done for is_done, _ in answers):
            return True
        if any(wants_out for _, wants_out in answers):
            raise _AbortedError
        return False

    keys = [(one.prompt.id, one.sample) for group in groups for one in group]
    sent = [key for key in keys if key not in judging.unknown]
    try:
        judged = judging.pool.collect([judging.numbers[key] for key in sent], may_end=may_end)
    except _AbortedError:
        return None
    found = judging.unknown | dict(zip(sent, judged, strict=True))
    remaining = (found[key] for key in keys)
    return [tuple(next(remaining) for _ in group) for group in groups]


__all__ = [
    "Judge",
    "Judging",
    "Pool",
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
    "timeout_s",
    "try_verifiers",
]
