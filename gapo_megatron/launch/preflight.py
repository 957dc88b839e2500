"""Check the nodes of a job: one task per node, started by slurm/launch.sh before the ranks.

    srun --ntasks-per-node=1 python -m gapo_megatron.launch.preflight
        --output ATTEMPT_DIR/check --run-dir RUN_DIR --num-nodes N

Every task checks its own node (node_checks.py) and writes the verdict to `check/NODE.json`. Good
nodes then do an all_reduce, and each that succeeds creates `check/NODE.ok`. A node without that
file is bad, for whatever reason.

No node leads, because any node may be bad. The nodes agree on the members of the all_reduce through
a file that can be created only once: the first node decides for all. The time is divided into
thirds: for the verdicts, for the all_reduce, and for a second one without the nodes that failed the
first.

The all_reduce over NCCL, and the use of every GPU before it, were NOT YET RUN ON A GPU; on CPUs the
all_reduce uses gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from gapo_megatron.io.files import write_atomically
from gapo_megatron.launch.node_checks import MIN_FREE_GIB, Check, check_local

Outcome = Literal["ok", "broken", "apart", "unfit"]
"""How the all_reduce ended on a node.

- broken: it reached other nodes, but one was missing, or the all_reduce failed.
- apart: it reached no other node.
- unfit: torch or a GPU failed on this node, or its process died.
"""

_LOOK_EVERY_S = 0.25
_GRACE_S = 2.0
"""Seconds by which another node's time may end later than this one's."""
_NUM_ELEMENTS = 2**20
"""Elements of the float32 tensor that is summed: 4 MiB, enough to use the links."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """The check of one node.

    Attributes:
        node: Slurm's name of the node.
        folder: an existing folder on the shared disk, for the nodes' files.
        num_nodes: number of nodes in the check.
        third_s: seconds for each of: the verdicts, the all_reduce, its repetition.
        address: how the others reach a node; %s is its name.
    """

    node: str
    folder: Path
    num_nodes: int
    third_s: float
    address: str = "%s"

    def run(self, local: list[Check]) -> list[Check]:
        """Write the local checks, do the all_reduce, and create the .ok file if all is well.

        Collectives: rendezvous and all_reduce among the good nodes, at most twice.

        Returns:
            The local checks and, if they are good, the check `link`.

        Raises:
            OSError: the folder is not writable.
        """
        self._write_verdict(local)
        if not all(check.ok for check in local):
            return local
        outcome, detail = self._link()
        checks = [*local, Check("link", outcome == "ok", detail)]
        self._write_verdict(checks)
        if outcome == "ok":
            (self.folder / f"{self.node}.ok").touch()
        return checks

    def _link(self) -> tuple[Outcome, str]:
        self._wait_until(lambda: len(self._verdicts()) == self.num_nodes, self.third_s)
        nodes, bad = (
            [path.stem for path in _listing(self.folder, pattern)]
            for pattern in ("*.json", "*.why")
        )
        good = [node for node in nodes if node not in bad]
        members = self._agree(0, good)
        if self.node not in members:
            return "apart", f"too late: {', '.join(members)} started without this node"
        end = time.monotonic() + self.third_s
        outcome, detail = self._all_reduce(0, members, end)
        write_atomically(self.folder / f".ended_{self.node}", outcome)
        if outcome in ("ok", "unfit"):
            return outcome, detail
        remaining = self._remaining(members, end + _GRACE_S)
        if remaining == members:  # no node to leave out
            return outcome, detail
        remaining = self._agree(1, remaining)
        if self.node not in remaining:
            return outcome, f"{detail}; {', '.join(remaining) or 'no node'} tried again without it"
        return self._all_reduce(1, remaining, time.monotonic() + self.third_s)

    def _verdicts(self) -> list[Path]:
        return _listing(self.folder, "*.json")

    def _agree(self, round_: int, proposal: list[str]) -> list[str]:
        """The members that the first node to get here proposed."""
        path = self.folder / f".members_{round_}"
        with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            file.write(" ".join(proposal) + "\n")
        self._wait_until(lambda: path.read_text(encoding="utf-8").endswith("\n"), _GRACE_S)
        text = path.read_text(encoding="utf-8")
        if not text.endswith("\n"):
            raise OSError(f"{path} was not written whole: its node has ended, or the disk is slow")
        return text.split()

    def _all_reduce(self, round_: int, members: list[str], end: float) -> tuple[Outcome, str]:
        """Do the all_reduce in a process that may crash or hang; `end`: by the monotonic clock."""
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        port_path = self.folder / f".port_{round_}"
        first = self.address.replace("%s", members[0])
        process = context.Process(
            target=_all_reduce_main,
            args=(sender, self.node, members, first, port_path, end),
            daemon=True,
        )
        start = time.monotonic()
        process.start()
        sender.close()
        # The process reports each step before it begins; its last report tells how it ended.
        outcome: Outcome = "unfit"
        doing = "starting python"
        with contextlib.suppress(EOFError):  # the process has ended
            while receiver.poll(max(end - time.monotonic(), 0)):
                outcome, doing = receiver.recv()
        process.join(max(end - time.monotonic(), 0))
        if process.exitcode is None:
            process.kill()
            process.join()
            return outcome, f"stopped after {self.third_s:.0f} s while {doing}"
        if process.exitcode:
            return "unfit", f"the process died (exit code {process.exitcode}) while {doing}"
        if outcome != "ok":
            return outcome, doing
        took = time.monotonic() - start
        return "ok", f"{doing} over {len(members)} of {self.num_nodes} nodes in {took:.1f} s"

    def _remaining(self, members: list[str], end: float) -> list[str]:
        """Members that should try again, judged by how the all_reduce ended on each.

        A member without a result is gone. If some reached each other and some reached nobody, the
        larger group is believed. If the all_reduce worked for some, the others stay bad.
        """

        def files() -> list[Path]:
            return _listing(self.folder, ".ended_*")

        self._wait_until(lambda: len(files()) == len(members), end - time.monotonic())
        ended = {path.name.removeprefix(".ended_"): path.read_text().strip() for path in files()}
        met = [node for node in members if ended.get(node) == "broken"]
        apart = [node for node in members if ended.get(node) == "apart"]
        if "ok" in ended.values():
            return []
        return met if len(met) >= len(apart) else apart

    def _write_verdict(self, checks: list[Check]) -> None:
        verdict = {
            "node": self.node,
            "ok": all(check.ok for check in checks),
            "checks": [asdict(check) for check in checks],
            "unix_s": time.time(),
        }
        if failed := [f"{check.name}: {check.detail}" for check in checks if not check.ok]:
            why = " ".join("; ".join(failed).split())
            write_atomically(self.folder / f"{self.node}.why", why)
        # The verdict comes last: other nodes wait for it.
        write_atomically(self.folder / f"{self.node}.json", json.dumps(verdict, indent=1))

    def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Return when the condition is true or the time is over."""
        end = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < end:
            time.sleep(_LOOK_EVERY_S)


