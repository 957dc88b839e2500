"""The two conversions, step by step: check the source, write, verify, publish.

Everything that headers tell is checked before a byte is written. The output is written under a
temporary name, and gets its own when it has passed the verification.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from transformers import PretrainedConfig
from transformers.utils import logging as transformers_logging

from gapo_megatron.config import DataConfig
from gapo_megatron.data.end_tokens import find_end_tokens
from gapo_megatron.data.messages import bind_template
from gapo_megatron.data.tokenizer import open_tokenizer
from gapo_megatron.errors import ConfigError, ConversionError
from gapo_megatron.formats.config_check import check_config, compare_configs, read_config
from gapo_megatron.formats.folder import MARKER_NAME, REPORT_NAME, is_marked, mark, new_folder
from gapo_megatron.formats.manifest import MANIFEST_NAME, find_damage
from gapo_megatron.formats.megatron_record import TRACKER, Found, find_megatron
from gapo_megatron.formats.model_folder import VOCABULARY_FILES, check_dtypes, check_model_folder
from gapo_megatron.formats.torch_dist import MegatronFolder, write_megatron
from gapo_megatron.formats.weights import (
    MAX_SHARD_BYTES,
    HfFolder,
    carry_over,
    describe_left_out,
    write_hf_weights,
)
from gapo_megatron.formats.workers import worker_pool
from gapo_megatron.io.files import real
from gapo_megatron.models.quantization import quantization_of
from gapo_megatron.models.rules import Place, Rule, hf_shapes
from gapo_megatron.models.tables import geometry_of, rope_of, rules_for
from gapo_tools.conversion.report import Result, progress, write_report
from gapo_tools.conversion.verify import (
    Mode,
    Side,
    cast,
    check_tensors,
    kept_dtypes,
    num_bytes_to_read,
    verify,
    wanted_dtype,
)

TO_MEGATRON, TO_HF = "convert_hf_to_megatron", "convert_megatron_to_hf"
"""The commands, as the markers of their outputs name them."""
OVERWRITE = "; --overwrite replaces the result of a conversion"
"""Hint in the error that the output exists."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of both directions."""

    mode: Mode = "sample"
    """How much of the output is read back and compared."""
    dtype: torch.dtype | None = None
    """Dtype to cast to; None keeps that of every tensor."""
    replace: bool = False
    """Replace an existing output; else it is an error."""
    num_threads: int = 4


def hf_to_megatron(hf_dir: Path, megatron_dir: Path, options: Options) -> Result:
    """Convert a Hugging Face folder to a Megatron folder.

    Raises:
        ConfigError: a folder or config cannot be used, the output exists, or there is too little
            space; raised before a byte is written.
        ConversionError: a tensor is missing, extra, misshapen or damaged, the config contradicts
            the weights, or the output differs from its source; no output is left.
    """
    # The source, before a byte is written: complete, supported, and as config.json says.
    _check_apart(megatron_dir, hf_dir)
    hf = HfFolder(hf_dir)
    check_model_folder(hf_dir, weights=False)  # checked below
    hf_config = check_config(hf.root, hf.entries)
    rules = rules_for(hf_config)
    left_out = check_tensors(hf, rules)
    dtypes = _all(rules, options.dtype) or kept_dtypes(hf, rules)
    checks = {"config": f"agrees with the weights: {_describe(hf_config)}"}
    if method := quantization_of(hf_config):
        checks["quantization"] = (
            f"{method} weights read as bfloat16; the copied config.json states no quantization"
        )
    if left_out:
        checks["left out"] = f"{', '.join(left_out)}: determined by the config and other weights"
    if hf.left_out:
        checks["predicting layers"] = describe_left_out(hf)

    def read(rule: Rule, place: Place) -> Tensor:
        tensors = []
        for name in rule.hf_names(place):
            where = f"{hf.root / hf.entries[name].file}: {name}"
            tensors.append(cast(hf.read(name), wanted_dtype(rule, options.dtype), name=where))
        return rule.merge(tensors, place)

    # Write to a temporary folder, and publish it after all checks.
    num_bytes = _num_bytes(rules, dtypes)
    with new_folder(
        megatron_dir,
        num_bytes=num_bytes,
        replace=options.replace,
        is_ours=options.replace and _is_ours(megatron_dir),
        advice=OVERWRITE,
    ) as folder:
        release, side_files = folder / "release", folder / "hf"
        release.mkdir()
        with progress("convert", num_bytes) as (written, on_bytes):
            write_megatron(
                read,
                rules,
                hf_config=hf_config,
                dtypes=dtypes,
                output_dir=release,
                num_threads=options.num_threads,
                on_bytes=on_bytes,
            )
        (folder / TRACKER).write_text("release", encoding="utf-8")
        side_files.mkdir()
        carry_over(hf_dir, side_files, dtype=_new_dtype(hf_config, rules, dtypes))
        checks |= _gate(hf, MegatronFolder(folder, rules), rules, options, written="megatron")
        write_report(folder, source=hf_dir, dtypes=dtypes.values(), checks=checks)
        mark(folder, made_by=TO_MEGATRON, made_at=megatron_dir)
    return Result(megatron_dir, checks, written)


