from . import normalization, optimizers

__all__ = ["normalization", "optimizers"]
