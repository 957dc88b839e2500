"""Cases, and what becomes of them: refused by name, as if undamaged, or a finding."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import itertools
import logging
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from gapo_megatron.errors import GapoError
from tests.fuzz.mutate import Damage

OUTCOMES = ("refused", "same", "explained", "traceback", "hang", "unnamed", "accepted")
"""Refused by name; read as the whole input; read as what it says, which is something else. And what
is a finding: another exception than ours, no end, an error that does not say where, and what was
accepted and is not what it says."""
RAN = "ran"
"""A file that code of a damaged input would leave, if it were run."""
HANG_S = 60
"""Of this process's CPU time, or ten times as long on the wall: a thousand times what most take."""


@dataclass(frozen=True)
class Target:
    """One kind of input, and the code that reads it."""

    name: str
    prepare: Callable[[Path], None]
    """Fills an empty folder with whole input; once."""
    damage: Callable[[Random, Path], Damage]
    """Damages a copy of it, in place; the same for the same generator."""
    read: Callable[[Path], Any]
    """What the program makes of the folder: a plain value. Raises GapoError."""
    explains: Callable[[Path, Damage, Any, Any], str] = lambda folder, damage, state, whole: (
        f"read as {state!r}, and not as the whole one"
    )
    """Of damaged input that is read as another state than the whole one's: what is wrong."""
    names: Callable[[str, Damage], bool] = lambda message, damage: Path(damage.file).name in message
    """Whether an error's message says where the damage is."""
    share: int = 1
    """Cases of this target, relative to the others'."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A case that ended as none may."""

    target: str
    number: int
    damage: Damage
    outcome: str
    """One of `OUTCOMES`: none of the first three."""
    what: str

    def __str__(self) -> str:
        where = f"--target {self.target!r} --case {self.number}"
        return f"{self.outcome}: {where}: {self.damage.file}: {self.damage.what}\n{self.what}"


class Campaign:
    """All targets, with their whole input in one folder."""

    def __init__(self, targets: Sequence[Target], folder: Path, *, seed: int) -> None:
        """Prepare every target's whole input, and read it once."""
        self._folder, self._seed = folder, seed
        self._targets = {target.name: target for target in targets}
        self._whole: dict[str, Any] = {}
        for target in targets:
            whole = folder / "whole" / target.name
            whole.mkdir(parents=True)
            with contextlib.chdir(whole), _captured():
                target.prepare(whole)
            with self._copy(target) as copy, _captured():
                self._whole[target.name] = target.read(copy)

    def cases(self, number: int) -> Iterator[tuple[Target, int]]:
        """So many cases, every target's share of them, numbered from 0 for each target."""
        shares = [target for target in self._targets.values() for _ in range(target.share)]
        numbers = Counter[str]()
        for _, target in zip(range(number), itertools.cycle(shares), strict=False):
            yield target, numbers[target.name]
            numbers[target.name] += 1

    def run(self, target: Target, number: int) -> tuple[str, Finding | None]:
        """One case; the same one for the same seed, whatever else is run.

        Returns:
            Its outcome: refused, same (as if undamaged), explained (it says something else, which
            was read); or the kind of what was found.
        """
        rng = Random(f"{self._seed}/{target.name}/{number}")
        with self._copy(target) as copy:
            damage = target.damage(rng, copy)
            outcome, what = self._outcome(target, copy, damage)
            if (copy / RAN).exists():
                outcome, what = "accepted", "code of the input was run"
        found = Finding(target.name, number, damage, outcome, what) if what else None
        return outcome, found

    def _outcome(self, target: Target, copy: Path, damage: Damage) -> tuple[str, str]:
        """Outcome, and of a finding what there is to say."""
        whole = self._whole[target.name]
        try:
            with _captured(), _within(HANG_S):
                state = target.read(copy)
        except GapoError as error:
            named = target.names(str(error), damage)
            return ("refused", "") if named else ("unnamed", f"{type(error).__name__}: {error}")
        except _HangError:
            return "hang", traceback.format_exc()
        except KeyboardInterrupt:
            raise
        except BaseException:  # whatever it is: torch's and Rust's are no `Exception`
            return "traceback", traceback.format_exc()
        if state == whole:
            return "same", ""
        try:
            with _captured():
                what = target.explains(copy, damage, state, whole)
        except Exception:  # nobody else can read what was accepted
            what = traceback.format_exc()
        return ("accepted", what) if what else ("explained", "")

    @contextlib.contextmanager
    def _copy(self, target: Target) -> Iterator[Path]:
        """A copy of the whole input, always at the same path; the working directory while used."""
        # Deep enough for what goes up by `..` to stay in the folder.
        copy = self._folder / "deep/down/case"
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(self._folder / "whole" / target.name, copy, symlinks=True)
        try:
            with contextlib.chdir(copy):
                yield copy
        finally:
            shutil.rmtree(copy)


class _HangError(BaseException):
    pass


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    def end(*_: object) -> None:
        raise _HangError(f"no end within {seconds} s")

    # What computes has CPU time, however busy the machine is; what waits has none.
    clocks = {
        signal.SIGVTALRM: (signal.ITIMER_VIRTUAL, seconds),
        signal.SIGALRM: (signal.ITIMER_REAL, 10 * seconds),
    }
    before = {number: signal.signal(number, end) for number in clocks}
    for timer, limit_s in clocks.values():
        signal.setitimer(timer, limit_s)
    # In C or Rust no handler runs: then where it hangs is shown, and this process ends.
    faulthandler.dump_traceback_later(20 * seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        for timer, _ in clocks.values():
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _captured() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def campaign(targets: Sequence[Target], *, seed: int) -> Iterator[Campaign]:
    """A campaign in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="gapo_fuzz_") as folder:
        yield Campaign(targets, Path(folder), seed=seed)
