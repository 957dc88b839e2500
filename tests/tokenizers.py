"""Tokenizers in the style of published ones, for tests; no model folder has one here."""

from __future__ import annotations

from functools import cache

from tokenizers import ByteLevelBPETokenizer, Tokenizer, decoders, models, normalizers
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


@cache
def llama2_like(letters: str, *merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """A tokenizer in the style of Llama 2's and Mistral's: it begins every text with a space.

    Args:
        letters: its tokens, beside line break and space.
        merges: pairs of tokens that become one; the space is \u2581.
    """
    names = ["<unk>", "<s>", "</s>", "<0x0A>", "\u2581", *letters, *map("".join, merges)]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[*merges], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
