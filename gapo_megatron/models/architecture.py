"""Interface of a model architecture: all that this package knows of one.

Five are here, one file each; `tables.ARCHITECTURES` lists them by config.json's `model_type`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gapo_megatron.models import parts
from gapo_megatron.models.parts import Geometry
from gapo_megatron.models.rules import Rule

FieldRule = tuple[str, Callable[[Any], bool]]
"""Rule for a field's value, in words and as a test."""


def _nothing(_: Any) -> None:
    """Most architectures add no check and fill in no value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One architecture of Hugging Face, as this package converts, computes and plans it.

    To add one, write a file beside `llama.py` and name it in `tables.ARCHITECTURES`. Begin with
    `geometry` and `rules`. `geometry` reads sizes and features from config.json; the conversion
    rules, TransformerConfig, the checks of parallel sizes, and the planner's memory and FLOPs all
    follow from it, so that they cannot contradict each other. A feature that `Geometry` cannot
    express is new in `parts.py`, and in `policy/model.py` if Megatron-core's layers need
    replacing for it. Rotary positions are read by `rope.read_rope` for every architecture.

    Refuse what you do not compute: a model that loads and computes something else is the worst
    outcome. `check` refuses what the rules do not cover, so that conversion stops too;
    `check_computed` refuses what could be converted but not trained. Both raise ConfigError with
    field, value and rule.

    In the functions below `config` is config.json as `config_json.ModelFacts`, as transformers'
    `PretrainedConfig`, or any object with the same attributes. None of them may import torch when
    its module is imported: plans and dry runs work without it.
    """

    model_type: str
    """config.json's `model_type`."""
    hf_class: str
    """The one entry of config.json's `architectures`."""
    published: Mapping[str, str] = field(default_factory=dict)
    """Models whose shapes are shipped (`published/NAME.json`): NAME -> where it comes from."""

    # What config.json says (`config_json`).
    defaults: Mapping[str, Any]
    """Fields of config.json and what transformers takes them to be where they are absent."""
    fields: Mapping[str, FieldRule] = field(default_factory=dict)
    """Fields beside those that `config_json` reads for every architecture, with their rules."""
    nullable: tuple[str, ...] = ()
    """Fields that may be null although their default is not."""
    refused_fields: Mapping[str, str] = field(default_factory=dict)
    """Fields that config.json may not have at all -> why."""
    complete: Callable[[dict[str, Any]], None] = _nothing
    """Fill in, in place, the values that transformers derives from others."""

    # What the model is.
    geometry: Callable[[Any], Geometry] = Geometry.of
    """Sizes and features, from `config`."""
    rules: Callable[[Geometry], list[Rule]]
    """The conversion table: every parameter, in the order of the model."""
    transformer_fields: Callable[[Any, Geometry], dict[str, Any]] = parts.transformer_fields
    """TransformerConfig fields that say what is computed, from `config` and its geometry. Those of
    the layout, the precision and the kernels are `policy.model`'s. May import torch."""

    # What is refused.
    check: Callable[[Any], None] = _nothing
    """Raise ConfigError for a `config` that `rules` does not cover; messages begin with
    "config.json: "."""
    check_computed: Callable[[Any], None] = parts.check_computed
    """Raise ConfigError for a `config` that the Megatron-core model would not compute."""

    @property
    def model_fields(self) -> tuple[str, ...]:
        """Fields of config.json that decide what the model is: names, shapes, computation.

        Two folders or checkpoints that differ in one of them hold different models. Rotary
        settings come besides: they are spelled in several ways (`rope`).
        """
        return (*parts.MODEL_FIELDS, *self.fields)