def megatron_to_hf(
    megatron_dir: Path,
    hf_dir: Path,
    options: Options,
    *,
    hf_config_dir: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Result:
    """Convert a Megatron folder, of this package or Megatron-LM, to a Hugging Face folder.

    Args:
        megatron_dir: see `MegatronFolder`.
        hf_dir: output folder.
        options: see `Options`.
        hf_config_dir: folder with config.json, tokenizer and other files that are not weights; None
            takes the one inside the Megatron folder.
        max_shard_bytes: largest size of a safetensors file.

    Raises:
        ConfigError, ConversionError: see `hf_to_megatron`; also if the Megatron folder records
            another model than config.json describes, or a file does not match its manifest.
    """
    # The source, before a byte is written: complete, undamaged, and as config.json says.
    found, side_files, hf_config = find_source(megatron_dir, hf_config_dir, output=hf_dir)
    rules = rules_for(hf_config)
    megatron = MegatronFolder(found, rules)
    check_dtypes(megatron.root, megatron.entries)
    dtypes = _all(rules, options.dtype) or kept_dtypes(megatron, rules)
    checks = {
        "config": f"{side_files / 'config.json'}: {_describe(hf_config)}",
        "record": ", ".join(map(str, found.records)) + " agree with it"
        if found.records
        else "none: rope, norm epsilon etc. are taken from config.json unchecked",
    }
    if padding := _num_padding_rows(megatron, rules):
        checks["padding"] = (
            f"{padding} rows after the {hf_config.vocab_size} of the vocabulary left out"
        )
    checks["files"] = check_file_digests(found, options.num_threads)
    ends = end_tokens_of_run(found, side_files, hf_config)

    def read(rule: Rule, place: Place) -> Tensor:
        where = f"{found.root}: {rule.megatron_name(place)}"
        return cast(megatron.read(rule, place), wanted_dtype(rule, options.dtype), name=where)

    # Write to a temporary folder, and publish it after all checks.
    num_bytes = _num_bytes(rules, dtypes)
    with new_folder(
        hf_dir,
        num_bytes=num_bytes,
        replace=options.replace,
        is_ours=is_marked(hf_dir, made_by=TO_HF),
        advice=OVERWRITE,
    ) as folder:
        with progress("convert", num_bytes) as (written, on_bytes):
            write_hf_weights(
                read,
                rules,
                dtypes=dtypes,
                output_dir=folder,
                max_shard_bytes=max_shard_bytes,
                num_threads=options.num_threads,
                on_bytes=on_bytes,
            )
        dtype = _new_dtype(hf_config, rules, dtypes)
        carry_over(side_files, folder, dtype=dtype, end_tokens=ends)
        hf = HfFolder(folder)
        check_config(hf.root, hf.entries)
        checks |= _gate(hf, megatron, rules, options, written="hf")
        write_report(folder, source=found.root, dtypes=dtypes.values(), checks=checks)
        mark(folder, made_by=TO_HF, made_at=hf_dir)
    return Result(hf_dir, checks, written)


def find_source(
    megatron_dir: Path, hf_config_dir: Path | None, *, output: Path
) -> tuple[Found, Path, PretrainedConfig]:
    """Find a checkpoint, and the folder with a config.json that agrees with its records."""
    found = find_megatron(megatron_dir)
    side_files = hf_config_dir or found.hf_dir
    if side_files is None:
        raise ConfigError(
            f"Megatron folder {found.root} has no config.json: give a folder with the model's "
            "config.json and tokenizer by --hf-config"
        )
    _check_apart(output, found.root, side_files)
    check_model_folder(side_files, weights=False)
    hf_config = read_config(side_files)
    for source, record in found.records.items():
        compare_configs(hf_config, record, source=str(source))
    return found, side_files, hf_config


def end_tokens_of_run(
    found: Found, side_files: Path, hf_config: PretrainedConfig
) -> tuple[int, ...]:
    """The tokens that ended responses in the run that wrote a checkpoint, for `carry_over`.

    Empty if no run wrote it, or if the folder has no tokenizer.
    """
    if found.manifest is None or not any(
        (side_files / name).is_file() for name in VOCABULARY_FILES
    ):
        return ()
    section = found.manifest.config.get("data") or {}
    keys = ("chat_template", "chat_template_kwargs", "end_tokens")
    named = {key: section[key] for key in keys if section.get(key)}
    data = DataConfig.model_validate({"train_path": "unused", **named})
    tokenizer = open_tokenizer(side_files, hf_config.vocab_size)
    bind_template(tokenizer, data)
    return find_end_tokens(tokenizer, data, side_files, vocab_size=hf_config.vocab_size).ids


def check_file_digests(found: Found, num_threads: int) -> str:
    """Compare all files with the digests of the manifest, if there is one; returns the finding."""
    if found.manifest is None:
        return f"no digests: only checkpoints of a run have a {MANIFEST_NAME}"
    files = found.manifest.files
    num_bytes = sum(entry.num_bytes for entry in files.values())
    with (
        progress("digests", num_bytes) as (reading, on_bytes),
        worker_pool(num_threads, on_bytes) as (pool, on_bytes),
    ):
        for damage in pool.map(
            lambda item: find_damage(found.root, dict([item]), on_bytes=on_bytes), files.items()
        ):
            if damage:
                raise ConversionError(damage)
    return f"{len(files)} files match their SHA-256 in {MANIFEST_NAME} ({reading})"


def _gate(
    hf: HfFolder,
    megatron: MegatronFolder,
    rules: Sequence[Rule],
    options: Options,
    *,
    written: Side,
) -> dict[str, str]:
    """Compare the output with its source; returns what each check found."""
    num_bytes = num_bytes_to_read(hf, megatron, rules, options.mode)
    with progress("verify", num_bytes) as (reading, on_bytes):
        num_compared = verify(
            hf,
            megatron,
            rules,
            written=written,
            dtype=options.dtype,
            mode=options.mode,
            num_threads=options.num_threads,
            on_bytes=on_bytes,
        )
    num_elements = sum(math.prod(shape) for shape in hf_shapes(rules).values())
    num_parameters = sum(len(rule.places) for rule in rules if not rule.tied)
    checks = {
        "accounting": f"{num_elements:,} elements: {len(hf.entries)} Hugging Face tensors, "
        f"{num_parameters} Megatron parameters under {len(megatron.entries)} keys"
    }
    if options.mode == "none":
        return checks | dict.fromkeys(("round trip", "logits"), "skipped: --verify none")
    left = num_parameters - num_compared
    checks["round trip"] = (
        f"all {num_compared} parameters that were compared equal bit for bit ({reading})"
        + (f"; {left} not compared: --verify full does" if left else "")
    )
    return checks | {"logits": _compare_logits(hf, megatron, options.dtype)}


def _compare_logits(hf: HfFolder, megatron: MegatronFolder, dtype: torch.dtype | None) -> str:
    """Raise ConversionError unless both folders give the same logits; returns how close."""
    # Imports Megatron-core, which takes seconds that --verify none does not need.
    from gapo_tools.conversion import logits_check

    if reason := logits_check.obstacle(hf.root):
        return f"not compared: {reason}"
    with Console(stderr=True, markup=False).status("logits"), _quiet():
        logits = logits_check.compare_logits(hf.root, megatron.root, dtype=dtype)
    if not logits.agrees:
        raise ConversionError(
            f"{megatron.root} and {hf.root} hold the same numbers but compute different logits: "
            f"{logits}"
        )
    return str(logits)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the libraries, so that the report stands alone."""
    bars, disabled = transformers_logging.is_progress_bar_enabled(), logging.root.manager.disable
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        if bars:
            transformers_logging.enable_progress_bar()


def _all(rules: Sequence[Rule], dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    return {rule.megatron: wanted_dtype(rule, dtype) or dtype for rule in rules} if dtype else {}


def _check_apart(output: Path, *sources: Path) -> None:
    """Raise ConfigError if writing `output` would replace a source."""
    for source in sources:
        if real(source).is_relative_to(real(output)):
            raise ConfigError(f"output folder {output} is or contains the source {source}")


def _is_ours(output: Path) -> bool:
    """Whether the conversion made a Megatron folder, and nothing was added since.

    Raises:
        ConfigError: something was: Megatron-LM trains on in the folder that it loads.
    """
    if not is_marked(output, made_by=TO_MEGATRON):
        return False
    tracker, made = output / TRACKER, {"release", "hf", TRACKER, REPORT_NAME, MARKER_NAME}
    others = sorted({path.name for path in output.iterdir()} - made)
    if tracker.exists() and tracker.read_bytes().strip() != b"release":
        others.append(TRACKER)
    if others:
        raise ConfigError(
            f"output folder {output} holds {others[0]}, which the conversion did not write and "
            "would remove: name another folder, or move that away"
        )
    return True


def _new_dtype(
    hf_config: PretrainedConfig, rules: Sequence[Rule], dtypes: Mapping[str, torch.dtype]
) -> torch.dtype | None:
    """The dtype to write to config.json; None if it has it already, or the weights have several."""
    stored = {dtypes[one.megatron] for one in rules if not (one.tied or one.is_buffer)}
    return stored.pop() if len(stored) == 1 and stored != {hf_config.dtype} else None


def _num_padding_rows(megatron: MegatronFolder, rules: Sequence[Rule]) -> int:
    """Padding rows of the embedding, beyond the vocabulary of config.json."""
    embedding = next(rule for rule in rules if rule.vocab_padded)
    (slot,) = megatron.slots[embedding.megatron, Place()]
    return megatron.entries[slot.key].shape[0] - embedding.full_shape[0]


def _num_bytes(rules: Sequence[Rule], dtypes: Mapping[str, torch.dtype]) -> int:
    """Bytes of the weights, in either format."""
    return sum(
        math.prod(rule.full_shape) * len(rule.places) * dtypes[rule.megatron].itemsize
        for rule in rules
        if not rule.tied
    )


def _describe(hf_config: PretrainedConfig) -> str:
    g, rope = geometry_of(hf_config), rope_of(hf_config.to_dict())
    scaled = f", {rope.kind} scaling by {rope.scaling['factor']:g}" if rope.scaling else ""
    return (
        f"{hf_config.model_type}, {g.num_layers} layers of {g.hidden}, {g.heads} query and "
        f"{g.kv_heads} key/value heads of {g.head_dim}, vocabulary of {g.vocab}"
        f"{' (tied)' if g.tied else ''}, rope base {rope.base:g}{scaled}"
    )
