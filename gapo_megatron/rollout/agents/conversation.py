"""A conversation of an agent with the model: messages become tokens, sampled turns messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gapo_megatron.errors import ConfigError
from gapo_megatron.rewards.final_answer import special_tokens
from gapo_megatron.rollout.agents.errors import RefusedError
from gapo_megatron.rollout.chat import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""A message as `read_message` returns it."""


@dataclass(slots=True, eq=False)
class Conversation:
    """What an agent and the model have said to each other in one of an episode's conversations.

    Only messages after what has been said become tokens, so that no sampled token is tokenised
    again.
    """

    number: int
    """`TurnSettings.conversation`."""
    template: ChatTemplate
    """The policy's chat template, with the conversation's tools."""
    tools: Sequence[Mapping[str, Any]] | None
    """Tools of its first request, which all later ones repeat."""
    messages: list[Message] = field(default_factory=list)
    """What has been said, the last answer included."""
    tokens: list[int] = field(default_factory=list)
    """What the model reads: the template's first token, the agent's messages, its own turns."""

    def opening(self, messages: Sequence[Message], *, first: int) -> list[int]:
        """Tokens of its first request, the template's first token included.

        Args:
            messages: as the model is to read them.
            first: the token with which the template must begin (`first_token`).

        Raises:
            RefusedError: the template refuses the messages, or begins them otherwise.
        """
        try:
            tokens = self.template.opening(messages)
        except Exception as error:  # whatever a template raises
            raise RefusedError(f"messages: {self.template.name}: {error}", "messages") from None
        if tokens[:1] != [first]:
            raise RefusedError(
                f"messages: {self.template.name} begins this conversation with another token than "
                "all others",
                "messages",
            )
        return tokens

    def continuation(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of messages after what has been said. RefusedError: the template refuses them."""
        try:
            return self.template.continuation(self.tokens[-1], messages)
        except (ConfigError, ValueError) as error:
            raise RefusedError(f"messages: {error}", "messages") from None
        except Exception as error:  # whatever a template raises
            raise RefusedError(f"messages: {self.template.name}: {error}", "messages") from None

    def is_continued_by(self, request: Mapping[str, Any]) -> bool:
        """Whether a request repeats what has been said, and adds messages, none the assistant's."""
        messages = request["messages"]
        return (
            num_repeated(messages) == len(self.messages)
            and request["tools"] == self.tools
            and self.num_same(messages) == len(self.messages)
        )

    def num_same(self, messages: Sequence[Message]) -> int:
        """Number of messages at the beginning that are what was said."""
        pairs = enumerate(zip(messages, self.messages, strict=False))
        most = min(len(messages), len(self.messages))
        return next((i for i, (one, ours) in pairs if not _is_same(one, ours)), most)


def num_repeated(messages: Sequence[Message]) -> int:
    """Number of messages up to the assistant's last, which a request can only repeat."""
    roles = [one["role"] for one in messages]
    return len(roles) - roles[::-1].index("assistant") if "assistant" in roles else 0


def first_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token with which the chat template begins every conversation.

    Raises:
        ConfigError: there is no template, or it begins with text; names the tokenizer.
    """
    template = ChatTemplate(tokenizer)
    token = template.opening([{"role": "user", "content": "A question."}])[0]
    if token not in special_tokens(tokenizer):
        text = str(tokenizer.decode([token]))
        raise ConfigError(
            f"{template.name} must begin conversations with a special token, not with token "
            f"{token} ({text!r})"
        )
    return token


def _is_same(message: Message, ours: Message) -> bool:
    """Whether a message is one that was said; the model's: up to its name and white space."""
    if ours["role"] != "assistant" or message["role"] != "assistant":
        return message == ours

    def compared(one: Message) -> dict[str, Any]:
        return {**one, "content": one["content"].strip(), "name": None}

    return compared(message) == compared(ours)
