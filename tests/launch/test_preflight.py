"""The check of nodes: processes on this machine that call themselves nodes, some of them bad."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gapo_megatron.launch import node_checks
from gapo_megatron.launch.node_checks import (
    check_cache,
    check_gpus,
    check_memory,
    parse_gpus,
    visible_gpus,
)
from gapo_megatron.launch.preflight import Preflight
from tests.executables import write_program
from tests.messages import mentions
from tests.waiting import HANG_S, wait_until

ROOT = Path(__file__).parents[2]
# Addresses of the loopback: names that resolve, in the order of their names.
A, B, C = NODES = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
TIMEOUT_S = 180.0
"""A third, which is waited in vain, must suffice to import torch three times on two busy cores."""
NO_WAIT_S = 3600.0
"""Where nobody is waited for in vain."""

# What nvidia-smi prints: --format=csv,noheader,nounits of node_checks._GPU_FIELDS.
UUID = "GPU-2b7a5a3e-0c1d-4f6e-9a3b-00000000000"  # and the index
GPU_LINE = f"{{i}}, {UUID}{{i}}, NVIDIA H200, 575.57.08, 143771, {{used}}, {{ecc}}"


def gpu_lines(count: int, *, used: int = 4, ecc: str = "0") -> str:
    return "".join(GPU_LINE.format(i=i, used=used, ecc=ecc) + "\n" for i in range(count))


@dataclass
class Nodes:
    """Starts preflight tasks in `folder` and reads what they left."""

    folder: Path
    num_nodes: int
    timeout_s: float = NO_WAIT_S
    began: float = field(default_factory=time.time)
    tasks: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    @property
    def check(self) -> Path:
        return self.folder / "attempt" / "check"

    def start(self, node: str, *options: str, prefix: tuple[str, ...] = (), **env: str) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "CUDA_"))}
        command = [*prefix, sys.executable, "-m", "gapo_megatron.launch.preflight"]
        command += ["--output", str(self.check), "--num-nodes", str(self.num_nodes)]
        command += ["--timeout-s", str(self.timeout_s), *options]
        if "--run-dir" not in options:
            command += ["--run-dir", str(self.folder / "run")]
        self.tasks[node] = subprocess.Popen(
            command,
            env=kept | {"SLURMD_NODENAME": node, "OMP_NUM_THREADS": "1"} | env,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self) -> dict[str, str]:
        """Wait for all; what each printed."""
        said = {node: task.communicate(timeout=HANG_S)[0] for node, task in self.tasks.items()}
        assert {task.returncode for task in self.tasks.values()} <= {0, -9}, said
        return said

    def good(self) -> list[str]:
        return sorted(path.stem for path in self.check.glob("*.ok"))

    def verdict(self, node: str) -> dict[str, str]:
        """Details of the checks that failed on a node."""
        verdict = json.loads((self.check / f"{node}.json").read_text())
        assert set(verdict) == {"node", "ok", "checks", "unix_s"}
        assert verdict["node"] == node
        assert verdict["ok"] == all(check["ok"] for check in verdict["checks"])
        assert self.began <= verdict["unix_s"] <= time.time()
        return {check["name"]: check["detail"] for check in verdict["checks"] if not check["ok"]}

    def link(self, node: str) -> str:
        checks = json.loads((self.check / f"{node}.json").read_text())["checks"]
        return next(check["detail"] for check in checks if check["name"] == "link")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    (tmp_path / "attempt").mkdir()
    running = Nodes(tmp_path, num_nodes=3)
    yield running
    for task in running.tasks.values():
        task.kill()
        task.wait()


def without_network() -> tuple[str, ...]:
    """Prefix of a command: it is alone in the world, with not even a loopback."""
    prefix = ("unshare", "--map-root-user", "--net")
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("this user cannot make a network namespace")
    return prefix


def stand_in(folder: Path, script: str) -> str:
    """A PATH on which nvidia-smi is this script."""
    write_program(folder / "nvidia-smi", script)
    return f"{folder}:{os.environ['PATH']}"


# --- several nodes --------------------------------------------------------------------------------


def test_a_node_that_lacks_a_gpu_stays_out_of_the_all_reduce(nodes: Nodes) -> None:
    """The names of these nodes do not resolve: NODE_ADDRESS says how they reach each other."""
    first, second, third = names = ["2", "3", "4"]
    for count in (7, 8):
        (nodes.folder / f"smi_{count}").write_text(gpu_lines(count))
    shows = f"[ $SLURMD_NODENAME = {second} ] && n=7 || n=8; cat {nodes.folder}/smi_$n"
    path = stand_in(nodes.folder / "bin", shows)
    env = {"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "PATH": path}
    for node in names:
        nodes.start(node, "--address", "127.0.0.%s", **env)
    said = nodes.end()
    assert nodes.good() == [first, third]
    assert nodes.verdict(first) == {}
    [(check, detail)] = nodes.verdict(second).items()
    assert check == "gpus"
    assert "7 of 8" in detail
    assert re.search(r"gloo.* 2 of 3 nodes", nodes.link(third))
    assert said[first] == said[third] == ""
    assert re.fullmatch(rf".*{second} .*gpus: {detail}\n", said[second])


@pytest.mark.system
def test_a_node_that_never_starts_is_not_waited_for_and_comes_too_late(nodes: Nodes) -> None:
    nodes.timeout_s = TIMEOUT_S
    nodes.start(A)
    nodes.start(C)
    nodes.end()
    assert nodes.good() == [A, C]
    assert "over 2 of 3 nodes" in nodes.link(A)
    assert not (nodes.check / ".members_1").exists()  # the first all_reduce was enough
    nodes.start(B)
    nodes.end()
    assert nodes.good() == [A, C]
    assert re.match(f"too late.*{A}, {C}", nodes.verdict(B)["link"])


@pytest.mark.system
def test_the_others_go_on_without_a_node_that_died_after_its_verdict(nodes: Nodes) -> None:
    nodes.timeout_s = TIMEOUT_S
    # The first of the list, which would open the port.
    nodes.start(A)
    wait_until((nodes.check / f"{A}.json").exists, "its verdict")
    nodes.tasks[A].kill()
    nodes.tasks[A].wait()
    nodes.start(B)
    nodes.start(C)
    nodes.end()
    assert nodes.good() == [B, C]
    assert (nodes.check / ".members_0").read_text().split() == NODES
    assert (nodes.check / ".members_1").read_text().split() == [B, C]
    assert "over 2 of 3 nodes" in nodes.link(B)


@pytest.mark.system
def test_a_node_without_network_is_the_only_bad_one(nodes: Nodes) -> None:
    nodes.timeout_s = TIMEOUT_S
    nodes.start(A)
    nodes.start(B, prefix=without_network())
    nodes.start(C)
    nodes.end()
    assert nodes.good() == [A, C]
    assert re.search(rf"(cannot reach|connecting to) {A}.*{A}, {C} ", nodes.verdict(B)["link"])
    assert (nodes.check / ".members_1").read_text().split() == [A, C]


# --- one node -------------------------------------------------------------------------------------


def test_what_a_node_finds_by_itself(nodes: Nodes) -> None:
    nodes.num_nodes = 2
    nodes.start(A, "--run-dir", "/dev/null/run", SLURM_GPUS_ON_NODE="1", PATH="/nowhere")
    nodes.start(B, "--min-free-gib", "1e9")
    said = nodes.end()
    assert nodes.good() == []
    found = nodes.verdict(A)
    assert set(found) == {"run_dir", "disk_space", "gpus"}
    assert "/dev/null/run" in found["run_dir"]
    assert "/dev/null/run" in found["disk_space"]
    assert "nvidia-smi" in found["gpus"]
    assert re.search(r"[\d.]+ GiB.*1e\+09", nodes.verdict(B)["disk_space"])
    assert said[A].count(f"[check] {A} is bad: ") == 3


def test_a_process_that_dies_is_the_nodes_own_fault(nodes: Nodes) -> None:
    (nodes.folder / "torch.py").write_text("import os; os.kill(os.getpid(), 11)\n")
    nodes.num_nodes = 1
    nodes.start(A, PYTHONPATH=str(nodes.folder))
    nodes.end()
    assert nodes.good() == []
    assert re.search("-11.*importing torch", nodes.verdict(A)["link"])
    assert (nodes.check / f".ended_{A}").read_text() == "unfit\n"


def test_a_process_that_hangs_is_ended(nodes: Nodes) -> None:
    (nodes.folder / "torch.py").write_text("import time; time.sleep(3600)\n")
    nodes.num_nodes, nodes.timeout_s = 1, 3.0
    nodes.start(A, PYTHONPATH=str(nodes.folder))
    nodes.end()
    # A busy machine may need that for the interpreter alone.
    assert re.search(" 1 s .*(importing torch|starting python)", nodes.verdict(A)["link"])


# --- who tries again ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ended", "again"),
    [
        ({A: "broken", B: "broken"}, [A, B]),  # C is gone
        ({A: "broken", B: "broken", C: "apart"}, [A, B]),
        ({A: "broken", B: "apart", C: "apart"}, [B, C]),  # nobody reaches A
        ({A: "unfit", B: "apart", C: "apart"}, [B, C]),
        ({A: "broken", B: "broken", C: "unfit"}, [A, B]),
        ({A: "broken", B: "apart", C: "unfit"}, [A]),
        ({A: "broken", B: "broken", C: "broken"}, [A, B, C]),  # nobody to blame
        ({A: "ok", B: "ok", C: "broken"}, []),  # alone it would succeed
    ],
)
def test_who_tries_again(tmp_path: Path, ended: dict[str, str], again: list[str]) -> None:
    for node, outcome in ended.items():
        (tmp_path / f".ended_{node}").write_text(outcome)
    task = Preflight(A, tmp_path, num_nodes=3, third_s=600.0)
    assert task._remaining(NODES, time.monotonic()) == again


# --- GPUs, memory, packages -----------------------------------------------------------------------


OFF_ITS_BUS = "Unable to determine the device handle for GPU0000:CB:00.0: Unknown Error"
LOST = "0, [GPU is lost], [GPU is lost], 575.57.08, [GPU is lost], [GPU is lost], [GPU is lost]"


@pytest.mark.parametrize(
    ("script", "named"),
    [
        (f"echo {OFF_ITS_BUS}; exit 255", OFF_ITS_BUS),
        ("exec sleep infinity", "nvidia-smi"),
        (f"echo '{LOST}'", LOST),
        ("echo No devices were found", "No devices were found"),
    ],
    ids=["fails", "hangs", "lost", "none"],
)
def test_without_an_answer_of_nvidia_smi_the_node_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, named: str
) -> None:
    monkeypatch.setenv("PATH", stand_in(tmp_path, script))
    if "sleep" in script:
        monkeypatch.setattr(node_checks, "_COMMAND_TIMEOUT_S", 0.2)
    (check,) = check_gpus({"SLURM_GPUS_ON_NODE": "8"})
    assert not check.ok
    assert named in check.detail


def test_stray_processes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = gpu_lines(1, used=5120, ecc="3") + gpu_lines(2, ecc="[N/A]").splitlines()[1] + "\n"
    (tmp_path / "gpus").write_text(lines)
    (tmp_path / "apps").write_text(f"{UUID}0, 4711\n{UUID}0, 815\n{UUID}1, 77\n")
    script = f"[[ $1 == --query-gpu=* ]] && cat {tmp_path}/gpus || cat {tmp_path}/apps"
    monkeypatch.setenv("PATH", stand_in(tmp_path / "bin", script))
    count, used, errors = check_gpus({"SLURM_GPUS_ON_NODE": "2"})
    assert count.ok
    assert not errors.ok and "GPU 0: 3" in errors.detail
    assert not used.ok
    assert used.detail == (
        "GPU 0: 5120 MiB, by processes 815, 4711; at most 1024 MiB may be in use"
    )
    # A job on the other GPU has nothing to fear from them.
    mine = {"SLURM_GPUS_ON_NODE": "1", "CUDA_VISIBLE_DEVICES": "1"}
    assert all(check.ok for check in check_gpus(mine))
    monkeypatch.setenv("PATH", "/nowhere")
    assert check_gpus({})[0].ok  # none are asked for, none needed


@pytest.mark.parametrize(
    ("setting", "indices"),
    [
        (None, [0, 1, 2]),
        ("0,2", [0, 2]),
        ("", []),
        (f"{UUID}1", [1]),
        ("MIG-4f6e", [0, 1, 2]),
    ],
)
def test_visible_gpus(setting: str | None, indices: list[int]) -> None:
    env = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    assert [gpu.index for gpu in visible_gpus(parse_gpus(gpu_lines(3)), env)] == indices


def test_memory_is_measured_against_what_the_job_was_given() -> None:
    everything = check_memory({})
    assert everything.ok
    assert "available of 2" in check_memory({"SLURM_MEM_PER_NODE": "2048"}).detail
    # A node that Slurm believes to be larger than it is.
    given = check_memory({"SLURM_MEM_PER_NODE": "1000000000"}).detail.partition("available of ")[2]
    assert given == everything.detail.partition("available of ")[2]


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_checks, "PACKAGES", ("json", "no_such.module", "json.nothing"))
    check = node_checks.check_packages()
    assert not check.ok
    assert check.detail.endswith("does not find no_such.module, json.nothing")


def test_nobody_else_can_write_the_kernels_that_this_user_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "disk" / "cache"
    assert check_cache({}).ok  # not started by slurm/launch.sh
    env = {"CACHE_DIR": str(folder)}
    assert check_cache(env) == check_cache(env)  # the second finds it there
    assert check_cache(env).ok
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    check = check_cache(env)
    assert not check.ok
    assert re.search(mentions("CACHE_DIR", str(folder), "drwxrwxrwx"), check.detail)
    elsewhere = tmp_path / "link"
    elsewhere.symlink_to(folder.parent)  # somebody else's way to say where
    (tmp_path / "file").touch()
    for path in (elsewhere, tmp_path / "file", tmp_path / "file" / "below"):
        check = check_cache({"CACHE_DIR": str(path)})
        assert not check.ok
        assert re.search(mentions("CACHE_DIR", str(path)), check.detail)
    folder.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    check = check_cache(env)
    assert not check.ok and f"user {tmp_path.stat().st_uid};" in check.detail


def test_packages_are_those_the_package_imports() -> None:
    found = set()
    ours = ("gapo_megatron", "gapo_tools")
    for path in (path for name in ours for path in (ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").split(".")[0])
    found -= {*sys.stdlib_module_names, *ours}
    # Not of the ranks: reports, preparation, submission, the service's certificate. Others are
    # optional.
    found -= {
        "cryptography",
        "jinja2",
        "matplotlib",
        "pyarrow",
        "sentencepiece",
        "submitit",
        "tokenizers",
    }
    found -= {"tensorboard", "transformer_engine", "triton", "verifiers", "wandb"}
    found -= {"reasoning_gym", "websockets"}  # of some data and environments
    assert found == {name.split(".")[0] for name in node_checks.PACKAGES}
