"""A byte-level tokenizer with a chat's special tokens, for tests; no model folder has one here."""

from __future__ import annotations

from functools import cache

from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

_TEXT = [
    "Compute 12 * (3 + 4) with a tool: <tool>calculator</tool>\n\nand then say the answer.",
    "<think>\nlet me think</think> The result is 84. ```python\nprint(84)\n```output\n84\n```",
    "a -> b, b->c; if x>>1 > y: x>=3\n</tool>\n</tool>.",
] * 20


@cache
def byte_level(*special: str, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """A tokenizer in the style of Qwen's; tokens join letters, and punctuation with new lines."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(_TEXT, vocab_size=400, special_tokens=[])
    tokenizer.add_special_tokens([eos, *special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token=eos)
