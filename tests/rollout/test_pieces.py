"""Texts of tokens: pieces that together are the response, whatever the tokenizer does."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gapo_megatron.rollout.pieces import Pieces

TEXTS = [
    "The answer is 42, since 6 * 7 = 42.\n\n\tSo: \\boxed{42}",
    "naïve café — 数学の答え は 42 です 👩‍🚀🚀 \u202eabc\u2028",
    "x" * 50 + " y  z   " + "</think>",
]


def of_bytes() -> Callable[[list[int]], str]:
    """As GPT-2, Llama 3 and Qwen have it: a character may be several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS[:1], trainer)
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def of_words() -> Callable[[list[int]], str]:
    """As Llama 2 and Gemma have it: words begin with a space, which the first one loses."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
    )
    fallback = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=fallback, show_progress=False)
    tokenizer.train_from_iterator(TEXTS[:1], trainer)
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("make", [of_bytes, of_words])
def test_pieces_of_any_tokens_are_their_text(
    make: Callable[[], Callable[[list[int]], str]],
) -> None:
    """Also of tokens that no text has, such as halves of characters."""
    decode, rng = make(), random.Random(0)
    pieces = Pieces(decode)
    for length in (1, 2, 3, 40, 400):
        for _ in range(20):
            ids = [rng.randrange(300) for _ in range(length)]
            text = decode(ids)
            found = pieces.split(ids, text)
            assert "".join(found) == text and len(found) == len(ids)
    assert pieces.split([], "") == []


def test_each_token_has_its_own_text_and_a_character_is_with_its_last_byte() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["a"], trainer)
    text = "a 🚀\ufffdß."
    ids = tokenizer.encode(text).ids
    found = Pieces(tokenizer.decode).split(ids, text)
    # The character that stands for what is no text cannot be told from it: it is with the next.
    assert found == ["a", " ", "", "", "", "🚀", "", "", "", "", "\ufffdß", "."]
    # Half a character in the middle, and at the end.
    broken = [*ids[:4], *ids[:2], ids[2]]
    assert Pieces(tokenizer.decode).split(broken, tokenizer.decode(broken)) == [
        *("a", " ", "", ""),
        *("\ufffda", " ", "\ufffd"),
    ]


def test_words_keep_the_space_that_a_decoder_drops_from_the_first() -> None:
    decode = of_words()
    word = next(i for i in range(330) if decode([0, i]) == "<unk> 42")
    assert Pieces(decode).split([word] * 4, decode([word] * 4)) == ["42", " 42", " 42", " 42"]


def no_decoder() -> Callable[[list[int]], str]:
    """What it says of a token depends on those before: its first letter is a capital."""

    def decode(ids: list[int]) -> str:
        text = "".join("ab" if token % 2 else "cd" for token in ids)
        return text[:1].upper() + text[1:]

    return decode


@pytest.mark.parametrize("make", [of_bytes, no_decoder])
def test_a_long_text_is_split_in_time_that_grows_with_it(
    make: Callable[[], Callable[[list[int]], str]],
) -> None:
    """Few decodings are of more than one token, and none is long."""
    decode, lengths = make(), list[int]()

    def counted(ids: list[int]) -> str:
        lengths.append(len(ids))
        return decode(ids)

    rng = random.Random(1)
    ids = [rng.randrange(300) for _ in range(5000)]
    found = Pieces(counted).split(ids, decode(ids))
    assert "".join(found) == decode(ids)
    assert max(lengths) <= 17 and len(lengths) < 3 * len(ids)
    if make is of_bytes:
        assert max(map(len, found)) <= 20


def test_a_decoder_that_cleans_up_loses_its_place_for_a_few_tokens_only() -> None:
    words = ["do", " n't", " ", "x", "y", "z", " ."]

    def decode(ids: list[int]) -> str:
        return "".join(words[i] for i in ids).replace(" n't", "n't").replace(" .", ".")

    ids = [0, 1, 3, 6, *[3, 4, 5] * 100]
    found = Pieces(decode).split(ids, decode(ids))
    assert "".join(found) == decode(ids) and found[-30:] == ["x", "y", "z"] * 10
