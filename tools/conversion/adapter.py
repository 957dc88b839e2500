"""Convert the checkpoint of a run with an adapter: to an adapter folder, or to a merged model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gapo_megatron.errors import ConfigError, ConversionError
from gapo_megatron.formats.adapter_folder import read_adapter, write_adapter
from gapo_megatron.formats.weights import HfFolder, write_hf
from gapo_megatron.models.rules import hf_shapes
from gapo_megatron.models.tables import geometry_of, rules_for
from gapo_megatron.policy.digest import combined, tensor_sha256
from gapo_megatron.policy.low_rank import merge, merge_squares, relative_rounding
from gapo_megatron.types import Factors
from gapo_tools.conversion.adapter_checkpoint import AdapterCheckpoint
from gapo_tools.conversion.directions import (
    TO_HF,
    Options,
    check_file_digests,
    end_tokens_of_run,
    find_source,
)

Kind = Literal["peft", "merged"]


def convert_adapter(
    megatron_dir: Path,
    output_dir: Path,
    options: Options,
    *,
    kind: Kind,
    base_dir: Path | None = None,
) -> dict[str, str]:
    """Convert the checkpoint of a run with an adapter.

    Args:
        megatron_dir: checkpoint of a run, or the run (its newest checkpoint).
        output_dir: folder to make.
        options: see `Options`; the dtypes are the run's.
        kind: `peft`: the factors, as peft and vLLM load them beside the base. `merged`: the whole
            model, round(W + scale * B A).
        base_dir: Hugging Face folder of the base; None: the run's `model.hf_dir`.

    Returns:
        What each check found.

    Raises:
        ConfigError: the checkpoint is of no such run, the output exists, the base is missing or
            not the one that the adapter was trained on, the dtype is to be changed, or a target
            has no place in an adapter folder.
        ConversionError: a file or factor is damaged.
    """
    if options.dtype is not None:
        raise ConfigError("--dtype must be keep with --adapter: the dtypes are the run's")
    if output_dir.exists() and not options.replace:
        raise ConfigError(f"output folder {output_dir} exists already; --overwrite replaces it")
    found, base_dir, hf_config = find_source(megatron_dir, base_dir, output=output_dir)
    rules = rules_for(hf_config)
    adapter = AdapterCheckpoint(found, rules)
    if kind == "peft":
        _check_targets(adapter.targets, hf_config)
    settings = adapter.settings
    checks = {
        "adapter": f"rank {settings.rank}, scale {settings.scale:g}, {adapter.dtype}",
        "files": check_file_digests(found, options.num_threads),
    }
    if kind == "peft":
        write_adapter(
            adapter.factors(),
            settings,
            base_model=str(base_dir.absolute()),  # peft may run elsewhere
            output_dir=output_dir,
            made_by=TO_HF,
        )
        checks["round trip"] = _compare(output_dir, adapter)
        return checks
    base, digests = HfFolder(base_dir), dict[str, str]()
    factors = {f"{module}.weight": (a, b) for module, a, b in adapter.factors()}
    squares = torch.zeros(2, dtype=torch.float64)

    def weights() -> Iterator[tuple[str, Tensor]]:
        buffers = hf_shapes([rule for rule in rules if rule.is_buffer])
        for name in hf_shapes(rules):
            weight = base.read(name).to(torch.float32 if name in buffers else adapter.dtype)
            digests[name] = tensor_sha256(weight)
            if pair := factors.pop(name, None):
                squares.add_(merge_squares(weight, *pair, scale=settings.scale))
                weight = merge(weight, *pair, scale=settings.scale)
            yield name, weight
        # Before the output is complete: an error here leaves none.
        if factors:
            raise ConversionError(f"the adapter has factors without a weight: {sorted(factors)}")
        _check_base(base_dir, combined(digests), adapter.base_sha256)

    write_hf(
        weights(),
        source_dir=base_dir,
        output_dir=output_dir,
        made_by=TO_HF,
        end_tokens=end_tokens_of_run(found, base_dir, hf_config),
    )
    checks["base"] = f"{base_dir} has the SHA-256 of the run's base"
    checks["rounding"] = (
        f"{relative_rounding(squares):.3g} of the adapter's own size (Frobenius norms)"
    )
    return checks


def _check_targets(targets: Sequence[str], hf_config: Any) -> None:
    """Refuse layers that peft would leave out, or only warn of (`formats.adapter_folder`)."""
    if not geometry_of(hf_config).num_experts:
        return
    for target in targets:
        if target in ("fc1", "fc2", "experts"):
            raise ConfigError(
                f"adapter.targets ({target!r}): beside experts ({hf_config.model_type}) peft loads "
                "factors of attention alone; --adapter merged makes a whole model"
            )


def _check_base(base_dir: Path, here: str, there: str) -> None:
    if here != there:
        raise ConfigError(
            f"{base_dir} is not the base that the adapter was trained on: its weights have the "
            f"SHA-256 {here[:12]}..., those of the run {there[:12]}...; --hf-config names another"
        )


def _compare(folder: Path, adapter: AdapterCheckpoint) -> str:
    """Raise ConversionError unless the folder has the checkpoint's factors, bit for bit."""
    settings, written = read_adapter(folder)
    num_layers = 0
    for ours, theirs in zip(
        sorted(written, key=_name), sorted(adapter.factors(), key=_name), strict=True
    ):
        num_layers += 1
        if ours[0] != theirs[0] or not all(map(torch.equal, ours[1:], theirs[1:])):
            raise ConversionError(f"{folder}: {ours[0]} differs from its checkpoint")
    if settings != adapter.settings:
        raise ConversionError(f"{folder}: {settings} differs from {adapter.settings}")
    return f"the factors of {num_layers} layers equal bit for bit"


def _name(factors: Factors) -> str:
    return factors[0]
