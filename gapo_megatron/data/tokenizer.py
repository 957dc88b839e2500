"""Loads the policy's tokenizer and checks the properties that training needs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from gapo_megatron.compat.library_errors import as_config_error
from gapo_megatron.compat.transformers import loads_by_itself, tokenizer_class
from gapo_megatron.errors import ConfigError
from gapo_megatron.formats.model_folder import VOCABULARY_FILES, check_model_folder
from gapo_megatron.io.documents import read_object
from gapo_megatron.models.config_json import ModelFacts
from gapo_megatron.rewards.final_answer import special_tokens

_NAMED = ("pad_token", "unk_token", "bos_token", "eos_token")
_SAMPLE = "What is 12 * (3 + 4)?\n\u00e9\u5317\U0001f600"


def load_tokenizer(
    hf_dir: str | Path,
    *,
    field: str = "model.hf_dir",
    facts: ModelFacts | PretrainedConfig | None = None,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face folder for training, offline.

    Args:
        hf_dir: a folder with a config.json.
        field: setting or option that names the folder, for errors.
        facts: result of `check_model_folder`, if it has already checked the folder.

    Raises:
        ConfigError: see `check_model_folder` and `open_tokenizer`; or the tokenizer has no EOS
            token, without which no response ends.
    """
    facts = facts or check_model_folder(hf_dir, weights=False, field=field)
    try:
        tokenizer = open_tokenizer(Path(hf_dir), facts.vocab_size)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{field} ({hf_dir}): the tokenizer needs an EOS token (eos_token in "
            "tokenizer_config.json): without it responses never end"
        )
    return tokenizer


def open_tokenizer(folder: Path, vocab_size: int) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder, without running its code or asking the user.

    Special tokens that the model does not have are no error until a text has one (Gemma 3's
    language models have no image token): then `encode` of the result raises a ConfigError.

    Args:
        folder: a folder that `check_model_folder` has checked.
        vocab_size: vocabulary size of the model.

    Raises:
        ConfigError: there is no tokenizer, transformers cannot load it, or it has other tokens that
            the model does not have, or its EOS, BOS, UNK or PAD is such a token.
    """
    # Without these files transformers would create an empty tokenizer of the model's class.
    if not any((folder / name).is_file() for name in VOCABULARY_FILES):
        hint = ""
        if (folder / "tiktoken.model").is_file():
            hint = "; tiktoken.model needs code to be read: make a tokenizer.json of it first"
        raise ConfigError(f"{folder} has no tokenizer: none of {', '.join(VOCABULARY_FILES)}{hint}")
    _check_classes(folder)
    with as_config_error(f"{folder}: the tokenizer cannot be loaded"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        # Some damage shows only in use.
        ids = [*tokenizer.get_vocab().values(), *tokenizer(_SAMPLE)["input_ids"]]
        ids += tokenizer.all_special_ids
        tokenizer.decode(tokenizer.encode(_SAMPLE, add_special_tokens=False))
        named = {getattr(tokenizer, f"{name}_id"): name for name in _NAMED}
        unused = special_tokens(tokenizer).keys() - named.keys()
    odd = [one for one in ids if not (type(one) is int and 0 <= one < vocab_size)]
    if wrong := [one for one in odd if one not in unused]:
        raise ConfigError(
            f"{folder}: the tokenizer's {named.get(wrong[0], 'vocabulary')} has the token id "
            f"{wrong[0]!a}, outside of vocab_size ({vocab_size}) in config.json"
        )
    if odd:
        tokenizer.encode = functools.partial(_encode, tokenizer, vocab_size)
    return tokenizer


def _encode(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, *given: Any, **options: Any
) -> Any:
    """As the tokenizer's own method; raises ConfigError for a token that the model lacks."""
    ids = type(tokenizer).encode(tokenizer, *given, **options)
    if (most := np.asarray(ids).max(initial=0)) >= vocab_size:
        raise ConfigError(
            f"{tokenizer.name_or_path}: a text has {tokenizer.decode([most])!r}, which the model "
            f"does not: its id ({most}) must be below vocab_size ({vocab_size}) of config.json"
        )
    return ids


def _check_classes(folder: Path) -> None:
    """Raise ConfigError unless a folder names classes of plain tokenizers.

    A folder may name any class of transformers. Some load further files, such as code, and ask the
    user about it, because `trust_remote_code=False` is not passed on to them.
    """
    for name in ("tokenizer_config.json", "config.json"):
        try:
            chosen = read_object(folder / name).get("tokenizer_class")
        except FileNotFoundError:
            continue
        if chosen is None:
            continue
        where = f"{folder / name}: tokenizer_class ({chosen!a:.80})"
        with as_config_error(where):
            found = tokenizer_class(chosen)
        # An unknown class is ignored, as transformers does.
        if found is not None and not loads_by_itself(found):
            raise ConfigError(f"{where} must be a tokenizer that loads only its own files")
