"""Interface of a model architecture: everything that this package needs to know about one.

Each has its own file; `tables.ARCHITECTURES` lists them by config.json's `model_type`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gapo_megatron.models import parts
from gapo_megatron.models.geometry import Geometry
from gapo_megatron.models.rope import Rope, read_rope
from gapo_megatron.models.rules import Rule

FieldRule = tuple[str, Callable[[Any], bool]]
"""Rule for a field's value: its wording in errors, and the test."""


def _nothing(_: Any) -> None:
    """Default for architectures without own checks or derived values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How this package converts, computes and plans one Hugging Face architecture.

    To add one, write a file beside `llama.py` and name it in `tables.ARCHITECTURES`. Begin with
    `geometry`, which reads sizes and features from config.json, and with `rules` if `parts.decoder`
    does not fit. Conversion rules, TransformerConfig, the checks of parallel sizes, and the
    planner's memory and FLOPs all follow from the geometry, so that they cannot contradict each
    other. A feature that `Geometry` cannot express goes into `parts.py`, and into `policy/model.py`
    if it needs other layers than Megatron-core's. Rotary positions are read by `tables.rope_of` for
    every architecture; say which kinds this one has.

    Refuse what you do not support: a model that loads but computes something else is the worst
    outcome. `check` refuses what the rules do not cover, for conversion too; `check_computed`
    refuses what can be converted but not trained. Both raise ConfigError with field, value and
    rule.

    In the functions below `config` is config.json as `config_json.ModelFacts`, as transformers'
    `PretrainedConfig`, or any object with the same attributes. None of them may import torch when
    its module is imported: plans and dry runs work without it.
    """

    model_type: str
    """config.json's `model_type`."""
    hf_class: str
    """The only entry of config.json's `architectures`."""
    published: Mapping[str, str] = field(default_factory=dict)
    """Models whose shapes are shipped (`published/NAME.json`): NAME -> origin."""

    # Fields of config.json (`config_json`).
    defaults: Mapping[str, Any]
    """Fields of config.json, with transformers' defaults for missing ones."""
    fields: Mapping[str, FieldRule] = field(default_factory=dict)
    """Rules of fields that `config_json` does not read for every architecture."""
    nullable: tuple[str, ...] = ()
    """Fields that may be null although their default is not null."""
    refused_fields: Mapping[str, str] = field(default_factory=dict)
    """Fields that config.json must not have, unless false -> reason."""
    quantizations: tuple[str, ...] = ()
    """quant_method in quantization_config of weights that can be read (`formats.quantized`)."""
    stacks_experts: bool = False
    """Whether a folder has the experts of a layer in one tensor (`formats.stacks`)."""
    complete: Callable[[dict[str, Any]], None] = _nothing
    """Set, in place, the values that transformers derives from others."""

    # Rotary positions (`rope`).
    rope_kinds: tuple[str, ...] = ("default", "llama3")
    """Values of rope_type that transformers and vLLM compute for it."""
    read_rope: Callable[..., Rope] = read_rope
    """`rope.read_rope`, or a function like it for other fields."""
    partial_rotary: bool = False
    """Whether partial_rotary_factor may be below 1."""
    rotates_in_float32: bool = False
    """Whether transformers and vLLM rotate queries and keys in float32 in a 16-bit model, too."""

    # The model.
    geometry: Callable[[Any], Geometry] = Geometry.of
    """Sizes and features, from `config`."""
    rules: Callable[[Geometry], list[Rule]] = parts.decoder
    """The conversion table: every parameter, in the order of the model."""
    transformer_fields: Callable[[Any, Geometry], dict[str, Any]] = parts.transformer_fields
    """TransformerConfig fields of the computation, from `config` and its geometry; `policy.model`
    adds those of layout, precision and kernels. May import torch."""
    megatron_layers: bool = True
    """Whether Megatron-core's layers compute it. Otherwise ours do, on a GPU too: without
    Transformer Engine, and so without fp8."""
    left_out: str = ""
    """Field of config.json with the number of layers behind the last that predict further tokens.
    Their tensors in a model folder are left out; none: it has no such field."""
    gives_hidden_states: bool = True
    """Whether its class in vLLM gives an EAGLE-3 draft hidden states (`SupportsEagle3`)."""

    # Refusals.
    check: Callable[[Any], None] = _nothing
    """Raise ConfigError for a `config` that `rules` does not cover; messages begin with
    "config.json: "."""
    check_computed: Callable[[Any], None] = parts.check_computed
    """Raise ConfigError for a `config` that the Megatron-core model would not compute."""

    @property
    def model_fields(self) -> tuple[str, ...]:
        """Fields of config.json that determine names, shapes and computation of the model.

        Folders or checkpoints that differ in one of them hold different models. Rotary settings are
        compared separately, because they have several spellings (`rope`).
        """
        return (*parts.MODEL_FIELDS, *(name for name in self.fields if name != self.left_out))
