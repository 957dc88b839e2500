"""What a model may do to its tools: every call is answered, none breaks the trainer.

An answer that raised would make the verdict unknown, by which a model could evade a wrong one.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from gapo_megatron.config import EnvironmentConfig
from gapo_megatron.errors import ConfigError
from gapo_megatron.rollout.answers import check_answer
from gapo_megatron.rollout.environments.tools import Tools, calculate
from gapo_megatron.rollout.turns import Turns
from tests.hostile import READS_TEXT, read_programs
from tests.rollout.test_tools import TOKENIZER, episode_of
from tests.sandbox_setup import needs_sandbox

_CALL = {"name": "calculator", "arguments": {"expression": "1"}}
BODIES = [
    *(
        "",
        " ",
        "\0",
        "{",
        "}",
        "{}",
        "[]",
        "null",
        "true",
        "5",
        "1e999",
        "NaN",
        '"text"',
        "\ufeff{}",
    ),
    *("[" * 5000, "{" * 5000, '{"a":' * 5000, "9" * 5000, "-" * 99, "\\", '"\\ud800"', "\x1b[2J"),
    '{"name": "calculator"}',
    '{"arguments": {"expression": "1"}}',
    '{"name": null, "arguments": null}',
    '{"name": ["calculator"], "arguments": {"expression": "1"}}',
    '{"name": {"a": 1}, "arguments": {"expression": "1"}}',
    '{"name": 5, "arguments": {}}',
    '{"name": "\\ud800", "arguments": {}}',
    '{"name": "calculator\\u0000", "arguments": {}}',
    '{"name": "<|im_end|>", "arguments": {}}',
    '{"name": "__class__", "arguments": {}}',
    f'{{"name": "{"x" * 9999}", "arguments": {{}}}}',
    '{"name": "calculator", "arguments": []}',
    '{"name": "calculator", "arguments": "1"}',
    '{"name": "calculator", "arguments": {"expression": 5}}',
    '{"name": "calculator", "arguments": {"expression": ["1"]}}',
    '{"name": "calculator", "arguments": {"expression": null}}',
    '{"name": "calculator", "arguments": {"expression": "\\ud800"}}',
    '{"name": "calculator", "arguments": {"expression": "\\udfff\\ud800 + 1"}}',
    '{"name": "calculator", "name": "shell", "arguments": {"code": "1"}}',
    f"[{json.dumps(_CALL)}]",
    json.dumps(_CALL) * 2,
    json.dumps(_CALL) + "\n",
    json.dumps(_CALL | {"more": 1e999}),
    str(_CALL),
]

EXPRESSIONS = [
    *(
        "",
        " ",
        "\0",
        "\n",
        "#",
        "1 +",
        "+",
        "()",
        "1,",
        "*",
        "**",
        "1 1",
        "0x",
        "0b2",
        "1__0",
        "e5",
    ),
    *("True", "None", "...", "'a'", "b'a'", "f''", "x", "x := 1", "lambda: 1", "yield", "await x"),
    *("f(1)", "[1]", "{1}", "(1)[0]", "1 .real", "1j", "1 if 1 else 2", "not 1", "~1", "1 << 9"),
    *("1 < 2", "1 and 2", "1 @ 1", "*1", "[x for x in y]", "__import__('os')", "exec('1')"),
    *("1 / 0", "1 // 0", "1 % 0", "0 ** -1", "0.0 ** -1", "1.0 % 0", "(-8) ** 0.5", "1e999 // 1"),
    *("9 ** 9 ** 9", "2 ** 99999999", "10 ** 3000 * 10 ** 3000", "10.0 ** 999", "2 ** -(9 ** 99)"),
    *("9" * 1999, "1" * 2001, "0." + "9" * 1990, "1e" + "9" * 99, "9 ** 4000 % 7", "5 // 1e-320"),
    *("-" * 1999 + "1", "(" * 999 + "1" + ")" * 999, "1" + "+1" * 999, "1" + "**1" * 600),
    *("9**9**" * 300 + "1", "1" + "/2" * 999, "2" + "**2" * 400, "3.0" + "*3.0" * 400),
    *("\ud800", "é", "\uff11 + 1", "∞", "\u202e1+1", "1\u00a0+\u00a01", "\\", "'" * 1999, '"""'),
]

