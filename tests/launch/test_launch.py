from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gapo_megatron.errors import ConfigError, MachineError
from gapo_megatron.run import process_group
from gapo_megatron.run.process_group import recognize, seed_everything
from gapo_megatron.run.processes import (
    Placement,
    choose_cuda_queues,
    first_host,
    read_placement,
    read_ranks_per_node,
)
from tests.messages import mentions
from tests.waiting import HANG_S

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
# What srun sets for task 5 of 8 on two nodes.
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NODELIST": "gpu[017-018]",
    "SLURM_JOB_NODELIST": "gpu[017-018]",
    "SLURM_STEP_NODELIST": "gpu[017-018]",
}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, Placement(0, 1, 0, "", 0)),
        (TORCHRUN, Placement(3, 4, 1, "host", 29500)),
        (SLURM, Placement(5, 8, 1, "gpu017", 24567)),
        # A step that is smaller than its job.
        (
            SLURM | {"SLURM_NTASKS": "64", "SLURM_STEP_NODELIST": "gpu018", "SLURM_STEP_ID": "2"},
            Placement(5, 8, 1, "gpu018", 24569),
        ),
        # A master that is given stays.
        (
            SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"},
            Placement(5, 8, 1, "10.0.0.1", 4000),
        ),
        # torchrun inside an srun task has ranks of its own.
        (
            SLURM | TORCHRUN | {"TORCHELASTIC_RUN_ID": "x", "SLURM_PROCID": "1"},
            Placement(3, 4, 1, "host", 29500),
        ),
        # A shell inside an allocation.
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, Placement()),
    ],
)
def test_placement(env, expected):
    assert read_placement(env) == expected


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, 1),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}, 2),
        (TORCHRUN | {"LOCAL_RANK": "3"}, 4),  # by hand, on one machine
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 4),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4,4", "SLURM_TASKS_PER_NODE": "2(x4)"}, 4),
        (SLURM | {"SLURM_TASKS_PER_NODE": "2(x4)"}, 2),
        (SLURM | {"SLURM_NTASKS_PER_NODE": "4"}, 4),
        # torchrun as a step of Slurm's, one task a node.
        (SLURM | TORCHRUN | {"LOCAL_WORLD_SIZE": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, 2),
    ],
)
def test_ranks_per_node(env, expected):
    if "RANK" in env:
        env = env | {"TORCHELASTIC_RUN_ID": "7"}
    assert read_ranks_per_node(env) == expected


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "4,2(x2)"}, ["SLURM_STEP_TASKS_PER_NODE", "4,2(x2)"]),
        ({"SLURM_TASKS_PER_NODE": "many"}, ["SLURM_TASKS_PER_NODE", "many"]),
        ({"SLURM_NTASKS_PER_NODE": "0"}, ["rank 5"]),
        # --distribution=cyclic: ranks 0, 2, 4, 6 are on the first of the two nodes.
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_LOCALID": "2"}, ["rank 5", "block"]),
    ],
)
def test_nodes_that_are_not_alike_are_refused(env, words):
    with pytest.raises(ConfigError, match=mentions(*words)):
        read_ranks_per_node(SLURM | env)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "0"}, ["RANK=0", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]),
        (TORCHRUN | {"MASTER_PORT": ""}, ["RANK=3", "MASTER_PORT"]),
        (TORCHRUN | {"RANK": "x"}, ["RANK ('x')", "integer"]),
        (TORCHRUN | {"RANK": "4"}, ["RANK (4)", "WORLD_SIZE (4)"]),
        (TORCHRUN | {"LOCAL_RANK": "-1"}, ["LOCAL_RANK (-1)"]),
        (SLURM | TORCHRUN, ["RANK=3", "SLURM_PROCID=5"]),
        (SLURM | TORCHRUN | {"RANK": "5", "WORLD_SIZE": "6"}, ["WORLD_SIZE=6", "TASKS=8"]),
        (SLURM | {"SLURM_LOCALID": ""}, ["SLURM_LOCALID"]),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu[1"}, ["gpu[1"]),
        # The batch script itself, not a task: seven peers would never come.
        (SLURM | {"SLURM_STEP_ID": ""}, ["SLURM_NTASKS=8", "srun"]),
    ],
)
def test_contradictions_name_the_variables(env, words):
    with pytest.raises(ConfigError) as caught:
        read_placement(env)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("gpu[007-009,12],cpu1", "gpu007"),
        ("rack[2-3]n[08-11]", "rack2n08"),
        ("a-b[1-2].site.org", "a-b1.site.org"),
    ],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host


