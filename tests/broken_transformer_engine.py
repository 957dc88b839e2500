"""What an installation of Transformer Engine that stopped half-way leaves, for PYTHONPATH.

Each raises where and what transformer-engine 2.20.2 does.
"""

from __future__ import annotations

from pathlib import Path

from tests.doctor_setup import install

NO_LIBRARY = "Could not find shared object file for Transformer Engine torch lib."
EMPTY = "Found empty `transformer-engine` meta package installed."
NO_CORE = "libcublas.so.13: cannot open shared object file: No such file or directory"
OTHER_TORCH = "transformer_engine_torch.so: undefined symbol: _ZN3c105ErrorC2E"
NO_DEPENDENCY = "No module named 'onnxscript'"
OTHER_VERSION = "Transformer Engine package version mismatch."

# As the real one: of its PyTorch side an ImportError, and a file that is missing, are passed over.
INIT = """\
import transformer_engine.common
try:
    from . import pytorch
except ImportError:
    pass
except FileNotFoundError as e:
    if "Could not find shared object file" not in str(e):
        raise
__version__ = "2.20.2"
"""
RAISES = "raise {kind}({message!r})\n"


def install_broken(site: Path, kind: str) -> str:
    """Install it into `site`, broken in one way; what its import, or Megatron-core, says of it.

    Args:
        site: a folder for PYTHONPATH.
        kind: a key of `KINDS`.
    """
    if kind == "core_alone":  # its wheel has libraries in the folder of the other's name
        (site / "transformer_engine" / "wheel_lib").mkdir(parents=True)
        install(site, "transformer_engine_cu13", "2.20.2", {})
        return "has no attribute '__version__'"
    module, error, message = KINDS[kind]
    files = {f"transformer_engine/{name}/__init__.py": "" for name in ("common", "pytorch")}
    files["transformer_engine/__init__.py"] = INIT
    files[f"transformer_engine/{module}/__init__.py"] = RAISES.format(kind=error, message=message)
    install(site, "transformer_engine", "2.20.2", files)
    return message


KINDS = {
    "no_pytorch_side": ("pytorch", "FileNotFoundError", NO_LIBRARY),
    "empty": ("common", "RuntimeError", EMPTY),
    "core_does_not_load": ("common", "OSError", NO_CORE),
    "several_versions": ("pytorch", "AssertionError", OTHER_VERSION),
    "no_dependency": ("common", "ModuleNotFoundError", NO_DEPENDENCY),
    "other_torch": ("pytorch", "ImportError", OTHER_TORCH),
    "core_alone": ("", "", ""),
}
