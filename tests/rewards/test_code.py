"""The verifier of programs: what it reads, what it compares, and what it says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from gapo_megatron.rewards.code import run_tests, verify
from gapo_megatron.rewards.code.compare import same_text, same_value
from gapo_megatron.rewards.code.forms import AssertTests, CallTests, TextTests, names_of, read_tests
from gapo_megatron.rewards.code.program import blocks_of, program_of
from gapo_megatron.rewards.sandbox.inside.values import (
    MAX_ITEMS,
    decode,
    encode,
    list_node,
    tree_node,
)
from gapo_megatron.types import Outcome, Verdict
from tests.messages import mentions
from tests.problem_sets import SETS
from tests.sandbox_setup import CORRECT, PATIENT, SUM, judge, needs_sandbox

ROOT = Path(__file__).parents[2]
REAL_DATA = ROOT.parent / "shared" / "data"
needs_data = pytest.mark.skipif(
    not REAL_DATA.is_dir(), reason="needs the public problem sets beside the checkout"
)

ADD = {"fn_name": "add", "inputs": [[3, 4], [10, 20]], "outputs": [7, 30]}


# What is in a response


def extract_program(response: str, *names: str) -> str | None:
    blocks = blocks_of(response)
    return program_of(blocks, names) if blocks else None


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```py\na\n```\nand\n```python\nb\n```", "b\n"),
        ("```python\na\n```\nIt prints\n```\n6\n```", "a\n"),
        ("```\na\n```\n```\nb\n```", "b\n"),
        ("```python\na", None),
        ("```python\na\n```\n```python\nb", "a\n"),
        ("print(1)", None),
        ("```python print(1)```", None),
        ("", None),
        ("<think>```python\na\n```</think>```python\nb\n```", "b\n"),
        ("```python\na\n```</think>No.", None),
        ("<think>```python\na\n```", None),
        # Other marks come last, but may be anything.
        ("```solution\na\n```", "a\n"),
        ("```\na\n```\n```text\n6\n```", "a\n"),
        ("```python\na\n```\n```cpp\nb\n```\n```\n6\n```", "a\n"),
        # Ends of lines.
        ("```python\r\na\r\n\r\nb\r\n```\r\n", "a\n\nb\n"),
        ("```python\ra\r```", "a\n"),
        ("```python\na\x0cb\u2028c\n```", "a\x0cb\u2028c\n"),
        # Indentation goes, as far as the program has it too.
        ("    ```python\n    a\n      b\n\n    ```", "a\n  b\n\n"),
        ("1. x\n   ```python\n   a\nb\n   ```", "a\nb\n"),
        ("\t```python\n\ta\n\t```", "a\n"),
        ("   ```python\na:\n    b\n   ```", "a:\n    b\n"),
        ("```python\n  a\n    ```", "  a\n"),
        # Other fences, and fences that stand beside text.
        ("~~~python\na\n```\nb\n~~~", "a\n```\nb\n"),
        ("````python\na\n```\nb\n````", "a\n```\nb\n"),
        ("````python\na\n```\nThat is it.", "a\n"),
        ("- The program: ```python\n  a\n  ```", "a\n"),
        ("```python\nprint(1)```\nDone.", "print(1)\n"),
        ("```python\na = '```'\nb  # ```\n```", "a = '```'\nb  # ```\n"),
        ("```python\na\n```Done.", "a\n"),
        ("```python\na\n```python\nb\n```", "b\n"),
        ("```python\na\n```text\n6\n```", "a\n"),
        ("```markdown\n# x\n```python\na\n```\n```", "a\n"),
        # Within a quotation; and space that is none of ASCII's.
        ("> ```python\n> a:\n>     b > c\n>\n> ```\nDone.", "a:\n    b > c\n\n"),
        (">> ~~~py\n> > a\n>>  b\n>> ~~~", "a\n b\n"),
        (" > - ```python\n >   a\n >   ```", "a\n"),
        ("> Note\n\n```python\n> a\n```", "> a\n"),
        ("\u3000```python\na\n\xa0```\xa0\nb", "a\n"),
    ],
)
def test_the_last_program_of_the_final_part_is_judged(response, program):
    assert extract_program(response) == program


@pytest.mark.parametrize(
    "mark",
    ["Python", "PYTHON", "python3", "Python3", "py", "PY3", "python3.11", "pypy3", "PyPy",
     "ipython", "{python}", "{.python .numberLines}", " python", "python title=x", "Python 3",
     "python:main.py", "main.py", "python-3", "python2", "python,"],
)  # fmt: skip
def test_a_block_is_marked_as_python_in_many_ways(mark):
    assert extract_program(f"```{mark}\na\n```\nIt prints\n```\n6\n```") == "a\n"


@pytest.mark.parametrize(
    "mark", ["pycon", "pyrex", "text", "cython", "c++", "js", "output", "copy"]
)
def test_a_block_that_is_marked_as_something_else_is_no_program_beside_one(mark):
    assert extract_program(f"```\na\n```\n```{mark}\nb\n```") == "a\n"


EXAMPLE = "```\n>>> f()\n1\n```\n"


@pytest.mark.parametrize(
    "program",
    [
        f'def f():\n    """\n{EXAMPLE}"""\n    return 1\n',
        f"def f():\n    r'''It is \"\"\":\n{EXAMPLE}'''\n    return 1\n",
        f'"""\n{EXAMPLE}"""\ndef f():\n    return 1\n',
        f'"""\n```python\nf()\n```\n{EXAMPLE}"""\ndef f():\n    return 1\n',
        f'x = "it\'s \\"", \'\\\'"""\'  # it\'s """\ny = """\\"""\n{EXAMPLE}"""\n',
        f'x = """a""" + """\n{EXAMPLE}"""\n',
    ],
)
@pytest.mark.parametrize("mark", ["python", ""])
def test_a_fence_in_a_string_is_part_of_the_program(program, mark):
    compile(program, "program.py", "exec")
    response = f"It's:\n```{mark}\n{program}```\nIt prints:\n```text\n1\n```\n"
    assert extract_program(response) == program
    # Where quotes are left open no program begins with them.
    assert extract_program(f'```{mark}\n"""\n```\n```python\na\n```') == "a\n"


