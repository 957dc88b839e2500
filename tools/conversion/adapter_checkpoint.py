"""Read the factors of a run's adapter from its checkpoint, whole, whatever the layout.

The keys are `adapter.` and the names that `models.lora` gives the factors, with the layer's number;
the experts of a layer are stacked. The weights beneath the adapter are not in the checkpoint, only
their digest is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gapo_megatron.config import AdapterConfig
from gapo_megatron.errors import ConfigError, ConversionError
from gapo_megatron.formats.adapter_folder import AdapterSettings
from gapo_megatron.formats.chunks import Chunks
from gapo_megatron.formats.megatron_record import Found
from gapo_megatron.models.lora import factors_of
from gapo_megatron.models.rules import Place, Rule
from gapo_megatron.types import Factors

_PREFIX = "adapter."


class AdapterCheckpoint:
    """A checkpoint of a run with an adapter, open for reading.

    Attributes:
        settings: rank and scale of the factors.
        targets: `adapter.targets` of the run.
        base_sha256: digest of the weights beneath them (`weights_sha256`).
        dtype: dtype of the factors, and of the weights beneath them in the run.
    """

    def __init__(self, found: Found, rules: Sequence[Rule]) -> None:
        """Check that the checkpoint has every factor of its adapter; reads no tensor.

        Args:
            found: the checkpoint.
            rules: the model's rules.

        Raises:
            ConfigError: a run of this package did not write it, or not with an adapter.
            ConversionError: a factor is missing, extra, misshapen or not covered by its chunks;
                names its key.
        """
        manifest = found.manifest
        section = ((manifest and manifest.config) or {}).get("adapter")
        try:
            adapter = AdapterConfig.model_validate(section or {})
        except ValidationError as error:
            raise ConversionError(f"{found.root}: section adapter of its run: {error}") from None
        if manifest is None or manifest.base_sha256 is None or adapter.kind == "none":
            raise ConfigError(f"{found.root} is no checkpoint of a run with an adapter")
        self.settings = AdapterSettings(adapter.rank, adapter.alpha, adapter.rank_stabilized)
        self.targets = adapter.targets
        self.base_sha256 = manifest.base_sha256
        self._factors = factors_of(rules, targets=adapter.targets, rank=adapter.rank)
        entries = {
            key: entry
            for key, entry in found.metadata.state_dict_metadata.items()
            if key.startswith(_PREFIX) and isinstance(entry, TensorStorageMetadata)
        }
        shapes = {
            _key(rule, place): _stacked_shape(rule)
            for one in self._factors
            for rule in (one.a, one.b)
            for place in rule.places
        }
        if odd := sorted(shapes.keys() ^ entries.keys()):
            raise ConversionError(f"{found.root}: missing or unknown factors: {', '.join(odd[:5])}")
        for key, shape in shapes.items():
            if tuple(entries[key].size) != shape:
                raise ConversionError(
                    f"{found.root}: {key} has shape {list(entries[key].size)}; "
                    f"the run's config says {list(shape)}"
                )
        self.dtype: torch.dtype = next(iter(entries.values())).properties.dtype
        storage = found.metadata.storage_data
        self._chunks = {
            key: Chunks(found.root, key, entry, storage, len(shapes[key]) - 2)
            for key, entry in entries.items()
        }

    def factors(self) -> Iterator[Factors]:
        """Yield the factors of every linear layer of the Hugging Face model, on the CPU.

        Raises:
            ConfigError: a file cannot be read; names file and key.
        """
        for one in self._factors:
            for place in one.weight.places:
                a, b = self._read(one.a, place), self._read(one.b, place)
                names = (name.removesuffix(".weight") for name in one.weight.hf_names(place))
                for name, rows in zip(names, one.b.split(b, place), strict=True):
                    yield name, a, rows

    def _read(self, rule: Rule, place: Place) -> Tensor:
        lead = () if place.expert is None else (place.expert,)
        return self._chunks[_key(rule, place)].read(lead, rule.full_shape)


def _key(rule: Rule, place: Place) -> str:
    return _PREFIX + place.fill(rule.megatron.replace("local_experts.{expert}.", ""))


def _stacked_shape(rule: Rule) -> tuple[int, ...]:
    lead = () if rule.num_experts is None else (rule.num_experts,)
    return (*lead, *rule.full_shape)
