"""apex's kernels over lists of tensors, as far as Megatron-core takes them."""

from multi_tensor_kernels import multi_tensor_adam, multi_tensor_l2norm, multi_tensor_scale

__all__ = ["multi_tensor_adam", "multi_tensor_l2norm", "multi_tensor_scale"]
