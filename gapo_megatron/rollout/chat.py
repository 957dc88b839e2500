"""Tokens between two turns of a chat, as the model's chat template writes them.

A template renders whole conversations. What it puts between the model's turn and the next comes
from a conversation with placeholders: its rendering with the next message, less the rendering up to
the model's turn. So sampled tokens are never rendered or tokenised again, and with the appended
tokens they are what the template would have made of the conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gapo_megatron.errors import ConfigError
from gapo_megatron.types import Episode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_USER = "A question."
_PLAIN, _THINKING = "An answer.", "<think>\nA thought.\n</think>\n\nAn answer."
"""Turns of the model. Some templates remove the reasoning of earlier turns."""


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
            options: further variables of the template, as the prompts were rendered with.

        Raises:
            ConfigError: there is no template, it refuses the role, or it rewrites earlier turns;
                names the tokenizer and the role.
        """
        self._tokenizer = tokenizer
        self._role = role
        self._options = dict(options)
        self._special = frozenset(tokenizer.all_special_ids)
        if not tokenizer.chat_template:
            raise ConfigError(f"{self._named} is needed for turns of a chat, but there is none")
        try:
            tails = {turn: self._tail([turn], ["A result."]) for turn in (_PLAIN, _THINKING)}
            again = self._tail([_THINKING, _THINKING], ["A result."])
        except ConfigError:
            raise
        except Exception as error:  # whatever a template raises
            raise ConfigError(f"{self._named} refuses the role {role!r}: {error}") from None
        if {*tails.values(), again} != {again}:
            raise ConfigError(f"{self._named} writes a {role} message differently by what precedes")

    @property
    def end_of_turn(self) -> int:
        """The token with which the template ends the model's turn."""
        return self._encode(self._tail([_PLAIN], ["A result."]))[0]

    def tokens(self, episode: Episode, contents: Sequence[str]) -> list[int]:
        """The tokens that end the model's turn, give it messages, and begin its next turn.

        Args:
            episode: its last token ended the model's turn: EOS, or a text of `environment.stop`,
                after which the template's end of the turn is appended, too.
            contents: texts of the messages; the model reads special tokens in them as text only if
                its tokenizer does, so remove those that you do not trust.

        Raises:
            ValueError: the turn ended with an EOS token that the template does not write there.
        """
        tokens = self._encode(self._tail([_PLAIN], contents))
        last = int(episode.token_ids[-1])
        if last == tokens[0]:
            return tokens[1:]
        if last in self._special:
            raise ValueError(
                f"the model ended its turn with token {last}, the chat template with {tokens[0]}"
            )
        return tokens

    @property
    def _named(self) -> str:
        return f"model.hf_dir: the chat template of {self._tokenizer.name_or_path or 'this model'}"

    def _tail(self, turns: Sequence[str], contents: Sequence[str]) -> str:
        """What the template writes after the last of the model's turns.

        Each but the last turn is followed by the same messages.
        """
        messages = [{"role": "user", "content": _USER}]
        for turn in turns:
            before = self._render(messages)
            messages.append({"role": "assistant", "content": turn})
            messages += ({"role": self._role, "content": content} for content in contents)
            whole = self._render(messages)
            if not whole.startswith(before + turn):
                raise ConfigError(
                    f"{self._named} rewrites earlier turns of the model when a message of role "
                    f"{self._role!r} follows: the sampled tokens would not be those of the "
                    "conversation. Use a template that keeps them, reasoning included"
                )
        tail = whole[len(before + turn) :]
        tokens = self._encode(tail)
        if self._encode(whole)[-len(tokens) :] != tokens or tokens[0] not in self._special:
            raise ConfigError(
                f"{self._named} must end the model's turns with a special token; after it comes "
                f"{tail[:40]!r}"
            )
        return tail

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                [dict(one) for one in messages],
                tokenize=False,
                add_generation_prompt=True,
                **self._options,
            )
        )

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))
