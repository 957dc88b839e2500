"""Check a Hugging Face model folder before it is used. Imports no torch and no transformers.

An error names file, field and value within a second, instead of a library failing in the middle of
a run. Errors that only the tokenizer's library finds are in `data.tokenizer`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gapo_megatron.errors import ConfigError, ConversionError
from gapo_megatron.formats.folder import MARKER_NAME, REPORT_NAME
from gapo_megatron.formats.headers import INDEX, SINGLE
from gapo_megatron.formats.model_tensors import model_tensors
from gapo_megatron.io.documents import open_file, read_object, read_text
from gapo_megatron.io.files import file_sha256
from gapo_megatron.models.config_json import FLOATS, ModelFacts, read_facts, refuse_code
from gapo_megatron.models.parts import sizes_shown
from gapo_megatron.models.rules import Shape, check_names, hf_shapes
from gapo_megatron.models.tables import geometry_of, rules_for

MAX_TEMPLATE_CHARACTERS = 2**20
"""Longest chat template that is read: ten times the longest published ones."""

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    *("merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json"),
    "chat_template.jinja",
)
"""Files that the tokens of a prompt depend on; a model has some of them."""
_ADAPTER = "adapter_config.json"
_NAMED_TEMPLATES = "additional_chat_templates/*.jinja"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_NOT_CARRIED = (*_WEIGHT_SUFFIXES, ".index.json", REPORT_NAME, MARKER_NAME)


def check_model_folder(
    folder: str | Path, *, weights: bool = True, field: str | None = None
) -> ModelFacts:
    """Check the files of a model folder that are there; missing ones are the readers' error.

    Args:
        folder: with a config.json.
        weights: also check the headers of the weights, if there are any.
        field: setting that names the folder, for errors.

    Returns:
        The model that config.json describes.

    Raises:
        ConfigError: see `read_facts`; a tokenizer file or generation_config.json is no JSON object,
            or names token ids beyond the vocabulary; a file that is to be copied cannot be read; or
            an adapter is beside the model.
        ConversionError: the weights are integers or have 8 bits, or belong to another model than
            config.json describes; a ConfigError instead if `field` is given.
    """
    root = Path(folder)
    try:
        facts = read_facts(root)
        if (root / _ADAPTER).exists():
            raise ConfigError(
                f"{root / _ADAPTER} makes transformers add an adapter to this model; if the "
                "weights are merged (`merge_and_unload` leaves both), remove the adapter's files, "
                "else merge into another folder"
            )
        _check_readable(root)
        end_tokens(root, facts.vocab_size)
        _check_tokenizer_files(root, facts.vocab_size)
        if weights and any((root / name).exists() for name in (SINGLE, INDEX)):
            _check_weights(root, facts)
    except (ConfigError, ConversionError) as error:
        if field is None:
            raise
        raise ConfigError(f"{field} ({folder}): {error}") from None
    return facts


def non_weight_files(folder: str | Path) -> list[Path]:
    """Files to copy beside the weights: config, tokenizer, chat templates, and so on."""
    root = Path(folder)
    files = (
        path
        for path in root.iterdir()
        if not path.name.endswith(_NOT_CARRIED)
        # A dangling link in place of one of these files is an error, not a missing file.
        and (path.is_file() or path.name in ("generation_config.json", *TOKENIZER_FILES))
    )
    return sorted([*files, *root.glob(_NAMED_TEMPLATES)])


def _check_readable(root: Path) -> None:
    """Raise ConfigError if a file that will be copied at the end cannot be opened."""
    try:
        for path in non_weight_files(root):
            open_file(path).close()
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from None


# --- tokens --------------------------------------------------------------------------------------


def add_end_tokens(root: Path, ids: Collection[int]) -> None:
    """Let generation_config.json name tokens that end responses, after those that it names.

    A base model's files often name the end of a document alone, and other programs stop at nothing
    else. Without the file, transformers reads these ids, BOS and PAD from config.json.

    Args:
        root: the folder of a model that is being written.
        ids: token ids; nothing is written if the file names all of them.
    """
    path = root / "generation_config.json"
    generation = read_object(path if path.exists() else root / "config.json")
    if not path.exists():
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        generation = {name: generation[name] for name in names if name in generation}
    stated = generation.get("eos_token_id")
    stated = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if missing := sorted({*ids} - {*stated}):
        generation["eos_token_id"] = [*stated, *missing]
        text = json.dumps(generation, indent=2, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8")


def end_tokens(root: Path, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """`eos_token_id` of generation_config.json and of config.json, by the file's name.

    Args:
        root: the folder; either file may be missing.
        vocab_size: the model's vocabulary size.

    Raises:
        ConfigError: a file is damaged, or a token id is not below `vocab_size`.
    """
    found: dict[str, tuple[int, ...]] = {}
    # No other field is used: generation needs the end tokens, the embedding its padding index.
    for name, known in (
        ("generation_config.json", ["eos_token_id"]),
        ("config.json", ["eos_token_id", "pad_token_id"]),
    ):
        try:
            fields = read_object(root / name)
        except FileNotFoundError:
            continue
        for field in known:
            value = fields.get(field)
            if value is None or (field == "pad_token_id" and value == -1):  # -1 in older files
                continue
            ids = value if field == "eos_token_id" and isinstance(value, list) else [value]
            for one in ids:
                if not (type(one) is int and 0 <= one < vocab_size):
                    raise ConfigError(
                        f"{root / name}: {field} ({one!a:.80}) must be token ids: whole numbers "
                        f"of 0 or more, below vocab_size ({vocab_size}) of config.json"
                    )
            if field == "eos_token_id":
                found[name] = tuple(ids)
    return found


def _is_template(value: Any) -> bool:
    if isinstance(value, list):
        if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in value):
            return False
        value = {one["name"]: one.get("template") for one in value}
    texts = list(value.values()) if isinstance(value, dict) else [value]
    return all(isinstance(one, str) and len(one) <= MAX_TEMPLATE_CHARACTERS for one in texts)


def _stated_ids(files: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[Any]]]:
    """Ids of tokens that a tokenizer's files state, by file and field."""
    main, settings = files.get("tokenizer.json", {}), files.get("tokenizer_config.json", {})
    model = main.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # [token, score] in the order of ids
        vocabulary = dict(enumerate(range(len(vocabulary))))
    added = main.get("added_tokens")
    if isinstance(added, list):
        ids = [one.get("id") if isinstance(one, dict) else one for one in added]
        yield "tokenizer.json: added_tokens", ids
    decoder = settings.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        ids = [int(key) if re.fullmatch("[0-9]{1,9}", key) else key for key in decoder]
        yield "tokenizer_config.json: added_tokens_decoder", ids
    for name, tokens in (
        ("tokenizer.json: model.vocab", vocabulary),
        ("added_tokens.json", files.get("added_tokens.json")),
        ("vocab.json", files.get("vocab.json")),
    ):
        if isinstance(tokens, dict):
            yield name, [*tokens.values()]