@pytest.mark.parametrize(
    "line",
    [
        "```python\nx\n",
        " ```\n",
        "`" * 60_000 + "x\n",
        " " * 60_000 + "```\n",
        "``` `\n",
        "```\t\t",
        '```python\n"""\n```\n',
        "```python\ndef f(): g\n```\n",
        "```python\nimport f\n```\n",
        '```python\n"\\"',
        "```python\n'\\'\n",
        '""" ',
        "\\",
        "x ```",
        "> " * 60_000 + "```\n",
        "> ",
    ],
)
def test_a_long_response_is_read_in_linear_time(line):
    """A second; hours, which no test has, where each place is read from all before it."""
    extract_program(line * (10**6 // len(line)), "f")
    extract_program("```python\n" + line.replace("\n", "") * (10**6 // len(line)))


USAGE = "Use it:\n```python\nx = {}(2, 3)\nprint(x)\n```\n"
IMPORTED = "Or:\n```python\nfrom solution import add\nprint(add(2, 3))\n```\n"
OUTPUT = "It prints:\n```\n5\n```\n"


def fenced(*programs: str, mark: str = "python") -> str:
    return "".join(f"Text.\n```{mark}\n{one}```\n" for one in programs)


@pytest.mark.parametrize(
    "program",
    [
        "def add(a, b):\n    return a + b\n",
        "import math\n\nasync def add(a, b):\n    return 1\n",
        "class Solution:\n    def add(self, a, b):\n        return a + b\n",
        "class add:\n    pass\n",
        "add = lambda a, b: a + b\n",
        "add: F = f\n",
    ],
)
@pytest.mark.parametrize("mark", ["python", "", "text"])
@pytest.mark.parametrize(
    "after", [USAGE.format("add"), IMPORTED, OUTPUT, "```pycon\n>>> add(1, 2)\n```\n"]
)
def test_the_last_block_that_defines_what_the_tests_call_is_the_program(program, mark, after):
    response = fenced("def add(): ...\n", program, mark=mark) + after
    assert extract_program(response, "add") == program
    imports = "from operator import sub, add\n"
    assert extract_program(fenced(imports, mark=mark) + USAGE.format("add"), "add") == imports
    assert extract_program(response + fenced("def add(a): ...\n"), "add") != program
    if after == USAGE.format("add"):  # no block defines it
        assert "print(x)" in (extract_program(response, "other") or "")


def test_the_tests_say_which_name_a_program_must_define():
    function = "def add(a, b):\n    return a + b\n"
    method = "class Solution:\n    def add(self, a, b):\n        return a + b\n"
    checked = "def check(candidate):\n    assert candidate(3, 4) == 7\n"
    for tests, program in {
        json.dumps(ADD): function,
        json.dumps({"test": checked, "entry_point": "add", "prompt": ""}): function,
        json.dumps({"test_list": ["assert add(3, 4) == 7"]}): function,
        json.dumps({"functional": f"{checked}check(Solution().add)"}): method,
    }.items():
        response = fenced(program, "def check(f): ...\ncheck(add(2, 3))\n")
        assert program_of(blocks_of(response), names_of(read_tests(tests))) == program, tests
    assert not names_of(TextTests(("",), ("5",)))


@needs_sandbox
def test_an_example_of_its_use_beside_a_program_changes_no_verdict():
    right, wrong = "def add(a, b):\n    return a + b\n", "def add(a, b):\n    return a\n"
    for program, outcome in {right: Outcome.CORRECT, wrong: Outcome.WRONG}.items():
        verdict = verify(
            fenced(program, "print(add(2, int(input())))\n"), json.dumps(ADD), limits=PATIENT
        )
        assert verdict.outcome is outcome, verdict


@pytest.mark.parametrize(
    ("blocks", "program"),
    [
        # What the last one uses and only an earlier one defines.
        ((h := "def h(a):\n    return a\n", "x = h(1)\n"), h + "x = h(1)\n"),
        ((i := "import math as m\n", h, "m.f(h)\n"), i + h + "m.f(h)\n"),
        ((i, c := "class A:\n    b = m.pi\n", h, "A()\n"), i + c + "A()\n"),
        ((k := "MOD = 7\n@f\ndef g(\n    a\n):\n    return MOD\n", "g(1)\n"), k + "g(1)\n"),
        # Earlier versions, and what runs something of its own.
        ((h, "def h(a):\n    return h\n"), "def h(a):\n    return h\n"),
        ((h + "print(h(1))\n", "x = h(1)\n"), "x = h(1)\n"),
        ((i, h), h),
    ],
)  # fmt: skip
def test_blocks_that_only_define_precede_the_program_that_uses_them(blocks, program):
    assert extract_program(fenced(*blocks)) == program


# Comparing outputs


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ("1 2\n3", "1\n2 3\n\n", True),
        ("", " \n", True),
        ("1 2", "1 2 3", False),
        ("YES", "yes", False),
        ("3.0", "3", True),
        ("3", "3.0", True),
        ("3.5", "3", False),
        ("3.00000001", "3", False),
        ("0.333333", "0.3333333", True),
        ("0.33333", "0.3333333", False),
        ("1000000.5", "1000000.9", True),
        ("9007199254740993", "9007199254740992", False),
        ("1e3", "1000.0", True),
        ("nan", "nan", True),
        ("nan", "1.5", False),
        ("inf", "1.5", False),
        ("1_0", "10", False),
        ("9" * 5000, "9" * 4999 + "8", False),
        ("9" * 5000 + ".0", "9" * 5000, True),
        ("0." + "3" * 70, "0.3333333", True),
        ("x.", "1.5", False),
        # What is no usual spelling of a number is text: strings of digits, times, ...
        ("10", "00000010", False),
        ("0010", "10", False),
        ("7", "007", False),
        ("0", "00", False),
        ("-7", "-07", False),
        ("1.5", "01.5", False),
        ("00.5", "0.5", False),
        ("1", "01.0", False),
        ("5", "+5", False),
        ("+5", "5", False),
        ("+0.5", "0.5", False),
        ("0", "-0", False),
        ("-0", "0", False),
        ("10", "1_0", False),
        ("1000.0", "1_000.0", False),
        ("1,000", "1000", False),
        ("\uff11\uff10", "10", False),
        ("\u0661.5", "1.5", False),
        ("31", "0x1f", False),
        ("0x1F", "0x1f", False),
        ("NaN", "nan", False),
        ("inf", "Infinity", False),
        ("1e999", "inf", False),
        ("1e999", "1e998", False),
        ("1e999", "10e998", True),
        ("1e03", "1000.0", True),
        # Others have several.
        ("1.", "1", True),
        ("1", "1.", True),
        (".5", "0.5", True),
        ("-.5", "-0.50", True),
        ("-0.0", "0", True),
        ("-0.0", "0.00", True),
        ("1e3", "1000", True),
        ("1E+20", "100000000000000000000", True),
        ("1e20", "100000000000000000001", False),
        ("1000", "1e3", True),
        ("1e-3", "0.001", True),
        ("5e-1", "0", False),
    ],
)
def test_outputs_are_compared_token_by_token(given, expected, same):
    assert same_text(given, expected) is same


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ((1, [2]), [1, [2]], True),
        ([1, 2], [1, 3], False),
        ([1], [1, 1], False),
        (0.1 + 0.2, 0.3, True),
        (0.3001, 0.3, False),
        (2**70, 2**70, True),
        (2**70, 1.5, False),
        ({1: "a"}, {"1": "a"}, True),
        ({"a": 1}, {"a": 2}, False),
        ({"b": 1, "a": 2}, {"a": 2, "b": 1}, True),
        ({1, 2}, {2, 1}, True),
        ({1, 2}, [1, 2], False),
        (["set", 1, 2], {1, 2}, False),
        (["dict"], {}, False),
        ("1", 1, False),
        (None, 0, False),
        (True, True, True),
        (math.nan, math.nan, True),
        (b"a", b"a", True),
        (1j, 1j, True),
    ],
)
def test_values_are_compared_as_json_would_hold_them(given, expected, same):
    wire = json.loads(json.dumps(encode(given)))
    assert same_value(wire, encode(expected)) is same