def _all_reduce_main(
    sender: Connection, node: str, members: list[str], first: str, port_path: Path, end: float
) -> None:
    """Do the all_reduce; before each step, send how it counts if it never returns, and its name.

    `first` is the address of the first member.
    """

    def left(share: float = 1.0) -> timedelta:
        return timedelta(seconds=max((end - time.monotonic()) * share, 1.0))

    def say(outcome: Outcome, doing: str) -> None:
        sender.send((outcome, doing))

    # Otherwise a dead peer would abort this process, which would look like a crash of its own.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    rank, size = members.index(node), len(members)
    say("unfit", "importing torch")
    import torch
    import torch.distributed as dist

    say("unfit", "using every GPU")
    for index in range(torch.cuda.device_count()):
        torch.ones(1, device=f"cuda:{index}").item()
    device = "cuda:0" if torch.cuda.is_available() else "cpu"

    lonely: Outcome = "unfit" if rank == 0 else "apart"  # it would be unable to reach itself
    say(lonely, f"connecting to {first}")
    try:
        # The last quarter is for the all_reduce.
        port = 0 if rank == 0 else _read_port(port_path, left(0.75))
        store = dist.TCPStore(
            first, port, is_master=rank == 0, timeout=left(0.75), wait_for_workers=False
        )
    except (OSError, RuntimeError) as error:
        say(lonely, f"cannot reach {first}: {_one_line(error)}")
        os._exit(0)
    if rank == 0:
        write_atomically(port_path, str(store.port))

    say("broken", f"waiting for {', '.join(members)}")
    try:
        store.set(f"met_{node}", "")
        try:
            store.wait([f"met_{member}" for member in members], left(0.75))
        except dist.DistStoreError:
            missing = [member for member in members if not store.check([f"met_{member}"])]
            say("broken", f"no answer from {', '.join(missing)}")
            os._exit(0)
        backend = "nccl" if device == "cuda:0" else "gloo"
        say("broken", f"doing an all_reduce ({backend})")
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=left())
        values = torch.full((_NUM_ELEMENTS,), rank + 1.0, device=device)
        dist.all_reduce(values)
        if (values != size * (size + 1) / 2).any():
            say("broken", f"the all_reduce ({backend}) has a wrong result")
            os._exit(0)
        store.set(f"done_{node}", "")
        say("ok", f"all_reduce ({backend})")
        if rank == 0:  # rank 0 hosts the store
            with contextlib.suppress(RuntimeError):
                store.wait([f"done_{member}" for member in members], left())
    except RuntimeError as error:
        say("broken", f"the all_reduce failed: {_one_line(error)}")
    os._exit(0)  # tearing a broken group down may hang


