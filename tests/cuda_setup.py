"""What the tests of the CUDA wheels share; `make test-cuda` installs them and runs the tests.

The libraries are real, with their compiled parts; a driver and a GPU are not there. So nothing is
computed: what is tested is which parameters a model has, and what a library makes of its arguments.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from gapo_megatron.config import Config, load_config
from gapo_megatron.models.published import shipped_fields

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(path for path in ROOT.glob("configs/*/*.toml") if path.parent.name != "studies")
"""Those that are for GPUs."""


def _are_here() -> bool:
    try:
        return bool(metadata.version("vllm") and metadata.version("transformer-engine-torch"))
    except metadata.PackageNotFoundError:
        return False


def needs_cuda_wheels() -> list[pytest.MarkDecorator]:
    """Marks of a file for that environment. CI has none: 13 GB, and minutes of compiling."""
    reason = "needs the CUDA wheels: make test-cuda"
    return [pytest.mark.cuda_wheels, pytest.mark.skipif(not _are_here(), reason=reason)]


def model_folder(path: Path, folder: Path, *settings: str, name: str = "") -> Config:
    """A config whose model is in `folder`: its published config.json, and nothing else of it.

    It is the config's own, or the one called `name`.
    """
    name = name or Path(load_config(path).model.hf_dir).name
    (folder / name).mkdir(exist_ok=True)
    fields = {"architectures": [], **shipped_fields(name)}
    (folder / name / "config.json").write_text(json.dumps(fields))
    return load_config(path, [f"model.hf_dir={folder / name}", *settings])


# Of the driver, what vLLM's compiled modules are linked with.
_DRIVER = """
cuCtxGetCurrent cuCtxSetCurrent cuDeviceGetAttribute cuDevicePrimaryCtxRetain cuGetErrorString
cuGetProcAddress_v2 cuMemAddressFree cuMemAddressReserve cuMemCreate cuMemGetAllocationGranularity
cuMemMap cuMemRelease cuMemSetAccess cuMemUnmap cuPointerGetAttribute cuTensorMapEncodeTiled
"""


def load_driver(folder: Path) -> None:
    """Load a libcuda.so.1 that answers everything with CUDA_ERROR_NO_DEVICE, for this process."""
    source = "".join(f"int {name}(void) {{ return 100; }}\n" for name in _DRIVER.split())
    library = folder / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-"]
    subprocess.run([*command, "-o", str(library)], input=source, text=True, check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