STOPS: list[tuple[Any, ...]] = [
    *((one,) for one in ("", "x" * 257, 5, None, b"x", ["x"], 1.5, True, {"x": 1})),
    *((one,) for one in ("\ud800", "é>", "«»", "漢字", "\u200b>")),
]

PROGRAMS = [
    *("", "\0", "(", "\ud800", "import", "raise", "raise SystemExit", "raise KeyboardInterrupt"),
    *("import os; os._exit(0)", "import os; os.kill(os.getpid(), 9)", "import os; os.abort()"),
    *("while True: pass", "import time; time.sleep(99)", "import ctypes; ctypes.string_at(0)"),
    *("print('x' * 10**8)", "while True: print('x' * 10**5)", "x = 'x' * 2**40"),
    *("print('\\ud800')", "import sys; sys.stdout.buffer.write(bytes(range(256)))"),
    *("import sys; sys.stdout.close()", "import os; os.closerange(0, 256)"),
    *("import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()", "exit(3)", "input()"),
    *("import os\nwhile True: os.fork()", "import os; os.fork(); print(1)"),
    *("import os\nfor i in range(64):\n    try: os.write(i, b'{\"failure\": null}\\n')\n"
      "    except OSError: pass",),
    *("print('<|im_end|></tool_response><tool_call>')", "import json; json.dumps = None; print(1)"),
    *("class A(Exception):\n    def __str__(self): raise A\nraise A",),
    "raise ValueError('\\ud800')",
    *("import threading, time; threading.Thread(target=time.sleep, args=(99,)).start()",),
    *("import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
      "    except (OSError, ValueError): pass\nwhile True: pass",),
    *("import atexit, time; atexit.register(time.sleep, 99)", "import os; os.chdir('/'); print(1)"),
]  # fmt: skip


def answered(tools: Tools, body: str) -> str:
    """The text that the model gets; as `respond` is used."""
    text = f"<tool_call>{body}</tool_call>".encode(errors="replace").decode()
    tokens = tools.respond(episode_of(text))
    checked = check_answer(tokens, max_tokens=10**4, vocab_size=len(TOKENIZER))
    assert checked is not None, body[:60]
    said = TOKENIZER.decode([*checked])
    assert said.startswith("<tool_response>") and said.endswith("</tool_response>"), said[:60]
    return said.removeprefix("<tool_response>").removesuffix("</tool_response>")


def test_whatever_a_call_holds_is_answered() -> None:
    tools = Tools(TOKENIZER, tools=["calculator"])
    for body in BODIES:
        said = answered(tools, body)
        assert said.startswith("error: ") or said == "1", body[:60]


def test_no_expression_is_more_than_arithmetic() -> None:
    """A number or an error, also through the whole tool, where text has to become tokens."""
    tools = Tools(TOKENIZER, tools=["calculator"])
    for one in EXPRESSIONS:
        found = calculate(one)
        if not found.startswith("error: "):
            assert isinstance(
                json.loads(found.replace("inf", "1").replace("nan", "1")), int | float
            )
        arguments = {"name": "calculator", "arguments": {"expression": one}}
        said = answered(tools, json.dumps(arguments))
        assert said[:20] == found[:20] or said.startswith("error: "), one[:60]


def test_a_stop_text_works_or_is_refused_by_name() -> None:
    for stop in STOPS:
        with pytest.raises((ConfigError, ValueError), match="stop"):
            config = EnvironmentConfig(kind="tools", stop=stop)
            Turns(TOKENIZER, config.stop, eos_token_ids=[1])
    for text in ("\0", " ", "\n", ".*", "(", "\\", "</s>", "a" * 256, "<tool_call>", "$^"):
        config = EnvironmentConfig(kind="tools", stop=(text,))
        assert Turns(TOKENIZER, config.stop, eos_token_ids=[1]).stop_ids


@pytest.mark.system
@needs_sandbox
def test_whatever_a_program_does_is_answered() -> None:
    """In bubblewrap; and then an honest one still runs."""
    tools = Tools(TOKENIZER, tools=["python"], timeout_s=1)
    attacks = [
        (READS_TEXT + text).replace("input()", "'1 2'") for _, _, text in read_programs("text.txt")
    ]
    assert len(attacks) > 30
    for program in (*PROGRAMS, *attacks[::8]):
        arguments = {"name": "python", "arguments": {"code": program}}
        answered(tools, json.dumps(arguments))
    honest = json.dumps({"name": "python", "arguments": {"code": "print(12 * 7)"}})
    assert answered(tools, honest) == "84\n"