def test_values_survive_the_channel():
    value = [1, -(2**80), 1.5, "é\n", None, True, (1, (2,)), {3, 4}, {(1, 2): [5]}, b"\0", 2j]
    assert decode(json.loads(json.dumps(encode(value)))) == value
    assert encode(decode({"list_node": [1, 2, 3]})) == {"list_node": [1, 2, 3]}
    tree = [5, 4, 7, 3, None, 2, None, -1]
    assert encode(tree_node(tree)) == {"tree_node": tree}
    assert list_node([]) is None
    with pytest.raises(TypeError, match="type object"):
        encode([object()])


# Forms of tests


@pytest.mark.parametrize(
    ("form", "tests"),
    [
        (SUM, TextTests(("3 4\n", "10 20\n"), ("7\n", "30\n"))),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, TextTests(("1\n2",), ("3",))),
        ([{"input": "1", "output": "2"}], TextTests(("1",), ("2",))),
        (
            [{"input": "1", "output": "2", "testtype": "stdin", "metadata": {}}],
            TextTests(("1",), ("2",)),
        ),
        (
            [{"input": "[1]\n2", "output": "3", "metadata": '{"func_name": "f"}'}],
            CallTests("f", ([[1], 2],), (3,)),
        ),
        (
            {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "f"},
            CallTests("f", ([1, 2],), ([3],), wrapped=True),
        ),
        (
            {"inputs": ['"a"\n[1]'], "outputs": ["[3]"], "fn_name": "f"},
            CallTests("f", (["a", [1]],), ([3],)),
        ),
        ({"functional": "check()"}, AssertTests("check()")),
        (
            {"test": "def check(f): pass", "entry_point": "f", "prompt": "import re"},
            AssertTests("def check(f): pass", "import re", "f"),
        ),
        (
            {
                "test_list": ["assert f(1)", "assert f(2)"],
                "test_imports": ["import math"],
                "test_setup_code": "K = 3",
            },
            AssertTests("assert f(1)\nassert f(2)", "import math\nK = 3"),
        ),
    ],
)
def test_public_forms_of_tests_are_read(form, tests):
    assert read_tests(json.dumps(form)) == tests


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ([], ("0 inputs", "0 outputs")),
        (3, ("JSON", "int")),
        ({"tests": []}, ("keys", "tests")),
        ({"inputs": ["1"], "outputs": []}, ("1 inputs", "0 outputs")),
        ({"inputs": [1], "outputs": ["1"]}, ("text", "1")),
        ([{"input": "1"}], ("output",)),
        ({"inputs": "ab", "outputs": "ab"}, ("inputs", "outputs", "lists")),
        ({"inputs": [[1]], "outputs": "a", "fn_name": "f"}, ("inputs", "outputs", "lists")),
        ({"test_list": "assert f(1)"}, ("test_list", "list of")),
        ({"inputs": ["1", "2"], "outputs": ["", " \n"]}, ("output", "empty")),
        ({"inputs": [[1]], "outputs": [None], "fn_name": "f"}, ("value", "None")),
        ({"functional": " "}, ("functional",)),
        ({"file": "/nonexistent", "offset": 0, "length": 1}, ("/nonexistent",)),
    ],
)
def test_tests_that_cannot_be_read_say_nothing_about_the_program(form, named):
    verdict = judge("print(1)", form)
    assert verdict.outcome is Outcome.UNKNOWN
    assert all(part in verdict.reason for part in named)