def _read_port(path: Path, timeout: timedelta) -> int:
    end = time.monotonic() + timeout.total_seconds()
    while not _listing(path.parent, path.name):
        if time.monotonic() > end:
            raise TimeoutError("it has not opened a port")
        time.sleep(_LOOK_EVERY_S)
    return int(path.read_text(encoding="utf-8"))


def _listing(folder: Path, pattern: str) -> list[Path]:
    """Files that match the pattern, sorted, including those that another node just created.

    NFS may show a folder as it was half a minute ago, unless this machine changes it.
    """
    probe = folder / f".look_{os.uname().nodename}_{os.getpid()}"
    probe.touch()
    probe.unlink()
    return sorted(folder.glob(pattern))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def main(command_line: Sequence[str] | None = None) -> int:
    """Check this node and print what is wrong with it. Returns 0, good or bad; 2: usage."""
    parser = argparse.ArgumentParser(
        prog="python -m gapo_megatron.launch.preflight", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="folder for verdicts, in the attempt's folder",
    )
    parser.add_argument("--run-dir", type=Path, required=True, help="the run's output folder")
    parser.add_argument("--num-nodes", type=int, required=True, help="number of nodes in the check")
    parser.add_argument(
        "--address", default="%s", help="how nodes reach each other; %%s is a node's name"
    )
    parser.add_argument(
        "--min-free-gib",
        type=float,
        default=MIN_FREE_GIB,
        help="free disk space to require (default: %(default)g)",
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=300,
        help="time limit, exceeded by at most 5 s (default: %(default)g)",
    )
    arguments = parser.parse_args(command_line)
    node = os.environ.get("SLURMD_NODENAME")
    if not node:
        parser.error("SLURMD_NODENAME is not set: srun sets it in every task")
    if not arguments.output.parent.is_dir():
        # The batch script has created it, on another node.
        parser.error(f"{arguments.output.parent} does not exist on {node}: is the disk shared?")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # exiting ends the child process too
    try:
        arguments.output.mkdir(exist_ok=True)
        local = check_local(
            os.environ, run_dir=arguments.run_dir, min_free_gib=arguments.min_free_gib
        )
        checks = Preflight(
            node,
            arguments.output,
            arguments.num_nodes,
            arguments.timeout_s / 3,
            arguments.address,
        ).run(local)
    except OSError as error:
        checks = [Check("output", False, str(error))]
    for check in checks:
        if not check.ok:
            print(f"[check] {node} is bad: {check.name}: {check.detail}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
