"""What the doctor says of installed libraries: real processes, folders as pip leaves them."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from gapo_megatron.launch.node_checks import CommandError
from gapo_tools.diagnosis.ask import ask
from gapo_tools.diagnosis.finding import Finding
from gapo_tools.diagnosis.libraries import (
    FLASH_ATTENTION,
    judge_flashinfer,
    judge_nccl,
    judge_torch,
    look_at_compiler,
    look_at_transformer_engine,
)
from tests.doctor_setup import install, install_nvidia_apex, install_web_apex, path_with
from tests.messages import mentions
from tests.waiting import HANG_S

ROOT = Path(__file__).parents[3]
CPU = {"version": "2.13.0+cpu", "cuda": None, "num_gpus": 0, "cudnn": None, "seconds": 1.0}
GPU = {
    "version": "2.13.0+cu130",
    "cuda": "13.0",
    "num_gpus": 8,
    "cudnn": 91002,
    "seconds": 1.0,
    "nccl": "2.28.9",
    "nccl_paths": ["/site/nvidia/nccl/lib/libnccl.so.2"],
}
"""An answer to `TORCH` from a node with GPUs."""
LOGIN_NODE = GPU | {"num_gpus": 0}
LOOK = """
import dataclasses, json, os, sys
from functools import partial
from gapo_tools.diagnosis.ask import ask
from gapo_tools.diagnosis.libraries import look_at_libraries
found = look_at_libraries(json.loads(sys.argv[1]), partial(ask, env=os.environ), os.environ)
print(json.dumps({one.name: dataclasses.asdict(one) for one in found}))
"""


def look(site: Path, torch: dict[str, Any]) -> dict[str, Finding]:
    """The section as an interpreter with `site` on its path says it, by name."""
    env = path_with(site)
    env["PYTHONPATH"] += f":{ROOT}"
    command = [sys.executable, "-c", LOOK, json.dumps(torch)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    return {name: Finding(**one) for name, one in json.loads(done.stdout).items()}


def test_nothing_is_wrong_where_nothing_is_installed(tmp_path: Path) -> None:
    found = look(tmp_path, CPU)
    assert {one.status for one in found.values()} == {"ok"}
    assert found["apex"].detail.startswith("not installed")
    assert "nccl" not in found


def test_the_apex_of_the_public_index_is_recognised_and_not_run(tmp_path: Path) -> None:
    install_web_apex(tmp_path)
    (tmp_path / "apex" / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    found = look(tmp_path, LOGIN_NODE)
    engine, apex = found["import transformer_engine"], found["apex"]
    assert (engine.status, engine.detail) == ("warn", "not installed")
    assert "flashinfer" not in found
    assert apex.status == "warn"
    assert re.search(mentions("not NVIDIA's", "Pyramid toolkit", "0.9.10.dev0"), apex.detail)
    assert re.search(mentions(f"{sys.executable} -m pip uninstall apex", "--apex"), apex.advice)
    assert not (tmp_path / "ran").exists()


def test_the_apex_of_nvidia_without_its_kernels(tmp_path: Path) -> None:
    install_nvidia_apex(tmp_path, with_kernels=False)
    apex = look(tmp_path, CPU)["apex"]
    assert apex.status == "warn" and "not NVIDIA's" not in apex.detail
    named = mentions("NVIDIA's", "'amp_C'", "'fused_weight_gradient_mlp_cuda'")
    assert re.match(named, apex.detail)


def test_libraries_that_do_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a node with GPUs, where an installed Transformer Engine is taken."""
    raises = "raise ImportError('libx.so: undefined symbol: _ZN3c105Error')\n"
    install(tmp_path, "transformer_engine", "2.20.2", {"transformer_engine/__init__.py": raises})
    for name, module in FLASH_ATTENTION.items():
        text = raises if name == "flash-attn" else ""
        install(tmp_path, name.replace("-", "_"), "2.8.3", {f"{module}/__init__.py": text})
    install(tmp_path, "triton", "3", {"triton/__init__.py": "import os; os.abort()\n"})
    found = look(tmp_path, GPU)
    engine, flash, triton = (
        found[name] for name in ("import transformer_engine", "flash-attn", "import triton")
    )
    assert engine.status == triton.status == "fail"
    assert engine.detail == "ImportError: libx.so: undefined symbol: _ZN3c105Error"
    assert "-6" in triton.detail
    assert flash.status == "warn"
    named = mentions("flash-attn 2.8.3", "flash-attn-3 2.8.3", f"flash-attn: {engine.detail}")
    assert re.search(named, flash.detail)
    assert "pip uninstall flash-attn;" in flash.advice
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    error = CommandError(engine.detail)
    assert look_at_transformer_engine({}, LOGIN_NODE, lambda _: error).status == "warn"


