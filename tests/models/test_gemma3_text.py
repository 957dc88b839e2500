"""Gemma 3's config.json: what readers would understand differently is refused by name."""

from typing import Any

import pytest

from gapo_megatron.config import ModelConfig, ParallelConfig
from gapo_megatron.errors import ConfigError
from gapo_megatron.models.checks import check_shapes
from gapo_megatron.models.config_json import ModelFacts, facts_of
from gapo_megatron.models.published import shipped_fields
from gapo_megatron.models.tables import geometry_of, rope_of
from tests.messages import mentions


def read(**changes: Any) -> ModelFacts:
    return facts_of({**shipped_fields("gemma-3-1b-it"), **changes}, source="config.json")


def nested(kind: str, **settings: Any) -> dict[str, Any]:
    tables = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    tables[kind] |= settings
    return {"rope_theta": None, "rope_local_base_freq": None, "rope_parameters": tables}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        # Windowed layers without a window.
        ({"sliding_window": None}, ["sliding_window (null)", "sliding_attention"]),
        # vLLM would rotate half of every head.
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor (0.5)"]),
        (nested("full_attention", partial_rotary_factor=0.5), ["partial_rotary_factor (0.5)"]),
        (
            nested("sliding_attention", partial_rotary_factor=0.5),
            ["sliding_attention", "partial_rotary_factor (0.5)"],
        ),
        (
            nested("sliding_attention", rope_type="linear", factor=2.0),
            ["rope_type ('linear')", "sliding_attention"],
        ),
        # transformers would write rope_type "default" beside it.
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, ["rope_type", "type ('linear')"]),
        (
            {"rope_parameters": {"full_attention": {"type": "linear", "factor": 8.0}}},
            ["rope_type", "type ('linear')"],
        ),
        (
            nested("sliding_attention") | {"rope_local_base_freq": 2e4},
            ["rope_local_base_freq is 20000.0", "sliding_attention", "10000.0"],
        ),
        ({"rope_local_base_freq": -1.0}, ["rope_local_base_freq (-1.0)"]),
        ({"final_logit_softcapping": 30}, ["final_logit_softcapping (30)", "a point"]),
    ],
)
def test_what_readers_understand_differently_is_refused(
    changes: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(ConfigError, match=mentions("config.json", *named)):
        read(**changes)


def test_without_windowed_layers_no_window_is_needed() -> None:
    facts = read(sliding_window=None, layer_types=["full_attention"] * 26)
    g = geometry_of(facts)
    assert (g.window, any(g.windowed)) == (0, False)
    check_shapes(facts, ParallelConfig(), ModelConfig(hf_dir="models/gemma", precision="bf16"))


def test_settings_may_be_null_where_transformers_accepts_it() -> None:
    facts = read(use_bidirectional_attention=None, final_logit_softcapping=None)
    check_shapes(facts, ParallelConfig())
    with pytest.raises(ConfigError, match=mentions("use_bidirectional_attention (True)")):
        check_shapes(read(use_bidirectional_attention=True), ParallelConfig())
    with pytest.raises(ConfigError, match=mentions("final_logit_softcapping (30.0)")):
        check_shapes(read(final_logit_softcapping=30.0), ParallelConfig())


def test_every_spelling_of_its_rotary_settings_is_read() -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    old = rope_of(read(rope_scaling=linear).to_dict())
    new = rope_of(read(**nested("full_attention", **linear)).to_dict())
    assert old == new
    assert (old.base, old.kind, old.scaling["factor"], old.windowed_base) == (1e6, "linear", 8, 1e4)
