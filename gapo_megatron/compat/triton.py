"""Parts of Triton in use that only its tutorials name."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
from triton.errors import TritonError  # type: ignore[import-untyped]
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped]

__all__ = ["TensorDescriptor", "TritonError", "is_interpreted"]  # the first two are re-exports
# Uses: triton.tools.tensor_descriptor.TensorDescriptor, triton.errors.TritonError
# Versions: triton 3.7.1, 3.9.0
# Upstream: triton-lang/triton#6455 (tutorials use the first); none found for the other


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on a CPU."""
    # Uses: triton.knobs.runtime.interpret
    # Versions: triton 3.7.1, 3.9.0
    # Upstream: none found
    return bool(triton.knobs.runtime.interpret)
