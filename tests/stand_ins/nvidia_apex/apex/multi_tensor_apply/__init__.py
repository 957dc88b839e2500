"""Calls a kernel with apex's chunk size; importable, as the real one, without the kernels."""

from __future__ import annotations

from typing import Any


class MultiTensorApply:
    available = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size
        try:
            import amp_C  # noqa: F401

            MultiTensorApply.available = True
        except ImportError:
            pass

    def __call__(self, op: Any, noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> Any:
        if not self.available:
            raise RuntimeError("MultiTensorApply is not available: no amp_C")
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
