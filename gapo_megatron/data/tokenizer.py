"""The policy's tokenizer, checked for what training needs of it."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from gapo_megatron.compat.library_errors import as_config_error
from gapo_megatron.compat.transformers import loads_by_itself, tokenizer_class
from gapo_megatron.errors import ConfigError
from gapo_megatron.hf.model_folder import VOCABULARY_FILES, check_model_folder
from gapo_megatron.io.documents import read_object
from gapo_megatron.models.config_json import ModelFacts

_SAMPLE = "What is 12 * (3 + 4)?\n\u00e9\u5317\U0001f600"


def load_tokenizer(
    hf_dir: str | Path,
    *,
    field: str = "model.hf_dir",
    facts: ModelFacts | PretrainedConfig | None = None,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face folder for training, from disk alone.

    Args:
        hf_dir: a folder with a config.json.
        field: setting or option that names the folder, for errors.
        facts: what config.json says, of a folder that `check_model_folder` has passed; without, it
            is asked here.

    Raises:
        ConfigError: see `check_model_folder` and `open_tokenizer`; or the tokenizer has no EOS
            token: without one no response ever ends.
    """
    facts = facts or check_model_folder(hf_dir, weights=False, field=field)
    try:
        tokenizer = open_tokenizer(Path(hf_dir), facts.vocab_size)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{field} ({hf_dir}): the tokenizer has no EOS token (eos_token in "
            "tokenizer_config.json); responses could never end"
        )
    return tokenizer


def open_tokenizer(folder: Path, vocab_size: int) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder. No code of the folder is run, and nobody is asked.

    Args:
        folder: a folder that `check_model_folder` has passed.
        vocab_size: how many tokens the model has.

    Raises:
        ConfigError: it holds none, or not what transformers takes; or there are tokens that the
            model does not have.
    """
    # Without any of these transformers would make up an empty tokenizer of the model's class.
    if not any((folder / name).is_file() for name in VOCABULARY_FILES):
        raise ConfigError(f"{folder} holds no tokenizer ({', '.join(VOCABULARY_FILES)})")
    _check_classes(folder)
    with as_config_error(f"{folder}: the tokenizer cannot be loaded"):
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
        if chosen is None:
            continue
        where = f"{folder / name}: tokenizer_class ({chosen!a:.80})"
        with as_config_error(where):
            found = tokenizer_class(chosen)
        # (One that is not found is as if none were named.)
        if found is not None and not loads_by_itself(found):
            raise ConfigError(f"{where} is no tokenizer that loads its own files alone")
