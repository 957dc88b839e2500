"""requirements/gpu.txt as it is installed: what metadata and a resolver cannot tell."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from gapo_tools.diagnosis.libraries import TRANSFORMER_ENGINE
from tests.cuda_setup import ROOT, needs_cuda_wheels
from tests.test_requirements import LOCKS, pins, unmet

pytestmark = needs_cuda_wheels()


def locked() -> dict[str, metadata.Distribution]:
    """The packages of the lock, as imports find them: setuptools puts its own behind them."""
    return {name: metadata.distribution(name) for name in pins(LOCKS["gpu"])}


def test_the_environment_is_the_lock() -> None:
    lock = pins(LOCKS["gpu"])
    assert {name: one.version.partition("+")[0] for name, one in locked().items()} == lock


def test_what_every_package_asks_for_is_locked() -> None:
    lock, missing = pins(LOCKS["gpu"]), []
    for name, one in locked().items():
        for text in one.requires or []:
            asked = Requirement(text)
            if asked.marker is None or asked.marker.evaluate({"extra": ""}):
                missing += [f"{name}: {text}"] if unmet(asked, lock) else []
    assert missing == []


def test_no_two_packages_have_a_file_that_differs() -> None:
    """The one that is installed last would win: cuda-python 12 beside cuda-bindings 13 is one."""
    owners: dict[str, dict[str, str]] = defaultdict(dict)
    for name, one in locked().items():
        for file in one.files or []:
            if file.hash:
                owners[str(file)][name] = file.hash.value
    differing = {
        file: sorted(hashes) for file, hashes in owners.items() if len(set(hashes.values())) > 1
    }
    # Of the two's own builds, packed by mistake: nothing imports it.
    differing.pop("build_backend.py", None)
    assert differing == {}


def test_the_headers_that_transformer_engine_is_compiled_with() -> None:
    """The toolkit's folder alone, which it takes for all of CUDA, would not do."""
    folder = Path(str(metadata.distribution("nvidia-nccl-cu13").locate_file("nvidia")))
    homes = {"cuda_runtime.h": "cu13", "cublas_v2.h": "cu13", "nccl.h": "nccl", "cudnn.h": "cudnn"}
    assert {
        header: [path.parts[-3] for path in folder.glob(f"*/include/{header}")] for header in homes
    } == {header: [home] for header, home in homes.items()}
    assert (folder / "cu13" / "bin" / "nvcc").is_file()  # why the toolkit's folder is found
    # What the setting is called that makes it look into all of them.
    setting = "NVTE_BUILD_USE_NVIDIA_WHEELS"
    assert f"{setting}=1" in (ROOT / "tools" / "setup_gpu_env.sh").read_text()


def test_the_doctor_finds_transformer_engine() -> None:
    """Outside a container NCCL is found because torch has loaded it."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRANSFORMER_ENGINE],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert pins(LOCKS["gpu"])["transformer-engine"] in result.stdout


def test_the_kernels_that_the_container_downloads_have_a_command() -> None:
    """One that starts without a GPU, as where an image is built."""
    recipe = (ROOT / "slurm" / "container.def").read_text()
    (command,) = re.findall(r"python (-m flashinfer .*)$", recipe, re.MULTILINE)
    result = subprocess.run(
        [sys.executable, *command.split(), "--dry-run"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    version = pins(LOCKS["gpu"])["flashinfer-python"]
    wheels = set(re.findall(rf"^Requirement: (\S+)=={re.escape(version)}", result.stdout, re.M))
    assert wheels == {"flashinfer-cubin", "flashinfer-jit-cache"}
