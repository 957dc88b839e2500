"""NVIDIA's apex: whether it is installed whole.

Imports it only when asked for its parts, and nothing else: the doctor uses this without torch.
Written for commit 6424da3 of July 2026 without a GPU: NOT YET RUN on one.
"""

from __future__ import annotations

import importlib
import importlib.util
from importlib import metadata
from pathlib import Path

from gapo_megatron.errors import said

PARTS = {
    "apex.optimizers": ("FusedAdam",),
    "apex.multi_tensor_apply": ("multi_tensor_applier",),
    "amp_C": ("multi_tensor_adam", "multi_tensor_l2norm", "multi_tensor_scale"),
    "fused_weight_gradient_mlp_cuda": ("wgrad_gemm_accum_fp32",),
}
"""Modules that Megatron-core imports, and what it takes from each."""


def version() -> str | None:
    """Version of the installed distribution `apex`; None if there is none."""
    # Uses: the name of the distribution, which has no release
    # Versions: apex 0.1 at 6424da3
    # Upstream: none found
    try:
        return metadata.version("apex")
    except metadata.PackageNotFoundError:
        return None


def is_installed() -> bool:
    """Whether there is a package of this name, whoever made it."""
    # Uses: the name of the package
    # Versions: apex 0.1 at 6424da3
    # Upstream: none found
    return importlib.util.find_spec("apex") is not None


def other_package() -> str:
    """What is installed under the name instead of NVIDIA's apex; empty if that or nothing is.

    The public index has an unrelated one. It is not imported: that would run its code.
    """
    # Uses: the folder apex/optimizers
    # Versions: apex 0.1 at 6424da3; the unrelated apex 0.9.10
    # Upstream: none found
    spec = importlib.util.find_spec("apex")
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    if spec is None or any((folder / "optimizers").is_dir() for folder in folders):
        return ""
    try:
        found = metadata.metadata("apex")["Summary"] or spec.origin
    except metadata.PackageNotFoundError:
        found = spec.origin
    return f"{found}, version {version() or 'unknown'}"


def why_not() -> str:
    """Why NVIDIA's apex cannot be used, with every part that is missing; empty if it is whole."""
    # Uses: the names in PARTS
    # Versions: apex 0.1 at 6424da3; megatron-core 0.19.2
    # Upstream: none found
    if not is_installed():
        return "apex is not installed"
    if other := other_package():
        return f"this is not NVIDIA's apex but {other}"
    missing = []
    for module, names in PARTS.items():
        try:
            part = importlib.import_module(module)
        except Exception as error:  # a build for another torch or CUDA raises anything
            missing.append(f"{module} ({said(error)})")
        else:
            missing += [f"{module}.{name}" for name in names if not hasattr(part, name)]
    return f"NVIDIA's apex lacks {', '.join(missing)}" if missing else ""
