"""The tensors of a model in its folder, under the names that the conversion rules have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from gapo_megatron.formats.headers import Header, read_headers
from gapo_megatron.formats.quantized import joined
from gapo_megatron.formats.stacks import unstacked
from gapo_megatron.models.config_json import read_facts
from gapo_megatron.models.rules import check_beginning
from gapo_megatron.models.tables import architecture_of, left_out_layers


class ModelTensors(NamedTuple):
    """Headers of a model folder."""

    headers: dict[str, Header]
    """Headers by tensor name, in index order: one per expert, of quantized weights as read."""
    left_out: list[str]
    """Names of the other tensors, see `Architecture.left_out`."""


def model_tensors(hf_dir: str | Path) -> ModelTensors:
    """Read the headers of a model folder.

    Raises:
        ConfigError, ConversionError: see `headers.read_headers`, `config_json.read_facts`,
            `rules.check_beginning`, `stacks.unstacked` and `quantized.joined`.
    """
    stored, facts = read_headers(hf_dir), read_facts(hf_dir)
    check_beginning(stored, "model.embed_tokens.weight", source=str(hf_dir))
    layers = left_out_layers(facts)
    headers, left_out = dict[str, Header](), list[str]()
    for name, header in stored.items():
        found = re.match(r"model\.layers\.([0-9]{1,9})\.", name)
        if found and int(found[1]) in layers:
            left_out.append(name)
        else:
            headers[name] = header
    if architecture_of(facts).stacks_experts:
        headers = unstacked(headers)
    return ModelTensors(joined(headers, facts), left_out)
