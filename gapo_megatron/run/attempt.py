"""This start of the run: when to stop, whether it still owns the run, whether it hangs.

A launcher (slurm/launch.sh) gives every start a folder on the shared disk and names it in the
environment; docs/slurm.md lists its files. Without a launcher there is no folder: OWNER still
guards the run, and SIGTERM and SIGINT, which a launcher handles itself, stop it too.
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
from gapo_megatron.io.documents import read_json
from gapo_megatron.io.files import naming, write_atomically
from gapo_megatron.io.run_folder import OWNER_NAME, read_owner
from gapo_megatron.run import processes
from gapo_megatron.run.fail_fast import end_after, stderr

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
END_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that stop a run without a launcher; the second prints the stacks and exits at once."""
STAGE_SECONDS_NAME = "stage_seconds.json"
_LOOK_EVERY_S = 1.0
_GRACE_S = 60.0


class Attempt:
    """One start of a run, seen from one rank.

    Attributes:
        name: unique among the starts of a run: `<job id>.<restart>` under Slurm.
        run_dir: the run's output folder.
        folder: shared by launcher and ranks; None without a launcher.
        on_alive: called whenever this rank reports progress.
        leads: whether this rank owns the run folder, writes to it and decides when to stop.
        requeues: whether the launcher starts a run that stops again.
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
        self.requeues = False
        self.run_dir = run_dir
        self.name = name
        self.folder = folder
        self._job_end = job_end_unix_s
        self._hang_timeout_s = hang_timeout_s
        self._stop_margin_s = stop_margin_s
        self._asked = ""
        self._has_worked = False
        self._next_look = 0.0
        # The watch ends a stuck wait with its stacks, before this group's own timeout would.
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

        SIGQUIT prints the stacks of all threads and does not stop the run.

        Args:
            run_dir: the run's output folder; exists, shared by all ranks.
            hang_timeout_s: longest time between two calls of `alive` before this process prints
                the stacks of its threads and ends with exit code 1.
            stop_margin_s: time kept free before the end of the job, and the longest time that
                unfinished work may still take after a request to stop.
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
        attempt.requeues = launcher.requeues
        for number in STOP_SIGNALS:
            signal.signal(number, attempt._on_signal)
        if attempt.folder is not None:
            # A rank that its launcher ends because another rank failed prints its stacks.
            faulthandler.register(signal.SIGTERM, file=stderr(), all_threads=True, chain=True)
        else:
            attempt._watch_end_signals()
        faulthandler.register(signal.SIGQUIT, file=stderr(), all_threads=True)
        attempt.alive()
        if attempt.leads:
            attempt.require_ownership()
        return attempt

    def alive(self) -> None:
        """Report progress of this rank; `hang_timeout_s` counts from here."""
        self.restart_watch()
        self.on_alive()

    def restart_watch(self) -> None:
        """Count `hang_timeout_s` from here: this rank waits for ranks that make progress."""
        end_after(self._hang_timeout_s)

    def go_on(self, group: dist.ProcessGroup) -> None:
        """Continue with the ranks of `group`, a gloo group: others of this side are gone."""
        self._group = group

    def agree(self, value: bool) -> bool:
        """Return rank 0's value: a shared disk may look different on other nodes.

        Collectives: a broadcast over all ranks.
        """
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def enter(self, stage: str) -> None:
        """Begin a stage: call `alive`; rank 0 also writes its name into the attempt's folder."""
        self.alive()
        if self.folder is not None and self.leads:
            with naming(self.folder / "stage"):
                (self.folder / "stage").write_text(f"{stage}\n", encoding="utf-8")

    def ask_to_stop(self, reason: str) -> None:
        """Ask for a stop, as a launcher does."""
        self._asked = self._asked or reason

    def stop_asked(self) -> bool:
        """Whether this rank has seen a request to stop. No collective; a `stat` a second at most.

        Also calls `alive`: a loop that polls this makes progress.
        """
        self.alive()
        now = time.monotonic()
        if not self._asked and self.folder is not None and now >= self._next_look:
            self._next_look = now + _LOOK_EVERY_S
            if (self.folder / "stop").exists():
                self._asked = "the launcher asked for it"
        return bool(self._asked)

    def patience(self, expected: Expectation) -> Callable[[float], bool]:
        """Return when to abort work that cannot be saved half done, given its elapsed seconds.

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

        True when a stop was asked for, and when the job's time limit leaves less than the longest
        expected time plus the margin. Before any work, the shortest expected time counts.

        Args:
            needed: time until the next call, plus the save after it; rank 0's value is used.

        Collectives: a broadcast over all ranks.

        Raises:
            FencedError: on rank 0, when a newer attempt has taken the run.
            ConfigError: on rank 0, when the time limit is too short for any work: the job would
                restart forever.
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
        """Save the times of stages for the next attempt, which has not measured any yet."""
        if self.leads:
            write_atomically(self.run_dir / STAGE_SECONDS_NAME, json.dumps(recent))

    def stage_seconds(self) -> dict[str, list[float]]:
        """Stage times that `keep_stage_seconds` saved last; empty in a new run.

        A damaged file is ignored with a warning: the times are measured again.
        """
        path = self.run_dir / STAGE_SECONDS_NAME
        try:
            recent = read_json(path)
        except FileNotFoundError:
            return {}
        except ConfigError as error:
            logger.warning("%s; stage times are measured again", error)
            return {}
        if not _are_stage_seconds(recent):
            logger.warning("%s has no seconds by stage; stage times are measured again", path)
            return {}
        return dict(recent)

    def require_ownership(self) -> None:
        """Raise FencedError if a newer attempt has taken the run folder. No collective.

        Slurm cannot end the processes of a node that lost its network: they keep running while the
        job restarts elsewhere, and must not write.

        Raises:
            FencedError: names the owner.
        """
        owner = read_owner(self.run_dir)
        if owner != self.name:
            raise FencedError(
                f"{self.run_dir} belongs to attempt {owner or '(none: OWNER is gone)'}; this is "
                f"attempt {self.name}, which stops writing"
            )

    def end(self, outcome: Literal["finished", "stopped"]) -> None:
        """Tell the launcher that the program ends as it should. Call it last, on every rank.

        Only libraries and their threads are left to shut down. If that hangs, the process exits
        after a minute; the outcome stays as written.

        Collectives: a barrier over all ranks: rank 0 hosts the store through which others may
        still be building a group, and any rank may have messages left to send.
        """
        self.alive()  # rank 0 may still be writing files that the others do not wait for
        dist.barrier(group=self._group)
        end_after(_GRACE_S)
        if not self.leads:
            return
        if outcome == "stopped":
            reason = self._asked or "another rank was asked to"
            logger.info("stopped (%s); start the run again to continue it", reason)
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
            f"the job ends in {left_s:.0f} s, but the next stage and a save recently took "
            f"{needed_s:.0f} s ({STAGE_SECONDS_NAME}) and run.stop_margin_s is "
            f"{self._stop_margin_s:g} s"
        )
        if not self._has_worked:
            raise ConfigError(f"the job's time limit is too short for any work: {reason}")
        return reason

    def _on_signal(self, number: int, _: Any) -> None:
        self._asked = f"signal {signal.Signals(number).name}"

    def _on_end_signal(self, number: int, frame: Any) -> None:
        self._on_signal(number, frame)
        # The next signal ends this process by the system's default, without a Python thread.
        for one in END_SIGNALS:
            signal.signal(one, signal.SIG_DFL)
            faulthandler.register(one, file=stderr(), all_threads=True, chain=True)

    def _watch_end_signals(self) -> None:
        """Obey the first and the second end signal, also while the main thread is in a C call.

        Python runs signal handlers only in the main thread, between two bytecode instructions: not
        during a collective or a wait for the store. So a second thread reads signals from a pipe.
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
    """Announce the first end signal and exit at the second; never returns.

    Args:
        heard: file descriptor on which the number of each signal arrives, as a byte.
    """
    is_first = True
    while True:
        number = os.read(heard, 1)[0]
        if number not in END_SIGNALS:
            continue
        rule = "saves and exits; a second one exits at once" if is_first else "exits at once"
        with contextlib.suppress(OSError):  # nothing reads stderr any more
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