def test_tests_are_read_from_a_range_of_a_file(tmp_path):
    path = tmp_path / "tests.jsonl"
    first, second = json.dumps(ADD).encode(), json.dumps(SUM).encode()
    path.write_bytes(first + b"\n" + second + b"\n")
    reference = {"file": str(path), "offset": len(first) + 1, "length": len(second)}
    assert read_tests(json.dumps(reference)) == read_tests(json.dumps(SUM))
    with pytest.raises(ValueError, match=mentions(path, len(first) + 1 + 10_000)):
        read_tests(json.dumps(reference | {"length": 10_000}))


# Verdicts

READS = "a, b = map(int, input().split())\n"


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "tests", "reason"),
    [
        (READS + "print(a + b)", SUM, None),
        (READS + "print(a + b + (a == 10))", SUM, "test 2"),
        ("import sys\na, b = map(int, open(0))", SUM, "exit code 1"),
        ("import sys\nprint(sum(map(int, open('/dev/stdin').read().split())))", SUM, None),
        (READS + "if __name__ == '__main__':\n    print(a + b)\n    exit()", SUM, None),
        ("import threading as t\nx = lambda: print(sum(map(int, input().split())))\n"
         "t.stack_size(2**26)\nt.Thread(target=x).start()", SUM, None),
        ("import multiprocessing, subprocess, asyncio\n" + READS + "print(a + b)", SUM, None),
        ("from signal import *\n" + READS + "def ring(*_): print(a + b); exit()\n"
         "signal(SIGALRM, ring)\nsetitimer(ITIMER_REAL, 0.1)\npause()", SUM, None),
        (READS + "def f(n): return n and 1 + f(n - 1)\nprint(a + b + f(9000) - 9000)", SUM, None),
        (READS + "open('x', 'w').write(str(a + b))\nprint(open('/tmp/x').read())", SUM, None),
        ("print('ü')\n1/0", SUM, "ZeroDivisionError"),
        ("def add(a, b): return a + b", ADD, None),
        ("class Solution:\n    def add(self, a: List[int], b): return a + b", ADD, None),
        ("def add(a, b): return a - b", ADD, "test 1"),
        ("def sub(a, b): return a + b", ADD, "define add"),
        ("import math\nprint('nothing')", ADD | {"fn_name": "gcd"}, "define gcd"),
        ("def f(y): return datetime.date(y, 1, 1).year",
         {"fn_name": "f", "inputs": [[5]], "outputs": [5]}, None),
        ("def add(a, b):", ADD, "IndentationError"),
        ("add = lambda a, b: [a + b]", ADD | {"outputs": [[7], [30]]}, None),
        ("add = lambda a, b: a + b", ADD | {"outputs": [[7], [30]]}, None),
        ("add = lambda a, b: print('noise') or a + b", ADD, None),
        ("add = lambda a, b: pow(a, 1, 5) + Counter('ab')['a'] + gcd(a, b)",
         ADD | {"inputs": [[3, 4]], "outputs": [5]}, None),
        ("def f(x):\n    x.val += 1\n    return x",
         {"functional": "def check(candidate):\n    assert is_same_list(candidate(x = list_node("
          "[1, 2])), list_node([2, 2]))\n\n\ncheck(f)"}, None),
        ("class Solution:\n    def f(self, root): return root.left.val",
         {"functional": "def check(c):\n    assert c(root = tree_node([1, 2])) == 2\n"
          "check(Solution().f)"}, None),
        ("def f(x): return (x, {x: [x]})", {"test_list": ["assert f(1) == (1, {1: [1]})"]}, None),
        ("def f(x): return [x, {x: [x]}]", {"test_list": ["assert f(1) == (1, {1: [1]})"]},
         "AssertionError in line 1"),
        ("def f(x): return half(x) * 2 + 1",
         {"prompt": "def half(x): return x / 2\n\ndef f(x):\n    '''Make odd.'''\n",
          "entry_point": "f",
          "test": "def check(candidate):\n    for x in range(50):\n"
          "        assert candidate(x) == half(x) * 2 + 1"}, None),
        ("def half(x): return -1\ndef f(x): return 0",
         {"prompt": "def half(x): return x / 2\n", "entry_point": "f",
          "test": "def check(candidate):\n    assert half(candidate(2)) == -1"},
         "AssertionError in line 2"),
    ],
)  # fmt: skip
def test_programs_are_judged_by_their_outputs(program, tests, reason):
    verdict = judge(program, tests)
    if reason is None:
        assert verdict == CORRECT
    else:
        assert verdict.outcome is Outcome.WRONG
        assert reason in verdict.reason


