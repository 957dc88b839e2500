"""Hugging Face weights to Megatron-core and back. Pure tensors and names: no megatron, no vllm."""

from gapo_megatron.convert.folder import check_replaceable, is_marked, mark, new_folder
from gapo_megatron.convert.hf import (
    Entry,
    HfFolder,
    carry_over,
    check_hf_dir,
    non_weight_files,
    read_hf,
    write_hf,
    write_hf_weights,
)
from gapo_megatron.convert.megatron_record import Found, find_megatron
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
from gapo_megatron.convert.torch_dist import MegatronFolder, write_megatron

__all__ = [
    "Entry",
    "Found",
    "HfFolder",
    "MegatronFolder",
    "Place",
    "Rule",
    "carry_over",
    "check_hf_dir",
    "check_names",
    "check_replaceable",
    "checked",
    "find_megatron",
    "find_rule",
    "hf_shapes",
    "is_marked",
    "mark",
    "new_folder",
    "non_weight_files",
    "read_hf",
    "rules_for",
    "to_hf",
    "to_megatron",
    "write_hf",
    "write_hf_weights",
    "write_megatron",
]
