"""Verifiers: from a response to correct, wrong or unknown, judged in processes of their own."""

from __future__ import annotations

import importlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gapo_megatron.errors import DataError
from gapo_megatron.rewards.pool import Pool
from gapo_megatron.rewards.sandbox import Limits, start_timeout_s
from gapo_megatron.rewards.sandbox.check import check_sandbox
from gapo_megatron.types import Episode, Outcome, Prompt, Verdict

if TYPE_CHECKING:  # the workers import this too, and start without what they do not need
    from gapo_megatron.config import RewardConfig


logger = logging.getLogger(__name__)


class _AbortedError(Exception):
    pass


def timeout_s(config: RewardConfig) -> int:
    """Seconds that one response may take: see `RewardConfig`."""
    return config.timeout_s or {"code": 60}.get(config.kind, 10)


def check(config: RewardConfig) -> None:
    """Refuse, before any model is built, a verifier that cannot run on this machine.

    Raises:
        ConfigError: programs cannot be isolated here; names the options.
    """
    if config.kind == "code":
        limits = Limits(total_s=timeout_s(config))
        check_sandbox(sandbox=config.sandbox, python=config.python, limits=limits)


def check_answer(kind: str, answer: str) -> None:
    """Refuse an answer that the verifier cannot read: it could judge no response by it.

    Args:
        kind: which verifier, as `reward.kind`.
        answer: of a problem.

    Raises:
        DataError: says what is amiss.
    """
    with _explained(kind):
        _verifier(kind).check_answer(answer)


def check_excerpt(kind: str, head: bytes, tail: bytes) -> None:
    """Refuse an answer that lies in a file of its own and begins and ends otherwise than its kind.

    Args:
        kind: which verifier, as `reward.kind`.
        head: first bytes of the answer.
        tail: last bytes of the answer.

    Raises:
        DataError: says what is amiss; of most verifiers, that they read no such file.
    """
    if not (check := getattr(_verifier(kind), "check_excerpt", None)):
        raise DataError(f"reward.kind {kind!r} reads what is in the row, and no other file")
    with _explained(kind):
        check(head, tail)


@contextmanager
def _explained(kind: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        why = f"{error!s:.300}"  # it may show all of the answer
        raise DataError(f"the verifier of reward.kind {kind!r} cannot read it: {why}") from None


def _verifier(kind: str) -> ModuleType:
    return importlib.import_module(_module(kind))


def _module(kind: str) -> str:
    return f"gapo_megatron.rewards.{kind}"


def start_pool(config: RewardConfig, *, num_workers: int) -> Pool:
    """Start the worker processes of a verifier; returns at once, they import it meanwhile.

    Args:
        config: which verifier, and its options.
        num_workers: processes of this rank, whatever the config says of it.
    """
    limit_s: float = timeout_s(config)
    options: dict[str, Any] = {}
    if config.kind == "code":
        options = {
            "limits": {"total_s": limit_s},
            "sandbox": config.sandbox,
            "python": config.python,
        }
        limit_s += start_timeout_s(config.sandbox)
    return Pool(
        _module(config.kind),
        num_workers=num_workers,
        timeout_s=limit_s,
        options=options,
    )


Judge = Callable[[Episode], tuple[str, str]]
"""What is sent to the verifier about an episode: (response, answer), as `Environment.judge`."""


class Judging:
    """The responses of one generation under judgement: begun as they end, awaited by `score`."""

    def __init__(self, pool: Pool, prompts: Sequence[Prompt], *, judge: Judge) -> None:
        """Nothing is judged yet.

        Args:
            pool: workers with the verifier. Until `score` returns, nobody else may use it.
            prompts: problems whose responses this rank judges.
            judge: says what the verifier reads; called in this process.
        """
        self.pool = pool
        self.numbers: dict[tuple[str, int], int] = {}
        """Item number in the pool, by the problem's id and the response's number among the k."""
        self._ids = {prompt.id for prompt in prompts}
        self._judge = judge

    def add(self, ended: Sequence[Episode]) -> None:
        """Judge these, and keep the workers busy: for `rollout.generate`. Never waits.

        Args:
            ended: finished episodes, also none; those of others' problems are left to them.

        Raises:
            RewardError: see `Pool.poll`.
        """
        mine = [one for one in ended if one.prompt.id in self._ids]
        numbers = self.pool.submit([self._judge(one) for one in mine])
        keys = [(one.prompt.id, one.sample) for one in mine]
        self.numbers |= zip(keys, numbers, strict=True)
        self.pool.poll()


def score(
    judging: Judging,
    groups: Sequence[Sequence[Episode]],
    *,
    gather: Callable[[Sequence[tuple[bool, bool]]], list[tuple[bool, bool]]] = list,
    should_abort: Callable[[float], bool] | None = None,
) -> list[tuple[Verdict, ...]] | None:
    """Wait for the verdicts on these episodes; others that are being judged are dropped.

    Args:
        judging: has been given all of them.
        groups: finished episodes of problems that this rank judges.
        gather: of the ranks that judge at the same time: all their lists, as one. None ends before
            the last has its verdicts, so that none waits for long without a sign of life.
        should_abort: asked every few seconds, with those since the call: whether to abort.

    Returns:
        One verdict per episode, shaped as `groups`; None on every rank if any aborted.

    Collectives: `gather`, as often on every rank.

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

    numbers = [judging.numbers[one.prompt.id, one.sample] for group in groups for one in group]
    try:
        verdicts = judging.pool.collect(numbers, may_end=may_end)
    except _AbortedError:
        return None
    unknown = Counter(v.reason for v in verdicts if v.outcome is Outcome.UNKNOWN)
    if unknown:
        [(reason, _)] = unknown.most_common(1)
        logger.warning(
            "%d of %d responses could not be judged; most often: %s",
            unknown.total(),
            len(numbers),
            reason,
        )
    remaining = iter(verdicts)
    return [tuple(next(remaining) for _ in group) for group in groups]


__all__ = [
    "Judge",
    "Judging",
    "Pool",
    "check",
    "check_answer",
    "check_excerpt",
    "score",
    "start_pool",
    "timeout_s",
]