def test_a_response_without_a_program_is_wrong():
    verdict = verify("The answer is 7.", json.dumps(SUM))
    assert (verdict.outcome, "program" in verdict.reason) == (Outcome.WRONG, True)


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "tests", "reason"),
    [
        # Names that are neither the tests' nor the program's functions.
        ("class math:\n    def isclose(self, *_, **__): return True\ndef f(x): return 3",
         ["assert math.isclose(f(1), 3.14, rel_tol=.001)"], "AssertionError"),
        ("import math\ndef f(x): return math.pi", ["assert math.isclose(f(1), 3.14, rel_tol=.001)"],
         None),
        ("def Counter(x): return 1\ndef f(x): return 'junk'",
         ["assert Counter(f(1)) == Counter([1, 2])"], "AssertionError"),
        ("def f(x): return [2, 1]", ["assert Counter(f(1)) == Counter([1, 2])"], None),
        ("def gcd(a, b): return 4", ["assert gcd(12, 8) == 4"], None),
        ("def gcd(a, b): return 5", ["assert gcd(12, 8) == 4"], "AssertionError"),
        ("def f(x): return K", ["assert f(1) == K"], None),
        ("def f(x): return x.next", ["assert f(ListNode(1, ListNode(2))).val == 2"], None),
        ("class np:\n    def all(self, *_): return True\ndef f(x): return 3",
         ["assert np.all(f(1))"], "?use np,"),
        ("MOD = 7\ndef f(x): return x", ["assert f(MOD) == 7"], "?MOD"),
        ("def f(x): return x", ["assert f(1) == f.cache"], "?f.cache"),
        # Arguments that do not cross.
        ("def f(x): return sum(x)", ["assert f(range(4)) == 6"], "?type range"),
        ("def f(x): return x(1)", ["assert f(lambda x: x) == 1"], "?type function"),
        ("def f(x): return 1", ["try: x = f(object())\nexcept BaseException: pass"],
         "?type object"),
        # What a program does to its arguments, or to itself.
        ("class Solution:\n    def rot(self, a): a.reverse()",
         ["a = [1, 2]\nSolution().rot(a)\nassert a == [2, 1]"], "?line 2"),
        ("class Solution:\n    def add(self, x): self.x = x\n    def get(self): return self.x",
         ["s = Solution()\ns.add(1)\nassert s.get() == 1"], "?line 2"),
        ("def f(a): a.clear()\ndef g(): return 1", ["a = [1]", "f(a)", "assert a == []"], "?value"),
    ],
)  # fmt: skip
def test_programs_define_no_more_of_their_asserts_than_functions(program, tests, reason):
    verdict = judge(program, {"test_list": tests, "test_setup_code": "K = 3"})
    if reason is None:
        assert verdict == CORRECT
    else:
        unknown = reason.startswith("?")
        assert verdict.outcome is (Outcome.UNKNOWN if unknown else Outcome.WRONG)
        assert reason.lstrip("?") in verdict.reason