def test_libraries_that_load(tmp_path: Path) -> None:
    """Transformer Engine brings its compiled part into sys.modules, from a folder of its own."""
    inside = (
        "import sys, types\nm = sys.modules['transformer_engine_torch'] = types.ModuleType('m')\n"
    )
    files = {
        "transformer_engine/__init__.py": "__version__ = '2.20.2'\n",
        "transformer_engine/pytorch/__init__.py": f"{inside}m.__file__ = '/te/torch.so'\n",
    }
    install(tmp_path, "transformer_engine", "2.20.2", files)
    install_nvidia_apex(tmp_path, with_kernels=True)
    found = look(tmp_path, GPU)
    engine, apex = found["import transformer_engine"], found["apex"]
    assert (engine.status, engine.detail) == ("ok", "2.20.2 (/te/torch.so)")
    assert apex.status == "ok" and re.match(mentions("NVIDIA's", "0.1"), apex.detail)


def test_a_transformer_engine_for_another_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "transformer_engine_cu12", "2.20.2", {"transformer_engine/__init__.py": ""})
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    here = {"transformer-engine-cu12": metadata.distribution("transformer_engine_cu12")}
    found = look_at_transformer_engine(here, GPU, lambda _: pytest.fail("no need to import it"))
    assert found.status == "fail"
    assert re.search(mentions("CUDA 12", "13.0"), found.detail)
    assert "pip uninstall transformer-engine-cu12;" in found.advice


def test_torch_that_does_not_load_or_sees_no_gpu(tmp_path: Path) -> None:
    install(tmp_path, "torch", "2.13.0", {"torch/__init__.py": "import no_such_library\n"})
    broken = ask("import torch; print('{}')", path_with(tmp_path))
    assert isinstance(broken, CommandError)
    finding = judge_torch(broken, num_gpus=8)
    assert finding.status == "fail"
    assert finding.detail == "ModuleNotFoundError: No module named 'no_such_library'"

    assert judge_torch(LOGIN_NODE, num_gpus=0).status == "ok"
    named = mentions("2.13.0+cu130", "CUDA 13.0", "cuDNN 91002", "8 GPUs", "1.0 s")
    assert re.search(named, judge_torch(GPU, num_gpus=8).detail)
    assert judge_torch(GPU, num_gpus=8).status == "ok"
    blind = judge_torch(LOGIN_NODE, num_gpus=8)
    assert blind.status == "fail" and "driver" in blind.advice


def test_another_nccl_than_the_one_installed_for_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "nvidia_nccl_cu13", "2.28.9", {})
    monkeypatch.syspath_prepend(tmp_path)
    packaged = metadata.distribution("nvidia_nccl_cu13")
    (path,) = GPU["nccl_paths"]  # type: ignore[misc]
    assert judge_nccl(GPU, packaged) == Finding("libraries", "nccl", "ok", f"2.28.9 ({path})")
    of_the_site = GPU | {"nccl": "2.19.3", "nccl_paths": ["/opt/nccl/libnccl.so.2"]}
    found = judge_nccl(of_the_site, packaged)
    assert found.status == "warn"
    named = mentions("2.19.3 (/opt/nccl/libnccl.so.2)", "nvidia_nccl_cu13 2.28.9")
    assert re.search(named, found.detail)
    assert "LD_PRELOAD" in found.advice
    assert judge_nccl(of_the_site, None).status == "ok"  # a container's own
    both = GPU | {"nccl_paths": [path, "/opt/nccl/libnccl.so.2"]}
    assert re.search(mentions("two", "2.28.9", path), judge_nccl(both, packaged).detail)


def test_kernels_that_every_node_would_compile_are_missed(tmp_path: Path) -> None:
    install(tmp_path, "flashinfer_python", "0.7.0.post1", {})
    install(tmp_path, "flashinfer_cubin", "0.7.0.post1", {})
    found = look(tmp_path, GPU)["flashinfer"]
    assert found.status == "warn"
    assert re.search(mentions("flashinfer-jit-cache not installed"), found.detail)
    assert "download-kernels" in found.advice
    whole = dict.fromkeys(("flashinfer-python", "flashinfer-cubin"), "0.7.0.post1")
    whole["flashinfer-jit-cache"] = "0.7.0.post1+cu130"
    assert judge_flashinfer(whole).status == "ok"


@pytest.mark.parametrize(
    ("torch", "env", "status"),
    [
        (GPU, {}, "ok"),
        (GPU, {"CC": "/no/such/cc"}, "fail"),
        (LOGIN_NODE, {"CC": "/no/such/cc"}, "warn"),
    ],
    ids=["installed", "missing", "login node"],
)
def test_a_compiler_for_triton(
    torch: dict[str, Any],
    env: dict[str, str],
    status: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    found = look_at_compiler(torch, env)
    assert found.status == status
    assert ("/no/such/cc" in found.detail) == bool(env)
    if torch is GPU and not env:
        monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
        found = look_at_compiler(GPU, {})
        assert found.status == "fail" and str(tmp_path / "Python.h") in found.detail
