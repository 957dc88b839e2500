"""Undocumented parts of transformers in use."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name


def tokenizer_class(name: Any) -> Any:
    """The tokenizer class of a name; None if this transformers has none.

    Raises:
        Exception: of any kind if `name` is not a valid name.
    """
    # Uses: models.auto.tokenization_auto.tokenizer_class_from_name (not in its __all__)
    # Versions: transformers 5.19.0
    # Upstream: none found (huggingface/transformers#12208 says that it is not public)
    return tokenizer_class_from_name(name)


def loads_by_itself(tokenizer: Any) -> bool:
    """Whether a class is a tokenizer with the base class's loader, which reads only its files."""
    # Uses: PreTrainedTokenizerBase.from_pretrained.__func__
    # Versions: transformers 5.19.0
    # Upstream: none found
    return (
        isinstance(tokenizer, type)
        and issubclass(tokenizer, PreTrainedTokenizerBase)
        and _loader(tokenizer) is _loader(PreTrainedTokenizerBase)
    )


def _loader(tokenizer: type[PreTrainedTokenizerBase]) -> object:
    return getattr(tokenizer.from_pretrained, "__func__", None)
