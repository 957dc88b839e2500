"""Tools: the model's turn may hold calls of a calculator or of Python, and the results come back.

A call is written as Qwen's and Hermes' chat templates write it:

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "12 * (3 + 4)"}}
    </tool_call>
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gapo_megatron.data.messages import special_pattern, without_special
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.isolation import SYSTEM_PYTHON
from gapo_megatron.rewards.code import check_programs, run_program
from gapo_megatron.rewards.final_answer import CALL, final_answer
from gapo_megatron.rollout.chat import ChatTurns, cut_middle
from gapo_megatron.rollout.environments.one_turn import OneTurn
from gapo_megatron.rollout.turns import messages
from gapo_megatron.types import Episode, TurnSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOOLS = {"calculator": "expression", "python": "code"}
"""Argument of each tool."""
_MOST_CHARACTERS = 2000
"""Longest expression; and longest result without `max_call_tokens`, which is cut in the middle."""
_MOST_DIGITS = 4000
"""Longest number of the calculator, in decimal digits; Python prints no longer ones."""


class Tools(OneTurn):
    """Runs the calls of each turn of the model; a turn without a call ends the episode.

    A call in its thinking is a draft. One that cannot be read, or whose program fails, has an error
    as its result, which the model may learn from. The prompt's text says which tools there are. The
    verifier reads the last turn only: results of tools are not the model's.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tools: Sequence[str] = ("calculator",),
        max_calls: int = 4,
        role: str = "tool",
        chat_template: bool = True,
        template_variables: Mapping[str, Any] = {},
        timeout_s: int = 10,
        sandbox: str = "bubblewrap",
        python: str = SYSTEM_PYTHON,
        max_call_tokens: int = 0,
    ) -> None:
        """Check tools, sandbox and chat template.

        Args:
            tokenizer: the policy's.
            tools: `calculator`, `python`.
            max_calls: calls of an episode; a turn beyond them ends it.
            role: author of the results in the chat template.
            chat_template: write results as messages of the tokenizer's chat template, if it has
                one; otherwise they are text between `<tool_response>` and `</tool_response>`. By
                default `data.chat_template`.
            template_variables: variables of the chat template beside
                `data.chat_template_kwargs`.
            timeout_s: time limit of a Python program.
            sandbox: where programs run, as `reward.sandbox`.
            python: interpreter of the programs, as `reward.python`.
            max_call_tokens: `environment.max_call_tokens`.

        Raises:
            ConfigError: names the setting, its value and the rule.
        """
        for tool in tools:
            if tool not in _TOOLS:
                raise ConfigError(f"tools ({tool!r}) must be of {', '.join(_TOOLS)}")
        for name, value in {"max_calls": max_calls, "timeout_s": timeout_s}.items():
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} ({value!r}) must be a whole number from 1")
        super().__init__(tokenizer)
        self._tools = tuple(tools)
        self._max_calls, self._max_call_tokens = max_calls, max_call_tokens
        self._chat = None
        if chat_template and tokenizer.chat_template:
            self._chat = ChatTurns(tokenizer, role=role, options=template_variables)
        self._special = special_pattern(tokenizer)
        self._box: dict[str, Any] = {"timeout_s": timeout_s, "sandbox": sandbox, "python": python}
        # What is calculated, or runs in a sandbox, has no effect: after a kill it runs again.
        self.may_repeat = "python" not in tools or sandbox != "unsafe"
        if "python" in tools:
            check_programs(**self._box)

    def respond(
        self, episode: Episode
    ) -> Sequence[int] | tuple[Sequence[int], TurnSettings] | None:
        """The results of the turn's calls, in order; None without a call."""
        turns = [one for one in messages(self._tokenizer, episode) if one["role"] == "assistant"]
        *earlier, calls = (find_calls(one["content"]) for one in turns)
        if not calls or sum(map(len, earlier)) + len(calls) > self._max_calls:
            return None
        results, num_cut = list[str](), 0
        for call in calls:
            result, num_left_out = cut_middle(
                self._clean(self._run(call)), self._tokenizer, max_tokens=self._max_call_tokens
            )
            results.append(result)
            num_cut += num_left_out
        if self._chat is not None:
            tokens = self._chat.tokens(episode, results)
        else:
            text = "".join(f"<tool_response>{result}</tool_response>" for result in results)
            tokens = list(self._tokenizer.encode(text, add_special_tokens=False))
        return (tokens, TurnSettings(num_cut=num_cut)) if num_cut else tokens

    def _run(self, call: str) -> str:
        """The result of a call: `name` with `arguments`."""
        try:
            name, arguments = read_call(call)
        except DataError as error:
            return f"error: {error}"
        if name not in self._tools:
            return f"error: there is no tool {name!r}, only {', '.join(self._tools)}"
        value = arguments.get(_TOOLS[name]) if isinstance(arguments, dict) else None
        if not isinstance(value, str):
            return f"error: {_TOOLS[name]} must be a text"
        if name == "calculator":
            return calculate(value)
        output, failure = run_program(value, **self._box)
        return f"{output}error: the program {failure}" if failure else output

    def _clean(self, text: str) -> str:
        """A result without special tokens: it must not end its message. Cut if long."""
        text = text.encode(errors="replace").decode()  # JSON may hold halves of characters
        half = _MOST_CHARACTERS // 2
        if not self._max_call_tokens and len(text) > 2 * half:
            text = f"{text[:half]} ... {text[-half:]}"
        return without_special(text, self._special)


