from torch.optim import SGD as FusedSGD

from .fused_adam import FusedAdam

__all__ = ["FusedAdam", "FusedSGD"]
