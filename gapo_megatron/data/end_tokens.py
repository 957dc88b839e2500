"""The tokens that end a response, stated once: for engine, environments, evaluations and `sft`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gapo_megatron.config import DataConfig
from gapo_megatron.data.messages import render
from gapo_megatron.errors import ConfigError
from gapo_megatron.formats.model_folder import end_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ASKED, _ANSWER = {"role": "user", "content": "A question."}, "An answer."


@dataclass(frozen=True, slots=True)
class EndTokens:
    """Tokens at which a response ends; the model's files seldom agree on them."""

    sources: dict[int, tuple[str, ...]]
    """Who names each token."""
    texts: dict[int, str]
    warning: str = ""
    """Why responses may run to the limit; empty: no reason is known."""

    @property
    def ids(self) -> tuple[int, ...]:
        """All of them. The first is that of training examples (`sft`)."""
        return tuple(self.sources)

    def __str__(self) -> str:
        return ", ".join(
            f"{self.texts[one]} ({one}: {', '.join(names)})" for one, names in self.sources.items()
        )


def find_end_tokens(
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    hf_dir: str | Path,
    *,
    vocab_size: int,
    field: str = "model.hf_dir",
) -> EndTokens:
    """The tokens that end a response of a model.

    `data.end_tokens` if it is set; otherwise the union of the chat template's end of turn (with
    `data.chat_template`), the tokenizer's `eos_token`, and `eos_token_id` of generation_config.json
    and config.json.

    Args:
        tokenizer: the model's, bound to `data` (`messages.bind_template`).
        data: section `data`.
        hf_dir: the model's folder.
        vocab_size: the model's vocabulary size.
        field: setting that names the folder, for errors.

    Raises:
        ConfigError: nothing names a token, or a text of `data.end_tokens` is no single token.
    """
    sources: dict[int, tuple[str, ...]] = {}

    def add(token: int, source: str) -> None:
        sources[token] = (*sources.get(token, ()), source)

    tail = _end_of_turn(tokenizer) if data.chat_template else ""
    turn_end = _first_token(tokenizer, tail)
    for text in data.end_tokens:
        try:
            found = tokenizer.encode(text, add_special_tokens=False)
        except ConfigError as error:  # the model has no such token
            raise ConfigError(f"data.end_tokens ({text!r}): {error}") from None
        if len(found) != 1:
            raise ConfigError(
                f"data.end_tokens ({text!r}) must be a single token of the tokenizer, not "
                f"{len(found)}"
            )
        add(found[0], "data.end_tokens")
    if not data.end_tokens:
        if turn_end is not None:
            add(turn_end, "chat template")
        if tokenizer.eos_token_id is not None:
            add(int(tokenizer.eos_token_id), "tokenizer")
        for name, found in end_tokens(Path(hf_dir), vocab_size).items():
            for token in found:
                add(token, name)
    if not sources:
        raise ConfigError(
            f"{field} ({hf_dir}): neither the tokenizer (eos_token), nor generation_config.json or "
            "config.json (eos_token_id) names a token that ends responses: set data.end_tokens"
        )
    texts = {one: str(tokenizer.decode([one])) for one in sources}
    warning = ""
    if data.chat_template and turn_end not in sources:
        ends = EndTokens(sources, texts)
        warning = (
            f"{field} ({hf_dir}): the chat template ends the model's turns with {tail[:20]!r}, "
            f"which ends no response: only {ends} do. Responses may run on into further turns"
        )
    return EndTokens(sources, texts, warning)


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the chat template writes after the last turn of the model, or before the next one."""
    said = [_ASKED, {"role": "assistant", "content": _ANSWER}]
    for messages in (said, [*said, _ASKED]):
        try:
            text = render(messages, tokenizer, add_generation_prompt=False)
        except ConfigError:  # it refuses such a conversation
            continue
        if tail := text.rpartition(_ANSWER)[2].lstrip():
            return tail
    return ""


def _first_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """The first token of a text; None if it is an ordinary one, not an added (control) token."""
    found = tokenizer.encode(text, add_special_tokens=False)[:1]
    return found[0] if found and found[0] in tokenizer.added_tokens_decoder else None
