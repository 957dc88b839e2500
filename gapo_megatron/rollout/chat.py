"""Tokens between two turns of a chat, as the model's chat template writes them.

A template renders whole conversations. What it puts between the model's turn and the next comes
from a conversation with placeholders: its rendering with the next message, less the rendering up to
the model's turn. So sampled tokens are never rendered or tokenised again, and with the appended
tokens they are what the template would have made of the conversation.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gapo_megatron.data.messages import render
from gapo_megatron.errors import ConfigError
from gapo_megatron.rewards.final_answer import special_tokens
from gapo_megatron.types import Episode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""`role`, `content`, and what else the template reads."""

_USER = "A question."
_PLAIN, _THINKING = "An answer.", "<think>\nA thought.\n</think>\n\nAn answer."
"""Turns of the model. Some templates remove the reasoning of earlier turns."""
_RESULT = "A result."


class ChatTemplate:
    """The policy's chat template: a conversation grows by tokens, and nothing is rendered twice."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, options: Mapping[str, Any] = {}
    ) -> None:
        """Read the template.

        Args:
            tokenizer: the policy's, which renders as prompts were rendered (`bind_template`).
            options: further variables of the template.

        Raises:
            ConfigError: there is no template; names the tokenizer.
        """
        self._tokenizer = tokenizer
        self._options = dict(options)
        self._special = frozenset(special_tokens(tokenizer))
        self._checked: set[tuple[str, ...]] = set()
        self.name = f"model.hf_dir: the chat template of {tokenizer.name_or_path or 'this model'}"
        if not tokenizer.chat_template:
            raise ConfigError(f"{self.name} is needed for turns of a chat, but there is none")

    def check(self, roles: Sequence[str]) -> None:
        """Check that messages of these roles continue a conversation, and change nothing before.

        Raises:
            ConfigError: the template refuses a role, leaves its messages out, or rewrites earlier
                turns; names both.
        """
        named = ", ".join(map(repr, dict.fromkeys(roles)))
        messages = [{"role": role, "content": _RESULT} for role in roles]
        try:
            tails = {turn: self._tail([turn], messages) for turn in (_PLAIN, _THINKING)}
            again = self._tail([_THINKING, _THINKING], messages)
        except ConfigError as error:
            if named in str(error):
                raise
            raise ConfigError(f"{self.name}, with messages of role {named}: {error}") from None
        if {*tails.values(), again} != {again}:
            raise ConfigError(f"{self.name} writes a {named} message differently by what precedes")
        if again.count(_RESULT) < len(roles):  # Phi-3's knows no tools
            raise ConfigError(f"{self.name} leaves out a message of role {named}")
        self._checked.add(tuple(roles))

    def end_of_turn(self, role: str) -> int:
        """The token with which the template ends the model's turn before a message of this role."""
        return self._encode(self._tail([_PLAIN], [{"role": role, "content": _RESULT}]))[0]

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation's first messages, up to the beginning of the model's turn."""
        return self._encode(self._render(messages))

    def continuation(self, last: int, messages: Sequence[Message]) -> list[int]:
        """The tokens that end the model's turn, give it messages, and begin its next turn.

        Args:
            last: the token that ended the model's turn: EOS, or one that completed a text of
                `environment.stop`, after which the template's end of the turn is appended, too.
            messages: none by the model.

        Raises:
            ConfigError: see `check`.
            ValueError: the turn ended with an EOS token that the template does not write there.
        """
        roles = tuple(role for role, _ in itertools.groupby(one["role"] for one in messages))
        if roles not in self._checked:
            self.check(roles)
        tokens = self._encode(self._tail([_PLAIN], messages))
        if last == tokens[0]:
            return tokens[1:]
        if last in self._special:
            raise ValueError(
                f"the model ended its turn with token {last}, the chat template with {tokens[0]}"
            )
        return tokens

    def _tail(self, turns: Sequence[str], contents: Sequence[Message]) -> str:
        """What the template writes after the last of the model's turns.

        Each but the last turn is followed by the same messages.
        """
        messages: list[Message] = [{"role": "user", "content": _USER}]
        for turn in turns:
            before = self._render(messages)
            messages.append({"role": "assistant", "content": turn})
            messages += contents
            whole = self._render(messages)
            if not whole.startswith(before + turn):
                roles = ", ".join(dict.fromkeys(repr(one["role"]) for one in contents))
                raise ConfigError(
                    f"{self.name} rewrites earlier turns of the model when a message of role "
                    f"{roles} follows: the sampled tokens would not be those of the "
                    "conversation. Use a template that keeps them, reasoning included"
                )
        tail = whole[len(before + turn) :]
        tokens = self._encode(tail)
        if self._encode(whole)[-len(tokens) :] != tokens or tokens[0] not in self._special:
            raise ConfigError(
                f"{self.name} must end the model's turns with a special token; after it comes "
                f"{tail[:40]!r}"
            )
        return tail

    def _render(self, messages: Sequence[Message]) -> str:
        return render(messages, self._tokenizer, **self._options)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def cut_middle(
    text: str, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int
) -> tuple[str, int]:
    """A text without its middle, if it is long, and the number of tokens that were cut.

    The middle says so: beginnings and ends of a tool's output tell most.

    Args:
        text: the output of a call.
        tokenizer: the policy's.
        max_tokens: tokens that stay, but for the line in the middle; 0: all.
    """
    tokens = list(tokenizer.encode(text, add_special_tokens=False)) if max_tokens else []
    num_cut = max(len(tokens) - max_tokens, 0)
    if not num_cut:
        return text, 0
    num_last = max_tokens // 2
    first, last = tokens[: max_tokens - num_last], tokens[len(tokens) - num_last :]
    # Where a character is cut in two, a half of it means nothing.
    begin = str(tokenizer.decode(first)).rstrip("\N{REPLACEMENT CHARACTER}")
    end = str(tokenizer.decode(last)).lstrip("\N{REPLACEMENT CHARACTER}")
    return f"{begin}\n[... {num_cut} tokens cut ...]\n{end}", num_cut


class ChatTurns:
    """Messages to the model after its turns, as tokens to append (`Environment.respond`)."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        role: str = "tool",
        options: Mapping[str, Any] = {},
    ) -> None:
        """Check that the template continues a conversation without changing what came before.

        Args:
            tokenizer: the policy's, with its chat template.
            role: author of the messages; `user` where the template has no `tool`.
            options: further variables of the template, beside those of the prompts.

        Raises:
            ConfigError: there is no template, it refuses the role, or it rewrites earlier turns;
                names the tokenizer and the role.
        """
        self._template = ChatTemplate(tokenizer, options=options)
        self._role = role
        self._template.check([role])

    @property
    def end_of_turn(self) -> int:
        """The token with which the template ends the model's turn."""
        return self._template.end_of_turn(self._role)

    def tokens(self, episode: Episode, contents: Sequence[str]) -> list[int]:
        """The tokens that end the model's turn, give it messages, and begin its next turn.

        Args:
            episode: its last token ended the model's turn (`ChatTemplate.continuation`).
            contents: texts of the messages; the model reads special tokens in them as text only if
                its tokenizer does, so remove those that you do not trust.

        Raises:
            ValueError: the turn ended with an EOS token that the template does not write there.
        """
        messages = [{"role": self._role, "content": content} for content in contents]
        return self._template.continuation(int(episode.token_ids[-1]), messages)
