"""Read and write the factors of a low-rank adapter as a folder that peft and vLLM load.

A linear layer computes W x + scale * B A x, with A [r, in] and B [out, r] (LoRA, arXiv 2106.09685).
The folder has two files:

    adapter_config.json         r, lora_alpha, use_rslora, target_modules, base model
    adapter_model.safetensors   base_model.model.MODULE.lora_A.weight and ...lora_B.weight

scale is lora_alpha / r, or lora_alpha / sqrt(r) with `use_rslora`. MODULE is the layer's name in
the Hugging Face model, such as `model.layers.0.self_attn.q_proj`.

Of a model with experts it can hold attention alone. transformers 5 has a layer's experts in two
parameters; peft adapts those with factors of another shape, while vLLM 0.32 expects one pair of
factors for every expert. And gate_proj, up_proj and down_proj in `target_modules` are these
parameters to peft 0.21, which then loads no factors of dense layers and shared experts either.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gapo_megatron.config.adapter_section import lora_scale
from gapo_megatron.errors import ConfigError, ConversionError, shown
from gapo_megatron.formats import shard
from gapo_megatron.formats.folder import is_marked, mark, new_folder
from gapo_megatron.formats.headers import Header, read_header
from gapo_megatron.formats.weights import finite_extremes
from gapo_megatron.io.documents import read_object
from gapo_megatron.types import Factors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "modules_to_save": (None, []),
    "use_dora": (False,),
    "lora_bias": (False,),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None,),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "fan_in_fan_out": (False,),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False,),
    "use_bdlora": (None,),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # others change the base
}
"""Settings of peft that change what the factors mean, and the values that change nothing."""


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """What adapter_config.json says about the factors."""

    rank: int
    """Rows of every A and columns of every B."""
    alpha: float
    """Numerator of the scale."""
    rank_stabilized: bool = False
    """Divide by sqrt(rank) instead of the rank (rsLoRA, arXiv 2312.03732)."""

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return lora_scale(self.rank, self.alpha, rank_stabilized=self.rank_stabilized)


def write_adapter(
    factors: Iterable[Factors],
    settings: AdapterSettings,
    *,
    base_model: str,
    output_dir: str | Path,
    made_by: str,
) -> None:
    """Write an adapter folder; it is complete or absent, see `new_folder`.

    Args:
        factors: factors of every adapted layer, on any device; held in host memory to the end.
        settings: their common settings.
        base_model: path or name of the model whose weights the factors are beside.
        output_dir: folder to make, or an earlier result of the same command to replace.
        made_by: name of the command.

    Raises:
        ConfigError: see `new_folder`.
        ConversionError: a layer is given twice, a factor is misshapen or not finite, or there are
            none; names the layer. Or the disk fails.
    """
    tensors = {
        name: tensor.detach().cpu() for name, tensor in _named(factors, settings, str(output_dir))
    }
    is_ours = is_marked(output_dir, made_by=made_by)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    with new_folder(output_dir, num_bytes=num_bytes, replace=True, is_ours=is_ours) as temporary:
        write_files(tensors, settings, base_model=base_model, folder=temporary)
        mark(temporary, made_by=made_by, made_at=Path(output_dir))


def write_files(
    tensors: Mapping[str, Tensor], settings: AdapterSettings, *, base_model: str, folder: Path
) -> None:
    """Write both files into an existing folder that has neither.

    Args:
        tensors: factors under their names in the file, see `tensor_names`.
        settings: their common settings.
        base_model: see `write_adapter`.
        folder: to write to.

    Raises:
        ConversionError: the disk fails.
    """
    layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    shard.write_file(folder / WEIGHTS, layout, tensors.items())
    modules = {name.removesuffix(_A).rpartition(".")[2] for name in tensors if name.endswith(_A)}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "use_rslora": settings.rank_stabilized,
        "target_modules": sorted(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def tensor_names(module: str) -> tuple[str, str]:
    """Names of a layer's A and B in the file."""
    return f"{_PREFIX}{module}{_A}", f"{_PREFIX}{module}{_B}"


