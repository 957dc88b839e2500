"""Parameters for tests of transfers: rules of any shape, and where their shards are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gapo_megatron.models.rules import Rule
from gapo_megatron.policy.export import Exported


def rule_of(name: str, shape: tuple[int, ...], *, tp_dim: int | None = None, **fields: Any) -> Rule:
    """A parameter that has the same name and shape in the Hugging Face model."""
    return Rule(
        name,
        (name,),
        (shape,),
        tp_dim,
        join=lambda tensors: tensors[0],
        part=lambda full: (full,),
        **fields,
    )


def exported_of(rules: Sequence[Rule], *, num_ranks: int) -> Exported:
    """All ranks are tensor parallel; one stage."""
    num_layers = max((rule.num_layers or 0 for rule in rules), default=0)
    return Exported(rules, [[range(num_layers)]], num_ranks, 1, num_ranks, torch.float32)
