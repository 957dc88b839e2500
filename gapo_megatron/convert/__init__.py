"""Hugging Face weights to Megatron-core and back. Pure tensors and names: no megatron, no vllm.

What is imported here needs no torch: names and shapes of a model. Weights are in `hf` (Hugging Face
folders) and `torch_dist` (Megatron folders).
"""

from gapo_megatron.convert.folder import new_folder
from gapo_megatron.convert.rules import (
    Place,
    Rule,
    check_names,
    checked,
    find_rule,
    hf_shapes,
    to_hf,
    to_megatron,
)
from gapo_megatron.convert.tables import rules_for

__all__ = [
    "Place",
    "Rule",
    "check_names",
    "checked",
    "find_rule",
    "hf_shapes",
    "new_folder",
    "rules_for",
    "to_hf",
    "to_megatron",
]