def read_adapter(folder: str | Path) -> tuple[AdapterSettings, Iterator[Factors]]:
    """Read an adapter folder of this package or of peft.

    Returns:
        Its settings, and its factors one layer at a time, on the CPU in the dtype of the file.

    Raises:
        ConfigError: a file is missing or damaged, or asks for what is not plain LoRA; names the
            file, the setting and the rule. Raised by the call itself, as are errors of names and
            shapes.
        ConversionError: a factor has no partner, or another shape or dtype than its partner and r
            ask for; names file, tensor and rule. While iterating: it is not finite.
    """
    root = Path(folder)
    settings = _read_settings(root / CONFIG)
    path = root / WEIGHTS
    if not path.is_file():
        raise ConfigError(f"{root} has no {WEIGHTS}")
    headers = read_header(path)
    modules = _paired(path, headers, settings.rank)

    def read(name: str) -> Tensor:
        tensor = shard.read_tensor(path, name, headers[name])
        finite_extremes(tensor, name=f"{path}: {name}")
        return tensor

    return settings, ((module, *map(read, tensor_names(module))) for module in modules)  # type: ignore[misc]


def _read_settings(path: Path) -> AdapterSettings:
    try:
        config = read_object(path)
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} has no {path.name}") from None
    if (kind := config.get("peft_type")) != "LORA":
        raise ConfigError(f"{path}: peft_type ({shown(kind)}) must be 'LORA'")
    for name, allowed in _UNSUPPORTED.items():
        if (value := config.get(name, allowed[0])) not in allowed:
            raise ConfigError(
                f"{path}: {name} ({shown(value)}) must be {allowed[0]!r}: only plain factors "
                "beside linear layers are supported"
            )
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    rank_stabilized = config.get("use_rslora", False)
    if type(rank) is not int or rank < 1:
        raise ConfigError(f"{path}: r ({shown(rank)}) must be an integer of at least 1")
    if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        raise ConfigError(f"{path}: lora_alpha ({shown(alpha)}) must be a number above 0")
    if type(rank_stabilized) is not bool:
        raise ConfigError(f"{path}: use_rslora ({shown(rank_stabilized)}) must be true or false")
    return AdapterSettings(rank, float(alpha), rank_stabilized)


def _paired(path: Path, headers: Mapping[str, Header], rank: int) -> list[str]:
    """The layers of a file, in its order; refuses tensors that are no pair of factors."""
    modules = dict.fromkeys(_module_of(path, name) for name in headers)
    if not modules:
        raise ConversionError(f"{path} holds no factors")
    for module in modules:
        name_a, name_b = tensor_names(module)
        for name, other in ((name_a, name_b), (name_b, name_a)):
            if name not in headers:
                raise ConversionError(f"{path}: {other} has no partner {name}")
        _check_pair(path, {name: headers[name] for name in (name_a, name_b)}, rank)
    return list(modules)


def _module_of(path: Path, name: str) -> str:
    for suffix in (_A, _B):
        if name.startswith(_PREFIX) and name.endswith(suffix):
            return name.removeprefix(_PREFIX).removesuffix(suffix)
    raise ConversionError(
        f"{path}: {name} is no factor: its name must be {_PREFIX}MODULE{_A} or {_B}"
    )


def _check_pair(where: str | Path, pair: Mapping[str, Header | Tensor], rank: int) -> None:
    """Check shape and dtype of A and B, in this order, by name."""
    (name_a, a), (name_b, b) = pair.items()
    for name, factor, dim in ((name_a, a, 0), (name_b, b, 1)):
        if len(factor.shape) != 2 or factor.shape[dim] != rank:
            rule = f"[{rank}, in]" if dim == 0 else f"[out, {rank}]"
            raise ConversionError(
                f"{where}: {name} has shape {list(factor.shape)}; it must be {rule}"
            )
    if a.dtype != b.dtype:
        raise ConversionError(
            f"{where}: {name_a} is {a.dtype} and {name_b} {b.dtype}: both must be the same"
        )
    dtype = getattr(torch, a.dtype) if isinstance(a.dtype, str) else a.dtype
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ConversionError(
            f"{where}: {name_a} is {a.dtype}; it must be a float of 16 to 64 bits"
        )


def _named(
    factors: Iterable[Factors], settings: AdapterSettings, where: str
) -> Iterator[tuple[str, Tensor]]:
    """Name the factors as in the file, and check them."""
    seen: set[str] = set()
    for module, a, b in factors:
        if module in seen:
            raise ConversionError(f"{where}: {module} is given twice")
        seen.add(module)
        pair = dict(zip(tensor_names(module), (a, b), strict=True))
        _check_pair(where, pair, settings.rank)
        for name, tensor in pair.items():
            finite_extremes(tensor, name=f"{where}: {name}")
            yield name, tensor
    if not seen:
        raise ConversionError(f"{where}: there are no factors to write")