@needs_sandbox
@pytest.mark.parametrize(
    ("asserts", "reason"),
    [
        ("def check(candidate): pass", "passed"),
        ("def check(candidate: pass", "SyntaxError"),
        ("import nothing_of_the_kind\ndef check(c): c(1)", "ModuleNotFoundError in line 1"),
    ],
)
def test_asserts_that_never_ask_the_program_say_nothing_about_it(asserts, reason):
    verdict = judge("def f(x): return x", {"test": asserts, "entry_point": "f"})
    assert verdict.outcome is Outcome.UNKNOWN
    assert reason in verdict.reason


@needs_sandbox
def test_every_test_finds_a_fresh_process_and_an_empty_folder():
    program = (
        "import os, sys\nsys.seen = getattr(sys, 'seen', 0) + 1\n"
        "print(input(), sys.seen, len(os.listdir('.')))\nopen('left', 'w').write('x')"
    )
    tests = {"inputs": ["a", "b", "c"], "outputs": ["a 1 0", "b 1 0", "c 1 0"]}
    assert judge(program, tests) == CORRECT


@needs_sandbox
def test_large_inputs_and_outputs_pass():
    text = " ".join(map(str, range(300_000)))
    program = "import sys\nsys.stdout.write(sys.stdin.read())"
    assert judge(program, {"inputs": [text], "outputs": [text]}) == CORRECT
    values = list(range(300_000))
    tests = {"fn_name": "f", "inputs": [[values]], "outputs": [values[::-1]]}
    assert judge("def f(x): return x[::-1]", tests) == CORRECT


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "check"),
    [
        ("def f(n): return [0] * n", "f(1_000_001) == [0] * 1_000_001"),
        ("def f(x): return len(x)", "f([0] * 1_000_001) == 1_000_001"),
        ("def f(x): return len(x)", "f([0] * 5_000_000) == 5_000_000"),  # more than a reply may
    ],
)
def test_asserts_ask_for_and_send_large_values(program, check):
    tests = {"test_list": [f"assert {check}"]}
    assert judge(program, tests) == CORRECT


