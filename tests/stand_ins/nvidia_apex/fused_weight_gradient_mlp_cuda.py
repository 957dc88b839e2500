"""apex's product that adds a weight gradient to the buffer of gradients."""

from __future__ import annotations

import torch
from multi_tensor_kernels import calls
from torch import Tensor

_INPUTS = (torch.float16, torch.bfloat16, torch.float32)


def wgrad_gemm_accum_fp32(inputs: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    """Add d_output^T inputs to d_weight [out, in], float32."""
    if d_weight.dtype != torch.float32:
        raise RuntimeError(f"expected scalar type Float but found {d_weight.dtype}")
    _add("wgrad_gemm_accum_fp32", inputs, d_output, d_weight)


def wgrad_gemm_accum_fp16(inputs: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    """The same, of a buffer in the dtype of the activations, 16 bits."""
    if d_weight.dtype != inputs.dtype or d_weight.dtype == torch.float32:
        raise RuntimeError(f"expected scalar type {inputs.dtype} but found {d_weight.dtype}")
    _add("wgrad_gemm_accum_fp16", inputs, d_output, d_weight)


def _add(name: str, inputs: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    calls[name] += 1
    if inputs.dtype not in _INPUTS or d_output.dtype != inputs.dtype:
        raise RuntimeError(f"expected scalar type {inputs.dtype} but found {d_output.dtype}")
    for one in (inputs, d_output, d_weight):
        # The real one reads their memory row by row, whatever the strides say.
        if not one.is_contiguous() or one.device != d_weight.device:
            raise RuntimeError("a tensor is not contiguous, or on another device")
    rows, columns = d_output.flatten(0, -2), inputs.flatten(0, -2)
    if len(rows) != len(columns) or d_weight.shape != (rows.shape[1], columns.shape[1]):
        raise RuntimeError(f"{rows.shape}, {columns.shape} and {d_weight.shape} do not fit")
    d_weight.add_(rows.t().to(d_weight.dtype) @ columns.to(d_weight.dtype))