def _special_ids(files: Mapping[str, Any]) -> set[int]:
    """Ids of special tokens, which no text has by chance."""
    added = files.get("tokenizer.json", {}).get("added_tokens")
    tokens = [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    ids = (one.get("id") for one in tokens if one.get("special") is True)
    return {one for one in ids if type(one) is int and one >= 0}


def _check_tokenizer_files(root: Path, vocab_size: int) -> None:
    """Check the tokenizer's files that are there; most of what is in them its library checks.

    Raises:
        ConfigError: a file is no JSON object, names code, or its chat template is none; or a token
            has an id that the model does not have, or of another token. The library would give it
            a new one. Special tokens may have ids beyond the model's: `open_tokenizer` refuses to
            use them.
    """
    files: dict[str, Any] = {}
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        if name.endswith(".json"):
            with contextlib.suppress(FileNotFoundError):
                files[name] = read_object(root / name)
    settings, source = files.get("tokenizer_config.json", {}), root / "tokenizer_config.json"
    refuse_code(settings, source=str(source))
    if others := settings.get("fast_tokenizer_files"):  # transformers would read these instead
        raise ConfigError(f"{source}: fast_tokenizer_files ({others!a:.80}) are not read")
    template = settings.get("chat_template")
    if template is not None and not _is_template(template):
        raise ConfigError(
            f"{source}: chat_template ({template!a:.80}) must be a template, or several by name, "
            f"of {MAX_TEMPLATE_CHARACTERS} characters at most"
        )
    special = _special_ids(files)
    for where, ids in _stated_ids(files):
        seen: set[int] = set()
        for one in ids:
            is_known = type(one) is int and (0 <= one < vocab_size or one in special)
            if not is_known or one in seen:
                raise ConfigError(
                    f"{root}/{where}: {one!a:.40} must be the id of one token: a whole number of 0 "
                    f"or more, below vocab_size ({vocab_size}) of config.json"
                )
            seen.add(one)
    for path in (root / "chat_template.jinja", *root.glob(_NAMED_TEMPLATES)):
        if path.exists():
            read_text(path, max_bytes=MAX_TEMPLATE_CHARACTERS)


def read_chat_template(root: Path) -> Any:
    """The chat template of a model folder's tokenizer, a text or texts by name; None: none."""
    if (path := root / "chat_template.jinja").exists():
        return read_text(path, max_bytes=MAX_TEMPLATE_CHARACTERS)
    try:
        return read_object(root / "tokenizer_config.json").get("chat_template")
    except FileNotFoundError:
        return None


def tokenizer_sha256(root: Path) -> str:
    """Digest of the tokenizer of a model folder, without its chat template."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        path = root / name
        if name == "tokenizer_config.json" and path.is_file():
            settings = {k: v for k, v in read_object(path).items() if k != "chat_template"}
            digest.update(json.dumps(settings, sort_keys=True).encode())
        elif name != "chat_template.jinja" and path.is_file():
            digest.update(file_sha256(path).encode())
    return digest.hexdigest()


# --- weights -------------------------------------------------------------------------------------


class _Tensor(Protocol):
    """A tensor as described by headers, with a torch dtype or its name."""

    @property
    def shape(self) -> Shape: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def file(self) -> str: ...


def _check_weights(root: Path, facts: ModelFacts) -> None:
    tensors = model_tensors(root).headers
    check_dtypes(root, tensors)
    check_sizes(root, facts, tensors)
    rules = rules_for(facts)
    try:
        check_names(rules, tensors)
    except ConversionError as error:
        raise ConversionError(f"{root}: {error}") from None
    for name, shape in hf_shapes(rules).items():
        if (tensor := tensors[name]).shape != shape:
            raise ConversionError(
                f"{root / tensor.file}: {name} has shape {list(tensor.shape)}; "
                f"the model's config says {list(shape)}"
            )


def check_dtypes(root: Path, tensors: Mapping[str, _Tensor]) -> None:
    """Raise ConversionError unless all tensors of a folder, of either format, are floats."""
    for name, tensor in tensors.items():
        if str(tensor.dtype).removeprefix("torch.") not in FLOATS:
            raise ConversionError(
                f"{root / tensor.file}: {name} is {tensor.dtype}; must be one of "
                f"{', '.join(FLOATS)}, or quantized in a way that config.json states and that is "
                "read for this model"
            )


def check_sizes(root: Path, hf_config: Any, tensors: Mapping[str, _Tensor]) -> None:
    """Raise ConversionError if config.json contradicts the weights; lists fields and tensors.

    A size of the config is wrong if the tensors of all layers and experts agree on another one. If
    they disagree, one of them is damaged, which `check_names` and the shapes tell.
    """
    differences = [*_depth(hf_config, tensors), *_sizes(hf_config, tensors)]
    differences += _tying(hf_config, tensors)
    if differences:
        raise ConversionError(
            f"{root / 'config.json'} contradicts the weights: {'; '.join(differences)}"
        )


def _depth(hf_config: Any, tensors: Mapping[str, _Tensor]) -> Iterator[str]:
    """Compare num_hidden_layers with the highest layer that has a tensor."""
    numbers = {
        int(found[1]): name
        for name in tensors
        if (found := re.match(r"model\.layers\.([0-9]{1,9})\.", name))
    }
    last = max(numbers, default=-1)
    if numbers and last + 1 != hf_config.num_hidden_layers:
        yield (
            f"num_hidden_layers is {hf_config.num_hidden_layers}, but the last layer is number "
            f"{last} ({numbers[last]} in {tensors[numbers[last]].file})"
        )


def _sizes(hf_config: Any, tensors: Mapping[str, _Tensor]) -> Iterator[str]:
    """Compare sizes of the config with the first dimensions of the weights that show them."""
    groups: dict[str, list[str]] = {}
    for name in tensors:
        groups.setdefault(re.sub(r"\b\d+\b", "*", name), []).append(name)
    for field, value, pattern in sizes_shown(geometry_of(hf_config)):
        names = groups.get(pattern, [])
        sizes = {tensors[name].shape[:1] for name in names}
        if len(sizes) == 1 and sizes != {(value,)}:
            tensor = tensors[names[0]]
            yield (
                f"{field} is {value}, but {names[0]} in {tensor.file} has shape "
                f"{list(tensor.shape)}"
            )


def _tying(hf_config: Any, tensors: Mapping[str, _Tensor]) -> Iterator[str]:
    """Compare tie_word_embeddings with the presence of an output layer."""
    embedding, output = tensors.get("model.embed_tokens.weight"), tensors.get("lm_head.weight")
    if not hf_config.tie_word_embeddings and output is None:
        yield "tie_word_embeddings is false, but there is no lm_head.weight"
    if not (hf_config.tie_word_embeddings and embedding and output):
        return
    if (output.shape, output.dtype) != (embedding.shape, embedding.dtype):
        yield (
            f"tie_word_embeddings is true, but lm_head.weight in {output.file} is "
            f"{list(output.shape)} {output.dtype}, model.embed_tokens.weight "
            f"{list(embedding.shape)} {embedding.dtype}"
        )