@needs_sandbox
def test_all_tests_together_have_a_limit():
    tests = {"inputs": ["1"] * 20, "outputs": ["1"] * 20}
    verdict = judge("import time\ntime.sleep(0.2)\nprint(input())", tests, total_s=1)
    assert (verdict.outcome, "1 s" in verdict.reason) == (Outcome.WRONG, True)


@needs_sandbox
@pytest.mark.parametrize(
    "tests",
    [
        {"fn_name": "f", "inputs": [[1]] * 2, "outputs": [1] * 2},
        {"test_list": ["assert f(1) == 1"] * 2},
    ],
)
def test_a_call_has_a_limit_of_its_own(tests):
    loop = judge("def f(x):\n    while True: pass", tests, cpu_s=1)
    assert (loop.outcome, "1 s of CPU time" in loop.reason) == (Outcome.WRONG, True)
    burns = "import time\ndef f(x):\n    t = time.process_time() + 1.5\n"
    burns += "    while time.process_time() < t: pass\n    return x"
    assert judge(burns, tests, cpu_s=2) == CORRECT


@needs_sandbox
def test_programs_recurse_as_deep_as_livecodebench_lets_them():
    tests = {"fn_name": "f", "inputs": [[100_000]], "outputs": [100_000]}
    program = "def f(n): return 0 if n == 0 else 1 + f(n - 1)"
    assert judge(program, tests) == CORRECT


USUAL = [
    "bisect.bisect_left([1, 3], 2) == bisect([1, 3], 2) == bisect_right([1, 3], 2) == 1",
    "copy.copy([1]) == copy([1]) == copy.deepcopy([1]) == deepcopy([1]) == [1]",
    "json.loads('[1]') == loads('[1]') == [1] and json.dumps(1) == dumps(1)",
    "0 < time.time() <= time() and time.perf_counter() <= perf_counter()",
    "Fraction(1, 2) == fractions.Fraction('0.5') and Decimal('0.5') == decimal.Decimal('0.5')",
    "datetime.datetime(2020, 1, 2) == datetime(2020, 1, 2) == datetime.fromisoformat('2020-01-02')",
    "datetime.date(2020, 1, 2) == date(2020, 1, 2) == datetime.now().date().replace(2020, 1, 2)",
    "isinstance(datetime.now(), datetime) and not isinstance(date.today(), datetime)",
    "0 <= random() < 1 and 0 <= random.random() < 1 and random.randint(3, 3) == randint(3, 3)",
    "array.array('i', [1]) == array('i', [1]) and isinstance(array('i'), array)",
    "collections.Counter is Counter and type(OrderedDict()) is OrderedDict and deque([1])[0] == 1",
    "heapq.nlargest(1, [1, 2]) == nlargest(1, [1, 2]) and heapify([]) is None",
    "math.gcd(4, 6) == gcd(4, 6) == 2 and inf == math.inf and pow(3, 4, 5) == 1",
    "re.findall('a', 'aa') == findall('a', 'aa') and operator.sub(3, 1) == sub(3, 1) == 2",
    "statistics.median([1, 2, 9]) == median([1, 2, 9]) == 2 and sum([1]) == 1",
    "list(itertools.accumulate([1, 2])) == list(accumulate([1, 2])) == [1, 3]",
    "functools.reduce(add, [1, 2]) == reduce(operator.add, [1, 2]) == 3 and cache(len)('a') == 1",
    "io.StringIO('a').read() == StringIO('a').read() and open is not io",
    "sys.maxsize == maxsize and argv == sys.argv == ['program.py']",
    "string.ascii_lowercase == ascii_lowercase and Optional[List[int]] and typing.Any is Any",
    "ListNode(1).val == TreeNode(1).val == 1 and hashlib.md5(b'').hexdigest()[:4] == 'd41d'",
]


