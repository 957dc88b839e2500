"""This start of the run: when to stop, whether it still owns the run, whether it hangs.

A launcher (slurm/launch.sh) gives every start a folder on the shared disk and names it in the
environment; docs/slurm.md lists its files. Without a launcher there is no folder: OWNER still
guards the run, and SIGTERM and SIGINT, which a launcher keeps for itself, stop it too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self

import torch.distributed as dist

from gapo_megatron.clock import Expectation
from gapo_megatron.errors import ConfigError, FencedError
from gapo_megatron.io.documents import open_file, read_json
from gapo_megatron.io.files import naming, write_atomically
from gapo_megatron.io.run_folder import OWNER_NAME
from gapo_megatron.run import processes
from gapo_megatron.run.fail_fast import end_after, stderr

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
END_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""They stop a run without a launcher; the second one shows the stacks and ends it at once."""
STAGE_SECONDS_NAME = "stage_seconds.json"
_LOOK_EVERY_S = 1.0
_GRACE_S = 60.0
_MAX_NAME_BYTES = 1024


class Attempt:
    """One start of a run, seen from one rank.

    Attributes:
        name: unique among the starts of a run: `<job id>.<restart>` under Slurm.
        run_dir: the run's output folder.
        folder: where launcher and ranks talk; None without a launcher.
        on_alive: called whenever this rank says that it makes progress.
        leads: whether this rank writes for all: it owns the run folder, and decides when to stop.
    """

    def __init__(
        self,
        run_dir: Path,
        name: str,
        *,
        folder: Path | None,
        job_end_unix_s: float | None,
        hang_timeout_s: float,
        stop_margin_s: float,
        may_lead: bool = True,
    ) -> None:
        """Use `begin`. `job_end_unix_s` is the job's time limit, None without one."""
        self.on_alive: Callable[[], object] = lambda: None
        self.leads = may_lead and dist.get_rank() == 0
        self.run_dir = run_dir
        self.name = name
        self.folder = folder
        self._job_end = job_end_unix_s
        self._hang_timeout_s = hang_timeout_s
        self._stop_margin_s = stop_margin_s
        self._asked = ""
        self._has_worked = False
        self._next_look = 0.0
        # The watch ends a wait, and shows where, before this group's own limit would.
        self._group = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=hang_timeout_s + _GRACE_S)
        )

    @classmethod
    def begin(
        cls,
        run_dir: str | Path,
        *,
        hang_timeout_s: float,
        stop_margin_s: float,
        may_lead: bool = True,
    ) -> Self:
        """Read the launcher's environment, take or check ownership, watch for signals and hangs.

        SIGQUIT shows the stacks of all threads, and the run goes on.

        Args:
            run_dir: the run's output folder; exists, shared by all ranks.
            hang_timeout_s: longest time between two calls of `alive` before this process prints
                the stacks of its threads and ends with exit code 1.
            stop_margin_s: time kept free before the end of the job, and the longest that work under
                way may go on after a request to stop.
            may_lead: whether rank 0 leads. False on ranks that only generate: the training side
                owns the run folder.

        Collectives: a broadcast over all ranks; creation of a gloo group.

        Raises:
            FencedError: on rank 0, when a newer attempt has taken the run already.
        """
        end_after(hang_timeout_s)
        launcher, run_dir = processes.launcher(), Path(run_dir)
        names = [launcher.attempt]
        if not names[0] and may_lead and dist.get_rank() == 0:
            names = [f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"]
            write_atomically(run_dir / OWNER_NAME, names[0])
        dist.broadcast_object_list(names, src=0)
        attempt = cls(
            run_dir,
            names[0],
            folder=launcher.folder,
            job_end_unix_s=launcher.job_end_unix_s,
            hang_timeout_s=hang_timeout_s,
            stop_margin_s=stop_margin_s,
            may_lead=may_lead,
        )
        for number in STOP_SIGNALS:
            signal.signal(number, attempt._on_signal)
        if attempt.folder is not None:
            # A rank that its launcher ends, because another one failed, shows where it was.
            faulthandler.register(signal.SIGTERM, file=stderr(), all_threads=True, chain=True)
        else:
            attempt._watch_end_signals()
        faulthandler.register(signal.SIGQUIT, file=stderr(), all_threads=True)
        attempt.alive()
        if attempt.leads:
            attempt.require_ownership()
        return attempt

    def alive(self) -> None:
        """Say that this rank makes progress; the time to a hang counts from here."""
        self.restart_watch()
        self.on_alive()

    def restart_watch(self) -> None:
        """Let the time to a hang count from here: this rank waits, for ranks that make progress."""
        end_after(self._hang_timeout_s)

    def agree(self, value: bool) -> bool:
        """Rank 0's value: files of a shared disk may look different to the others.

        Collectives: a broadcast over all ranks.
        """
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def enter(self, stage: str) -> None:
        """Begin a stage: say `alive`; rank 0 also writes its name into the attempt's folder."""
        self.alive()
        if self.folder is not None and self.leads:
            with naming(self.folder / "stage"):
                (self.folder / "stage").write_text(f"{stage}\n", encoding="utf-8")

    def stop_asked(self) -> bool:
        """Whether this rank has seen a request to stop. No collective; a `stat` a second at most.

        Also says `alive`: what polls this in a loop makes progress.
        """
        self.alive()
        now = time.monotonic()
        if not self._asked and self.folder is not None and now >= self._next_look:
            self._next_look = now + _LOOK_EVERY_S
            if (self.folder / "stop").exists():
                self._asked = "the launcher asks for it"
        return bool(self._asked)

    def patience(self, expected: Expectation) -> Callable[[float], bool]:
        """When to abort work that cannot be saved half done: a function of its elapsed seconds.

        Once a stop is asked for: abort if redoing the work is cheaper than finishing it, or if
        finishing does not fit into the stop margin.

        Args:
            expected: expectation for the whole work; 0 if it never ran.
        """

        def should_abort(elapsed_s: float) -> bool:
            if not self.stop_asked():
                return False
            left_s = expected.longest_s - elapsed_s
            return not 0 <= left_s <= min(elapsed_s, self._stop_margin_s)

        return should_abort

    def must_stop(self, needed: Expectation) -> bool:
        """Whether to save and end now, decided by rank 0 for all.

        True when a stop was asked for, and when the job's time limit leaves less than what is
        needed at the longest, plus the margin. The first call lets a part begin that may just fit.

        Args:
            needed: time until the next call and for the save after it; rank 0's counts.

        Collectives: a broadcast over all ranks.

        Raises:
            FencedError: on rank 0, when a newer attempt has taken the run.
            ConfigError: on rank 0, when the time limit is too short from the start: stopping and
                the restarts would never end.
        """
        self.alive()
        reasons = [""]
        if self.leads:
            self.require_ownership()
            reasons = [self._reason(needed)]
        dist.broadcast_object_list(reasons, src=0, group=self._group)
        self._has_worked = True
        self._asked = self._asked or reasons[0]
        return bool(reasons[0])

    def keep_stage_seconds(self, recent: Mapping[str, list[float]]) -> None:
        """Keep what stages take for the next attempt, whose first ones are not measured yet."""
        if self.leads:
            write_atomically(self.run_dir / STAGE_SECONDS_NAME, json.dumps(recent))

    def stage_seconds(self) -> dict[str, list[float]]:
        """Stage times that `keep_stage_seconds` kept last; empty in a new run.

        They are advice: damaged, they are measured anew.
        """
        path = self.run_dir / STAGE_SECONDS_NAME
        try:
            recent = read_json(path)
        except FileNotFoundError:
            return {}
        except ConfigError as error:
            logger.warning("%s; stages are measured anew", error)
            return {}
        if not _are_stage_seconds(recent):
            logger.warning("%s has no seconds by stage; stages are measured anew", path)
            return {}
        return dict(recent)

    def require_ownership(self) -> None:
        """Raise FencedError if a newer attempt has taken the run folder. No collective.

        Slurm cannot reach the processes of a node that lost its network: they live on while the job
        runs elsewhere, and must not write.

        Raises:
            FencedError: names the owner.
        """
        path = self.run_dir / OWNER_NAME
        with naming(path):
            try:
                with open_file(path) as file:
                    owner = file.read(_MAX_NAME_BYTES).decode(errors="replace").strip()
            except FileNotFoundError:
                owner = ""
        if owner != self.name:
            raise FencedError(
                f"{self.run_dir} belongs to attempt {owner or '(none: OWNER is gone)'}; this is "
                f"attempt {self.name}, which writes nothing more"
            )

    def end(self, outcome: Literal["finished", "stopped"]) -> None:
        """Tell the launcher that the program ends as it should. Call it last, on every rank.

        What is left is to take libraries and their threads down. Should that hang, the process ends
        after a minute all the same; the outcome stands.

        Collectives: a barrier over all ranks: rank 0 keeps the store through which the others may
        still be building a group, and any rank may owe them a message.
        """
        self.alive()  # rank 0 may still be writing what the others need not wait for
        dist.barrier(group=self._group)
        end_after(_GRACE_S)
        if not self.leads:
            return
        if outcome == "stopped":
            reason = self._asked or "another rank was asked to"
            logger.info("stopped (%s); start again to go on", reason)
        if self.folder is not None:
            write_atomically(self.folder / "outcome", outcome)

    def _reason(self, needed: Expectation) -> str:
        if self.stop_asked():
            return self._asked
        if self._job_end is None:
            return ""
        left_s = self._job_end - time.time()
        needed_s = needed.longest_s if self._has_worked else needed.shortest_s
        if left_s >= needed_s + self._stop_margin_s:
            return ""
        reason = (
            f"the job ends in {left_s:.0f} s; the next part and a save took {needed_s:.0f} s "
            f"lately ({STAGE_SECONDS_NAME}), and run.stop_margin_s is {self._stop_margin_s:g}"
        )
        if not self._has_worked:
            raise ConfigError(f"the job's time limit is too short for any work: {reason}")
        return reason

    def _on_signal(self, number: int, _: Any) -> None:
        self._asked = f"signal {signal.Signals(number).name}"

    def _on_end_signal(self, number: int, frame: Any) -> None:
        self._on_signal(number, frame)
        # From here on no thread of Python's is needed to end this process.
        for one in END_SIGNALS:
            signal.signal(one, signal.SIG_DFL)
            faulthandler.register(one, file=stderr(), all_threads=True, chain=True)

    def _watch_end_signals(self) -> None:
        """Obey the first and the second end signal, also while the main thread is in a C call.

        Python's handlers run in the main thread alone, between two of its own instructions: not
        while it is in a collective or waits for the store. So a thread hears of signals too.
        """
        heard, told = os.pipe()
        os.set_blocking(told, False)
        for number in END_SIGNALS:
            signal.signal(number, self._on_end_signal)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        # A forked child has the same pipe: its signals are not this process's.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        threading.Thread(
            target=_hear_end_signals, args=(heard,), name="end signals", daemon=True
        ).start()


def _hear_end_signals(heard: int) -> None:
    """Announce the first end signal, end this process at the second one; never returns.

    Args:
        heard: where the number of each signal arrives, as a byte.
    """
    is_first = True
    while True:
        number = os.read(heard, 1)[0]
        if number not in END_SIGNALS:
            continue
        rule = "saves and ends; a second one ends at once" if is_first else "ends at once"
        with contextlib.suppress(OSError):  # it is not read any more
            os.write(2, f"{signal.Signals(number).name}: {rule}\n".encode())
        # torchrun sends one SIGTERM when another rank has failed, then SIGKILL: no stacks there.
        if not is_first or (number == signal.SIGTERM and processes.is_under_torchrun()):
            faulthandler.dump_traceback(stderr(), all_threads=True)
        if not is_first:
            os._exit(128 + number)
        is_first = False


def _are_stage_seconds(value: Any) -> bool:
    """Whether `value` has the form that `keep_stage_seconds` writes."""
    return isinstance(value, dict) and all(
        isinstance(seconds, list)
        and seconds
        and all(type(one) in (int, float) and one >= 0 for one in seconds)
        for seconds in value.values()
    )
