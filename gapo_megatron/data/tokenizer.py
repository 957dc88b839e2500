"""The policy's tokenizer, checked for what training needs of it."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from gapo_megatron.errors import ConfigError

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    *("merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json"),
    "chat_template.jinja",
)
"""All that the tokens of a prompt depend on, of which a model has some."""


def load_tokenizer(hf_dir: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face folder, from disk alone.

    Raises:
        ConfigError: the folder is missing, holds no tokenizer, or the tokenizer has no EOS token:
            without one no response ever ends.
    """
    folder = Path(hf_dir)
    if not (folder / "config.json").is_file():
        state = "holds no config.json" if folder.is_dir() else "is not a folder"
        raise ConfigError(
            f"model.hf_dir ({folder}) {state}; it must be a Hugging Face model folder"
        )
    # Without any of these transformers would make up an empty tokenizer of the model's class.
    if not any((folder / name).is_file() for name in VOCABULARY_FILES):
        raise ConfigError(
            f"model.hf_dir ({folder}) holds no tokenizer ({', '.join(VOCABULARY_FILES)})"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:  # absent, unreadable, or cut short
        raise ConfigError(
            f"model.hf_dir ({folder}): the tokenizer cannot be loaded: {error}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model.hf_dir ({folder}): the tokenizer has no EOS token (eos_token in "
            "tokenizer_config.json); responses could never end"
        )
    return tokenizer
