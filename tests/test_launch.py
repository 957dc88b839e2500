from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from gapo_megatron.errors import ConfigError
from gapo_megatron.launch.environment import seed_everything
from gapo_megatron.launch.placement import Placement, first_host, read_placement, world_size
from tests.waiting import HANG_S

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}
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


def test_alone_without_any_variable():
    assert read_placement({}) == Placement(0, 1, 0, "", 0)


def test_torchrun():
    assert read_placement(TORCHRUN) == Placement(3, 4, 1, "host", 29500)


def test_slurm():
    assert read_placement(SLURM) == Placement(5, 8, 1, "gpu017", 24567)


def test_world_size_of_a_dry_run(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    assert world_size() == 4


def test_slurm_step_smaller_than_the_job():
    env = SLURM | {"SLURM_NTASKS": "64", "SLURM_STEP_NODELIST": "gpu018", "SLURM_STEP_ID": "2"}
    assert read_placement(env) == Placement(5, 8, 1, "gpu018", 24569)


def test_slurm_keeps_a_given_master():
    env = SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}
    assert read_placement(env) == Placement(5, 8, 1, "10.0.0.1", 4000)


def test_torchrun_inside_an_srun_task_has_ranks_of_its_own():
    env = SLURM | TORCHRUN | {"TORCHELASTIC_RUN_ID": "x", "SLURM_PROCID": "1"}
    assert read_placement(env).rank == 3


def test_ranks_exported_by_hand_agree_with_slurm():
    env = SLURM | TORCHRUN | {"RANK": "5", "WORLD_SIZE": "8"}
    assert read_placement(env) == Placement(5, 8, 1, "host", 29500)


def test_a_shell_inside_an_allocation_is_alone():
    assert read_placement({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}) == Placement()


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
        ("node1,node2", "node1"),
        ("gpu[007-009,12],cpu1", "gpu007"),
        ("gpu[12,07]", "gpu12"),
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


def test_start_alone_brings_up_a_group_and_what_vllm_reads():
    result = run_program(
        """
        import os, torch, torch.distributed as dist
        from gapo_megatron.launch import environment
        world = environment.start(600, cpu_kv_cache_gib=3)
        dist.all_reduce(torch.ones(1, device=world.device))
        dist.new_group([0], backend="gloo").rank()
        print(world.rank, world.world_size, world.local_rank, dist.is_initialized())
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR",
                     "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_KVCACHE_SPACE",
                     "VLLM_CPU_OMP_THREADS_BIND"):
            print(name, os.environ[name])
        assert int(os.environ["MASTER_PORT"]) > 0
        """
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "0 1 0 True",
        "RANK 0",
        "WORLD_SIZE 1",
        "LOCAL_RANK 0",
        "MASTER_ADDR 127.0.0.1",
        "VLLM_ENABLE_V1_MULTIPROCESSING 0",
        "VLLM_CPU_KVCACHE_SPACE 3",
        "VLLM_CPU_OMP_THREADS_BIND nobind",
    ]


@pytest.mark.parametrize(
    ("statement", "code", "shows_traceback"),
    [
        ("raise ConfigError('batch.x (3) must be even')", 2, False),
        ("raise CheckpointError('step_3 is damaged')", 1, False),
        ("raise ZeroDivisionError('oops')", 1, True),
        ("raise SystemExit(7)", 7, False),
        ("raise KeyboardInterrupt", 130, False),
        ("pass", 0, False),
    ],
)
def test_fail_fast_exit_codes_and_messages(statement, code, shows_traceback):
    # The atexit handler stands for the teardown of a process group in which nobody answers.
    result = run_program(
        f"""
        import atexit
        from gapo_megatron.errors import CheckpointError, ConfigError
        from gapo_megatron.launch.fail_fast import fail_fast
        atexit.register(lambda: print("teardown ran"))
        with fail_fast():
            {statement}
        """,
        RANK="3",
    )
    assert result.returncode == code
    assert ("Traceback" in result.stderr) == shows_traceback
    failed = code in (1, 2, 130)
    assert ("rank 3" in result.stderr) == failed
    assert ("teardown ran" in result.stdout) == (not failed)
    if code == 2:
        (line,) = result.stderr.splitlines()
        assert line.endswith("batch.x (3) must be even")