def test_seeds_give_the_same_numbers_again():
    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    seed_everything(5)
    first = draw()
    seed_everything(5)
    assert draw() == first
    seed_everything(6)
    assert draw() != first


def run_program(body: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", *TORCHRUN))}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(body)],
        env=clean | env,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


class Ended(NamedTuple):
    """How a process ended."""

    returncode: int
    stdout: str
    stderr: str


def run_each(imports: str, bodies: Sequence[tuple[str, dict[str, str]]]) -> list[Ended]:
    """Each body in a process of its own, with its environment: forks of one with the imports."""
    done = run_program(
        "import json, os, sys, tempfile\n"
        f"{imports}\n"
        "ended = []\n"
        f"for body, env in {[(textwrap.dedent(body), env) for body, env in bodies]!r}:\n"
        "    files = [tempfile.TemporaryFile('w+') for _ in range(2)]\n"
        "    if not (pid := os.fork()):\n"
        "        os.dup2(files[0].fileno(), 1)\n"
        "        os.dup2(files[1].fileno(), 2)\n"
        "        os.environ.update(env)\n"
        "        exec(body)\n"
        "        sys.exit()\n"
        "    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
        "    said = [(file.seek(0), file.read())[1] for file in files]\n"
        "    ended.append((code, *said))\n"
        "print(json.dumps(ended), flush=True)\n"
        "os._exit(0)\n"
    )
    assert done.returncode == 0, done.stderr
    return [Ended(*one) for one in json.loads(done.stdout)]


ALONE = """
    import os, torch.distributed as dist
    world = process_group.start(600)
    dist.all_reduce(torch.ones(1, device=world.device))
    dist.new_group([0], backend="gloo").rank()
    print(world.rank, world.world_size, world.local_rank, dist.is_initialized())
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR",
                 "VLLM_ENABLE_V1_MULTIPROCESSING",
                 "VLLM_CPU_OMP_THREADS_BIND"):
        print(name, os.environ[name])
    assert int(os.environ["MASTER_PORT"]) > 0
"""


def test_start_alone_and_at_ports_that_are_not_its_own():
    """Alone it brings up a group, and what vLLM reads. Torch knows no limit for a port that
    accepts, and tries another one twice: it must not keep a rank."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        socket.create_server(("", 0)) as other,
    ):
        port = other.getsockname()[1]
        mute = rank_of(1, silent.getsockname()[1], GAPO_ATTEMPT="7.0")
        alone, unanswered, taken = run_each(
            "import torch; from gapo_megatron.run import process_group, fail_fast",
            [
                (ALONE, {}),
                (MEET.format(timeout_s=0.5, alike={}), mute),
                (MEET.format(timeout_s=60, alike={}), rank_of(0, port, GAPO_ATTEMPT="7.0")),
            ],
        )
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout.splitlines() == [
        "0 1 0 True",
        "RANK 0",
        "WORLD_SIZE 1",
        "LOCAL_RANK 0",
        "MASTER_ADDR 127.0.0.1",
        "VLLM_ENABLE_V1_MULTIPROCESSING 0",
        "VLLM_CPU_OMP_THREADS_BIND nobind",
    ]
    assert unanswered.returncode == 1
    assert "Timeout" in unanswered.stderr and "in _meet" in unanswered.stderr
    assert taken.returncode == 1 and "Traceback" not in taken.stderr
    assert "MASTER_PORT" in taken.stderr and str(port) in taken.stderr


@pytest.mark.parametrize(
    ("given", "ranks_per_layer", "expected"), [({}, 1, None), ({}, 2, "1"), ({QUEUES: "8"}, 2, "8")]
)
def test_one_hardware_queue_only_where_layers_are_cut(
    monkeypatch, given, ranks_per_layer, expected
):
    monkeypatch.setattr(os, "environ", given.copy())
    choose_cuda_queues(ranks_per_layer=ranks_per_layer)
    assert os.environ.get(QUEUES) == expected


class Process:
    """One that comes to a store, with an environment and a number of its own."""

    def __init__(self, rank: int, pid: int, *, launch: str = "", **alike: object) -> None:
        self.rank, self.pid, self.launch, self.alike = rank, pid, launch, alike

    def come(self, store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """Raises what `recognize` does."""
        with monkeypatch.context() as patch:
            patch.setattr(process_group.os, "getpid", lambda: self.pid)
            for name in ("SLURM_STEP_ID", "TORCHELASTIC_RUN_ID"):
                patch.delenv(name, raising=False)
            patch.setenv("GAPO_ATTEMPT", self.launch)
            recognize(store, self.rank, self.alike, where="host:29500")


RUN = {"run": "/runs/a", "run.seed": 1, "WORLD_SIZE": 2}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"run.seed": 2}, ConfigError, ["run.seed", 1, 2]),
        ({"run": "/runs/b"}, ConfigError, ["run", "/runs/a", "/runs/b"]),
        ({"WORLD_SIZE": 3}, ConfigError, ["WORLD_SIZE", 2, 3]),
        ({"objective.method": "gspo"}, ConfigError, ["objective.method", "gspo"]),
        # At another port, which the launcher gives its next attempt, it may work.
        ({"launch": "8.0"}, MachineError, ["launch", "7.0", "8.0"]),
        ({"launch": "8.0", "run": "/runs/b"}, MachineError, ["/runs/a", "/runs/b"]),
    ],
)
def test_a_stranger_is_told_of_and_the_run_that_it_met_goes_on(monkeypatch, changes, error, words):
    store = dist.HashStore()
    Process(0, 100, **{"launch": "7.0", **RUN}).come(store, monkeypatch)
    stranger = Process(1, 201, **{"launch": "7.0", **RUN, **changes})
    with pytest.raises(error, match=mentions(":100", ":201", "host:29500", *words)):
        stranger.come(store, monkeypatch)
    Process(1, 101, **{"launch": "7.0", **RUN}).come(store, monkeypatch)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_run_started_twice_is_told_of(monkeypatch, rank):
    """Nothing tells the two apart but that a rank is there already."""
    store = dist.HashStore()
    for one in range(2):
        Process(one, 100 + one, **RUN).come(store, monkeypatch)
    with pytest.raises(ConfigError, match=mentions(f"{100 + rank}", ":200", f"rank {rank}")):
        Process(rank, 200, **RUN).come(store, monkeypatch)


@pytest.mark.parametrize("text", [b"\xff", "[]", '{"process": "a:1", "alike": {}}'])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_no_rank_writes_is_refused_by_name(monkeypatch, text, rank):
    """A stranger, or another program, was at the store first."""
    store = dist.HashStore()
    store.set("gapo_megatron/0", text)
    with pytest.raises(MachineError, match=mentions("gapo_megatron/0", "host:29500")):
        Process(rank, 100 + rank, **RUN).come(store, monkeypatch)


def rank_of(rank: int, port: int, **env: str) -> dict[str, str]:
    shared = {"LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    return {"RANK": str(rank), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", **shared, **env}


MEET = """
    import os, time
    from gapo_megatron.run import process_group
    from gapo_megatron.run.fail_fast import fail_fast
    process_group._GRACE_S = 0.5
    with fail_fast():
        world = process_group.start({timeout_s}, alike={alike})
        import torch.distributed as dist
        names = [None, None]
        dist.all_gather_object(names, os.environ["GAPO_ATTEMPT"])
        print(*names)
        while not os.path.exists(os.environ.get("WAIT_FOR", "/")):
            time.sleep(0.05)
        dist.barrier()
"""


@pytest.mark.system
@pytest.mark.parametrize("same_config", [False, True])
def test_two_launches_with_one_port_never_become_one_group(tmp_path, same_config):
    """The one that has the port goes on; both ranks of the other say why they do not."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    done: dict[tuple[str, int], subprocess.CompletedProcess[str]] = {}

    def start(launch: str, rank: int) -> None:
        run = {"run": "/runs/a" if same_config else f"/runs/{launch}"}
        env = rank_of(rank, port, GAPO_ATTEMPT=launch, GAPO_ATTEMPT_DIR=str(tmp_path / launch))
        # The one that has the port keeps it until the other has ended, however late that comes.
        env["WAIT_FOR"] = str(tmp_path / "other has ended")
        done[launch, rank] = run_program(MEET.format(timeout_s=600, alike=run), **env)
        if (launch, 1 - rank) in done:
            (tmp_path / "other has ended").touch()

    for launch in ("one", "other"):
        (tmp_path / launch).mkdir()
    threads = [
        threading.Thread(target=start, args=(launch, rank))
        for rank in (0, 1)
        for launch in ("one", "other")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lost, won = sorted(("one", "other"), key=lambda launch: done[launch, 0].returncode == 0)
    for rank in (0, 1):
        assert done[won, rank].returncode == 0, done[won, rank].stderr
        assert done[won, rank].stdout.splitlines()[-1] == f"{won} {won}"
        assert done[lost, rank].returncode == 1
        assert "Traceback" not in done[lost, rank].stderr
        record = json.loads((tmp_path / lost / f"failure_{rank}.json").read_text())
        assert record["error"] == "MachineError"
    assert f"launch {lost}" in record["message"] and f"launch {won}" in record["message"]


STATEMENTS = [  # the exit code, and whether a traceback is shown
    ("raise ConfigError('batch.x (3) must be even')", 2, False),
    ("raise ConversionError('a tensor has no place')", 2, False),
    ("raise CheckpointError('step_3 is damaged')", 1, False),
    ("raise MachineError('metrics.jsonl: No space left on device')", 1, False),
    ("raise OSError(errno.ENOSPC, 'No space left on device', 'metrics.jsonl')", 1, False),
    ("raise OSError(errno.EIO, 'Input/output error')", 1, True),  # nothing else says where
    ("raise ConfigError('x') from OSError(errno.ENOENT, 'No such file')", 2, False),
    # A moment of bad disk: the launcher starts again what ends so.
    ("raise DataError('x is damaged') from OSError(errno.ESTALE, 'Try again')", 1, False),
    ("raise FileNotFoundError(errno.ENOENT, 'No such file', 'x')", 1, True),
    ("raise ZeroDivisionError('oops')", 1, True),
    ("raise SystemExit(7)", 7, False),
    ("raise KeyboardInterrupt", 130, False),
    ("pass", 0, False),
]


def test_fail_fast_exit_codes_and_messages(tmp_path):
    """The atexit handler stands for the teardown of a process group in which nobody answers."""
    body = """
        import atexit
        atexit.register(lambda: print("teardown ran"))
        with fail_fast():
            {}
    """
    # What is wrong with a variable must not keep the error from its file.
    left = {"GAPO_ATTEMPT_DIR": str(tmp_path), "GAPO_JOB_END": "soon"}
    bodies = [(body.format(statement), {"RANK": "3"}) for statement, *_ in STATEMENTS]
    *results, told = run_each(
        "import errno; from gapo_megatron.errors import *\n"
        "from gapo_megatron.run.fail_fast import fail_fast\n"
        "from gapo_megatron.run.processes import launcher",
        [*bodies, (body.format("launcher()"), left)],
    )
    for (statement, code, shows_traceback), result in zip(STATEMENTS, results, strict=True):
        assert result.returncode == code, statement
        assert ("Traceback" in result.stderr) == shows_traceback, statement
        failed = code in (1, 2, 130)
        assert ("rank 3" in result.stderr) == failed, statement
        assert ("teardown ran" in result.stdout) == (not failed), statement
        if failed and not shows_traceback:
            (line,) = result.stderr.splitlines()
            words = ("even", "place", "damaged", "device", "error", "x")
            assert code == 130 or line.endswith(words)
    assert told.returncode == 1
    assert json.loads((tmp_path / "failure_0.json").read_text())["error"] == "ValueError"


def test_a_full_disk_below_the_log_does_not_keep_a_rank():
    """Its launcher waits for the exit code; the teardown of a group may never end."""
    result = run_program(
        """
        import atexit, os, sys
        from gapo_megatron.errors import ConfigError
        from gapo_megatron.run.fail_fast import fail_fast
        atexit.register(lambda: os.write(2, b"teardown ran"))
        full = open("/dev/full", "w")
        with fail_fast():
            sys.stderr = sys.stdout = full
            print("a line that is not written yet")
            raise ConfigError("batch.x (3) must be even")
        """
    )
    assert (result.returncode, result.stderr) == (2, "")


def test_a_moment_of_bad_disk_is_not_for_ever(tmp_path):
    """A launcher starts again what ends so."""
    body = """
        folder = Path({folder!r})
        path = folder / "finished.json"
        def fail(*arguments, **options):
            raise OSError(errno.ESTALE, "Stale file handle", str(folder / {name!r}))
        with fail_fast():
            os.open = tempfile.TemporaryFile = Path.iterdir = fail
            {use}
    """
    uses = {
        "read_json(path)": "finished.json",
        "is_finished(folder, num_steps=5)": "finished.json",
        "check_writable(folder)": "",
    }
    results = run_each(
        "import errno; from pathlib import Path\n"
        "from gapo_megatron.io.documents import read_json\n"
        "from gapo_megatron.run.fail_fast import fail_fast\n"
        "from gapo_megatron.io.run_folder import check_writable, is_finished\n",
        [(body.format(folder=str(tmp_path), use=use, name=name), {}) for use, name in uses.items()],
    )
    for name, result in zip(uses.values(), results, strict=True):
        assert result.returncode == 1
        assert str(tmp_path / name) in result.stderr and "Stale" in result.stderr


def test_on_a_gpu_groups_are_made_when_they_are_used(monkeypatch):
    """With `device_id`, torch would split the world's communicator for each of them, in one order.

    Barriers then take the device that the first collective used: not one guessed by the rank.
    """
    calls = []
    monkeypatch.setattr(process_group, "_choose_device", lambda _: torch.device("cuda", 3))
    monkeypatch.setattr(process_group, "configure_logging", lambda *_, **__: None)
    monkeypatch.setattr(process_group, "check_binding", lambda *_: None)
    monkeypatch.setattr(
        process_group.dist, "init_process_group", lambda *a, **k: calls.append((a, k))
    )
    monkeypatch.setattr(process_group.dist, "barrier", lambda **k: calls.append(k))
    monkeypatch.setattr(process_group.dist, "new_group", lambda **k: None)
    monkeypatch.setattr(process_group.os, "environ", {})
    world = process_group.start(600)
    (backend, arguments), barrier = calls
    assert backend == ("nccl",) and "device_id" not in arguments
    assert barrier == {"device_ids": [3]} and world.device.index == 3
