"""Model architectures, one file each: names, shapes, sizes, refusals. No torch.

`qwen2.py`, `llama.py` and the other files that `tables` imports each make one `Architecture`;
nothing outside this folder depends on a `model_type`.
"""

from gapo_megatron.models.architecture import Architecture
from gapo_megatron.models.tables import architecture_of

__all__ = ["Architecture", "architecture_of"]