def find_calls(text: str) -> list[str]:
    """What is between `<tool_call>` and the next `</tool_call>`, in order; linear in the text.

    Args:
        text: a turn as `marked_text` has it; calls in its thinking do not count.
    """
    text, (opening, closing) = final_answer(text) or "", CALL
    calls, start = [], text.find(opening)
    while start >= 0 and (end := text.find(closing, start + len(opening))) >= 0:
        calls.append(text[start + len(opening) : end])
        start = text.find(opening, end + len(closing))
    return calls


def read_call(call: str) -> tuple[str, Any]:
    """`name` and `arguments` of a call; of a name alone an empty object.

    Raises:
        DataError: it is no JSON, or none that a server or an agent can be sent (half a character,
            NaN); or it has no name, or something else than arguments.
    """
    try:
        read = json.loads(call)
        json.dumps(read, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise DataError(f"the call cannot be read: {error}") from None
    if not isinstance(read, dict) or not isinstance(read.get("name"), str):
        raise DataError("the call cannot be read: it has no name")
    if "arguments" not in read and len(read) > 1:
        raise DataError("the call cannot be read: it has no arguments")
    return read["name"], read.get("arguments", {})


def calculate(expression: str) -> str:
    """The value of an arithmetic expression of numbers, `+ - * / // % **` and brackets.

    Returns:
        The number, as Python prints it, or a line that begins with `error:`.
    """
    if len(expression) > _MOST_CHARACTERS:
        return f"error: the expression has more than {_MOST_CHARACTERS} characters"
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return str(_value(tree.body))
    except (SyntaxError, ValueError, ArithmeticError, MemoryError, RecursionError) as error:
        return f"error: {error}"


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _value(node: ast.expr) -> int | float:
    """Value of a node. ValueError: it is no arithmetic, or the number is too long."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _BINARY:
            return _checked(_BINARY[type(node.op)](left, right))
    raise ValueError(f"not arithmetic: {ast.unparse(node)[:60]}")


def _power(left: float, right: float) -> int | float:
    is_whole = isinstance(left, int) and isinstance(right, int) and right > 0
    if is_whole and int(left).bit_length() * right > 4 * _MOST_DIGITS:
        raise ValueError("the number is too long")
    value = left**right
    if isinstance(value, complex):
        raise ValueError("the result is no real number")
    return _checked(value)


def _checked(value: float) -> int | float:
    if isinstance(value, int) and value.bit_length() > 4 * _MOST_DIGITS:
        raise ValueError("the number is too long")
    return value