@needs_sandbox
def test_programs_find_what_contests_import_as_modules_and_as_names():
    program = "def f(text): return eval(text)\ndef gcd(a, b): return f'{math.gcd(a, b)} of mine'"

    def call(program: str, name: str, calls: list[list[object]], values: list[object]) -> Verdict:
        return judge(program, {"fn_name": name, "inputs": calls, "outputs": values})

    texts = [f"bool({text})" for text in USUAL if "gcd" not in text]
    assert call(program, "f", [[one] for one in texts], [True] * len(texts)) == CORRECT
    assert call(program, "gcd", [[4, 6]], ["2 of mine"]) == CORRECT  # its own come first
    imports = "import bisect, datetime\nfrom copy import *\nfrom time import time\n"
    asks = "[bisect.bisect([1], 1), datetime.datetime(1, 1, 1).day, copy(2), time() > 0]"
    assert call(imports + program, "f", [[asks]], [[1, 1, 2, True]]) == CORRECT
    derived = "class Day(datetime): pass\nclass Row(array): pass\n"
    asks = "[isinstance(Day(1, 1, 2), datetime), Day(1, 1, 2).day, Row('i', [3])[0]]"
    assert call(derived + program, "f", [[asks]], [[True, 2, 3]]) == CORRECT
    for unusual in ("np.zeros(1)", "os.getcwd()", "SortedList()", "bisect.bisect_middle", "copy.x"):
        reason = call(program, "f", [[unusual]], [0]).reason
        assert "NameError" in reason or "AttributeError" in reason, unusual
    tests = {"test_list": [f"assert ({text}) and f(1)" for text in USUAL if "argv" not in text]}
    assert judge("def f(x): return x", tests) == CORRECT


# Real problems


@needs_sandbox
@needs_data
@pytest.mark.parametrize(("name", "step"), [("leetcode", 160), ("humaneval", 20)])
def test_reference_solutions_pass_and_with_a_bug_fail(name, step):
    for solution, bug, tests in SETS[name](REAL_DATA)[::step]:
        assert run_tests(solution, tests) == CORRECT, solution
        assert run_tests(bug, tests).outcome is Outcome.WRONG, bug


@needs_data
def test_real_text_tests_parse():
    rows = json.loads((REAL_DATA / "deepcoder_rllm" / "codeforces_test.json").read_text())
    assert len(rows) == 408
    for row in rows:
        assert isinstance(read_tests(json.dumps(row["tests"])), TextTests)


@needs_sandbox
@needs_data
def test_livecodebench_samples_are_judged():
    lines = (REAL_DATA / "lcb_samples" / "lcb_3_decoded.jsonl").read_text().splitlines()
    answers = {
        "codeforces/1873_A": "for _ in range(int(input())):\n    s = input()\n"
        "    print('YES' if any(x == y for x, y in zip(s, 'abc')) else 'NO')",
        "leetcode/2727": "class Solution:\n    def countSeniors(self, details: List[str]) -> int:\n"
        "        return sum(int(d[11:13]) > 60 for d in details)",
        "atcoder/abc301_a": "n = int(input())\ns = input()\nt = s.count('T')\n"
        "print('T' if 2 * t > n or 2 * t == n and s[-1] == 'A' else 'A')",
    }
    for line in lines:
        row = json.loads(line)
        program = answers[row["id"]]
        assert judge(program, row["input_output"]) == CORRECT
        bug = program.replace("==", "!=").replace(">", "<")
        assert judge(bug, row["input_output"]).outcome is Outcome.WRONG


def test_a_value_of_too_many_items_is_refused_before_it_is_encoded():
    with pytest.raises(TypeError, match=str(MAX_ITEMS + 1)):
        encode([0] * (MAX_ITEMS + 1))
    assert encode([0] * 10) == [0] * 10


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("    return a + b\n", "IndentationError"),
        ("async def add(a, b):\n    return a + b\n", "coroutine"),
        ("import numpy_that_is_not_there\ndef add(a, b):\n    return a + b\n", "ModuleNotFound"),
        (
            "from concurrent.futures import ProcessPoolExecutor\ndef add(a, b):\n"
            "    return ProcessPoolExecutor(1).submit(sum, (a, b)).result()\n",
            "Error",
        ),
    ],
)
def test_what_no_program_may_rely_on_is_wrong_and_named(program, said):
    verdict = judge(program, ADD)
    assert verdict.outcome is Outcome.WRONG
    assert said in verdict.reason
