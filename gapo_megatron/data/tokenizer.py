"""The policy's tokenizer, checked for what training needs of it."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from gapo_megatron.convert.config_json import read_facts
from gapo_megatron.convert.headers import read_object
from gapo_megatron.convert.model_folder import VOCABULARY_FILES, check_tokenizer_files
from gapo_megatron.errors import ConfigError
from gapo_megatron.library_errors import as_config_error

_SAMPLE = "What is 12 * (3 + 4)?\n\u00e9\u5317\U0001f600"


def load_tokenizer(hf_dir: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face folder for training, from disk alone.

    Raises:
        ConfigError: the folder is missing, or see `open_tokenizer`; or the tokenizer has no EOS
            token: without one no response ever ends.
    """
    folder = Path(hf_dir)
    if not (folder / "config.json").is_file():
        state = "holds no config.json" if folder.is_dir() else "is not a folder"
        raise ConfigError(
            f"model.hf_dir ({folder}) {state}; it must be a Hugging Face model folder"
        )
    try:
        tokenizer = open_tokenizer(folder)
    except ConfigError as error:
        raise ConfigError(f"model.hf_dir ({folder}): {error}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model.hf_dir ({folder}): the tokenizer has no EOS token (eos_token in "
            "tokenizer_config.json); responses could never end"
        )
    return tokenizer


def open_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder. No code of the folder is run, and nobody is asked.

    Raises:
        ConfigError: it holds none; a file is damaged, or not what transformers takes; or there are
            tokens that the model of config.json does not have.
    """
    # Without any of these transformers would make up an empty tokenizer of the model's class.
    if not any((folder / name).is_file() for name in VOCABULARY_FILES):
        raise ConfigError(f"it holds no tokenizer ({', '.join(VOCABULARY_FILES)})")
    vocab_size = read_facts(folder).vocab_size
    check_tokenizer_files(folder, vocab_size)
    with as_config_error(f"{folder}: the tokenizer cannot be loaded"):
        _check_classes(folder)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        # Some damage shows only when it is used.
        ids = [*tokenizer.get_vocab().values(), *tokenizer(_SAMPLE)["input_ids"]]
        ids += tokenizer.all_special_ids
        tokenizer.decode(tokenizer.encode(_SAMPLE, add_special_tokens=False))
        if odd := [one for one in ids if not (type(one) is int and 0 <= one < vocab_size)]:
            raise ConfigError(
                f"{folder}: the tokenizer has token {odd[0]!a}, and the vocabulary of config.json "
                f"has {vocab_size}"
            )
    return tokenizer


def _check_classes(folder: Path) -> None:
    """Raise ConfigError unless the classes that a folder names are those of single tokenizers.

    Any class of transformers can be named. Some load other files, among them code, which they ask
    about: they are not told that nothing of the kind is trusted.
    """
    for name in ("tokenizer_config.json", "config.json"):
        try:
            chosen = read_object(folder / name).get("tokenizer_class")
        except FileNotFoundError:
            continue
        found = tokenizer_class_from_name(chosen) if chosen is not None else None
        # (One that is not found is as if none were named.)
        if found is not None and not (
            isinstance(found, type)
            and issubclass(found, PreTrainedTokenizerBase)
            and _loader(found) is _loader(PreTrainedTokenizerBase)
        ):
            raise ConfigError(
                f"{folder / name}: tokenizer_class ({chosen!a:.80}) is no tokenizer that loads its "
                "own files alone"
            )


def _loader(tokenizer_class: type[PreTrainedTokenizerBase]) -> object:
    return getattr(tokenizer_class.from_pretrained, "__func__", None)
