"""Names and shapes of low-rank factors, and a refused target. Needs no torch."""

from __future__ import annotations

import pytest

from gapo_megatron.config import AdapterConfig
from gapo_megatron.errors import ConfigError
from gapo_megatron.models.lora import check_adapter, factors_of
from gapo_megatron.models.rules import Place
from gapo_megatron.models.tables import rules_for
from tests.distributed.conversion_setup import hf_config
from tests.messages import mentions


def test_factors_are_cut_as_their_weight() -> None:
    """48 hidden units, six query heads on two of 16, 56 inner units, two ranks."""
    rules = rules_for(hf_config("qwen2"))
    found = factors_of(rules, targets=["qkv", "proj", "fc1", "fc2"], rank=3)
    assert {one.target: (one.a.full_shape, one.a.shard_shape(2)) for one in found} == {
        "qkv": ((3, 48), (3, 48)),
        "proj": ((3, 96), (3, 48)),
        "fc1": ((3, 48), (3, 48)),
        "fc2": ((3, 56), (3, 28)),
    }
    assert {one.target: (one.b.full_shape, one.b.shard_shape(2)) for one in found} == {
        "qkv": ((160, 3), (80, 3)),
        "proj": ((48, 3), (48, 3)),
        "fc1": ((112, 3), (56, 3)),
        "fc2": ((48, 3), (48, 3)),
    }
    names = [one.b.megatron_name(Place(2)) for one in found]
    assert names[0] == "decoder.layers.2.self_attention.linear_qkv.lora_b"


def test_experts_are_counted_one_by_one() -> None:
    settings = AdapterConfig(kind="lora", targets=("proj", "experts"))
    assert check_adapter(hf_config("qwen3_moe"), settings) == {"proj": 4, "experts": 32}
    assert check_adapter(hf_config("qwen3_moe"), AdapterConfig()) == {}


def test_a_target_that_the_model_lacks_is_refused() -> None:
    settings = AdapterConfig(kind="lora")  # the layers of a dense model
    with pytest.raises(ConfigError, match=mentions("adapter.targets", "'fc1'", "qkv", "experts")):
        check_adapter(hf_config("qwen3_moe"), settings)
