"""Verifiers of the user's own: what they may return, what they get, and what they cannot break."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gapo_megatron import rewards
from gapo_megatron.config import RewardConfig
from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.types import Outcome, Verdict
from tests.messages import mentions

ROOT = Path(__file__).parents[2]
SOURCE = """
import numpy as np
from gapo_megatron.types import Outcome, Verdict

RIGHT = {
    "true": True, "above": 0.51, "numpy": np.float32(0.75), "numpy true": np.True_,
    "graded": Verdict(Outcome.CORRECT, "", grade=2.5),
    "numpy grade": Verdict(Outcome.CORRECT, "", np.float32(0.25)),
}
WRONG = {
    "false": False, "half": 0.5, "below": -3, "most": -1e6,
    "reason": Verdict(Outcome.WRONG, "because"),
}
UNKNOWN = {
    "none": None, "nan": float("nan"), "inf": np.inf, "text": "correct", "list": [True],
    "outcome": Verdict("correct"), "big": 10**400, "more": 1.1e6,
    "grade": Verdict(Outcome.CORRECT, grade="high"), "digit": Verdict(Outcome.CORRECT, grade="1"),
    "no grade": Verdict(Outcome.CORRECT, "", np.nan),
    "more grade": Verdict(Outcome.CORRECT, "", -1.5e308),
}
RESULTS = {**RIGHT, **WRONG, **UNKNOWN}

def table(response, answer):
    return RESULTS[response]

def level_is(response, answer, level=None, *, wanted="hard"):
    return level == wanted and response == answer

def whole_row(response, answer, **row):
    return sorted(row) == ["level", "tests"] and row["tests"] == [1, {"a": "é"}]

def check_answer(answer):
    int(answer)

class Longest:
    def __init__(self, most):
        self.most = most

    def verify(self, response, answer):
        return len(response) <= self.most

class Within:
    def __init__(self, most):
        self.less = most

    def verify(self, response, answer, most):
        return self.less <= len(response) <= most
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def judged(config: RewardConfig, items: Sequence[tuple[Any, ...]]) -> list[Verdict]:
    with rewards.start_pool(config, num_workers=1) as pool:
        return pool.judge(items)


def test_what_a_verifier_may_return(source: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(SOURCE, namespace)
    names = [*namespace["RESULTS"]]
    verdicts = judged(RewardConfig(kind="mine.py:table"), [(name, "1") for name in names])
    found = dict(zip(names, verdicts, strict=True))
    for kind, outcome in (("RIGHT", "correct"), ("WRONG", "wrong"), ("UNKNOWN", "unknown")):
        assert {found[name].outcome for name in namespace[kind]} == {outcome}
    reasons = [found[name].reason for name in namespace["UNKNOWN"]]
    assert all(one and "crashed" not in one for one in reasons)
    assert found["reason"].reason == "because"
    grades = {name: one.grade for name, one in found.items() if one.grade is not None}
    assert grades == {
        **{"half": 0.5, "above": 0.51, "below": -3, "numpy": 0.75, "graded": 2.5},
        **{"numpy grade": 0.25, "most": -1e6},
    }
    low = RewardConfig(kind="mine.py:table", correct_above=-5)
    assert judged(low, [("below", "1")])[0].outcome is Outcome.CORRECT


def test_rows_choose_verifiers_and_give_their_columns(source: Path) -> None:
    config = RewardConfig(
        kind="exact",
        verifiers={
            "level": {"kind": "mine.py:level_is", "settings": {"wanted": "easy"}},
            "row": "mine.py:whole_row",
            "short": {"kind": "mine.py:Longest", "settings": {"most": 3}},
            "within": {"kind": "mine.py:Within", "settings": {"most": 2}},
        },
    )
    row = {"level": "easy", "tests": [1, {"a": "é"}]}
    items: list[tuple[Any, ...]] = [
        ("1>2", "2"),
        ("2", "2", "level", row),
        ("2", "2", "level", {"level": "hard"}),
        # A column never replaces a setting.
        ("2", "2", "level", {"level": "hard", "wanted": "hard"}),
        ("", "", "row", row),
        ("123", "", "short", row),
        ("1234", "", "short"),
        # An object has its settings already: a column of the same name is the column.
        ("1234", "", "within", {"most": 4}),
    ]
    with rewards.start_pool(config, num_workers=1) as pool:
        numbers = pool.submit(items)
        sent = [item.row for _, item in pool._waiting]  # what a verifier takes, and no more
        assert sent == [{}, {"level": "easy"}, *[{"level": "hard"}] * 2, row, {}, {}, {"most": 4}]
        verdicts = pool.collect(numbers)
    assert [one.outcome is Outcome.CORRECT for one in verdicts] == [
        *(True, True, False, False, True, True, False, True)
    ]


def test_only_ones_own_verifiers_have_much_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """6 GiB, which are reserved and never touched, are between the two limits."""
    path = tmp_path / "much_memory.py"
    reserve = "return len(mmap.mmap(-1, 6 * 2**30)) > 0"
    path.write_text(f"import mmap\ndef verify(response, answer): {reserve}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    others = {"own": (f"{path}:verify", 60, {})}
    with rewards.Pool("much_memory", num_workers=1, timeout_s=60, others=others) as pool:
        verdicts = pool.judge([("", "", name) for name in ("own", "", "own", "")])
    assert [one.outcome for one in verdicts] == [Outcome.CORRECT, Outcome.UNKNOWN] * 2
    assert "Cannot allocate memory" in verdicts[1].reason


def test_a_module_beside_it_may_have_any_name(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of a folder of ours, which is first on the path of a job's processes."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    (source.parent / "tools.py").write_text("def same(a, b): return a == b\n")
    source.write_text("from tools import same as verify\n")
    config = RewardConfig(kind="mine.py:verify")
    assert [one.outcome for one in judged(config, [("1", "1"), ("1", "2")])] == [
        *(Outcome.CORRECT, Outcome.WRONG)
    ]


def test_its_answers_are_checked_before_the_run(source: Path) -> None:
    rewards.check_answer("mine.py:table", "12")
    with pytest.raises(DataError, match=r"mine\.py:table.*invalid literal"):
        rewards.check_answer("mine.py:table", "twelve")
    rewards.check_answer("mine.py:Longest", "twelve", settings={"most": 3})


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("mine.py:absent", {}, "absent"),
        ("gone.py:verify", {}, "gone.py"),
        ("mine.py:RESULTS", {}, "dict"),
        ("mine.py:Longest", {}, "most"),
        ("mine.py:Longest", {"least": 1}, "least"),
        ("mine.py:check_answer", {}, "response, answer"),
        ("pathlib:Path", {}, "verify"),
    ],
)
def test_code_that_cannot_judge_is_refused_early(
    source: Path, kind: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=r"reward\.kind") as caught:
        rewards.check(RewardConfig(kind=kind, settings=settings))
    assert said in str(caught.value)


HOSTILE = {
    "raises": "raise KeyError(answer)",
    "leaves": "sys.exit(0)",
    "leaves at once": "os._exit(0)",
    "kills itself": "os.kill(os.getpid(), signal.SIGKILL)",
    "crashes": "ctypes.string_at(0)",
    "hangs": "time.sleep(3600)",
    "computes for ever": "while True: pass",
    "recurses": "return verify(response, answer)",
    "fills memory": "return len('x' * 2**40)",
    "floods": "print('x' * 10**7); return Verdict(Outcome.WRONG, 'x' * 10**7)",
    "closes its channel": "os.closerange(0, 64); return True",
}

HOSTILE_SOURCE = """
import ctypes, os, signal, sys, time
from gapo_megatron.types import Outcome, Verdict

def verify(response, answer):
    if response == "fine":
        return answer == "1"
    {body}
"""


def test_no_verifier_scores_by_misbehaving_or_changes_anothers_verdict(tmp_path: Path) -> None:
    others: dict[str, Any] = {}
    for number, (name, body) in enumerate(HOSTILE.items()):
        path = tmp_path / f"v{number}.py"
        path.write_text(HOSTILE_SOURCE.format(body=body))
        others[name] = {"kind": f"{path}:verify", "timeout_s": 3}
    tried = [("fine", "1"), ("bad", "1"), ("fine", "1"), ("fine", "2")]
    items = [(*item, name) for name in HOSTILE for item in tried]
    verdicts = judged(RewardConfig(kind="exact", verifiers=others), items)
    for place, name in enumerate(HOSTILE):
        right, bad, again, wrong = (one.outcome for one in verdicts[4 * place :][:4])
        assert (right, again, wrong) == ("correct", "correct", "wrong"), name
        assert bad != "correct", name


def test_what_an_earlier_item_has_left_behind_ends_no_other(tmp_path: Path) -> None:
    """Each item makes the worker end at the next, which a new worker then judges."""
    path = tmp_path / "mine.py"
    path.write_text(
        "import os\nseen = []\n"
        "def verify(response, answer):\n"
        "    if seen or response == 'crash': os._exit(7)\n"
        "    seen.append(response)\n"
        "    return response == answer\n"
    )
    items = [("1", "1"), ("2", "1"), ("crash", "1"), ("1", "1"), ("crash", "1")]
    verdicts = judged(RewardConfig(kind=f"{path}:verify"), items)
    assert [one.outcome for one in verdicts] == [
        *(Outcome.CORRECT, Outcome.WRONG, Outcome.UNKNOWN, Outcome.CORRECT, Outcome.UNKNOWN)
    ]
    assert "exit code 7" in verdicts[2].reason


def test_later_workers_start_where_the_first_did(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths are relative to the working directory, which an environment may have changed."""
    source.write_text(f"import os\n{SOURCE}\ndef ends(response, answer): os._exit(7)\n")
    config = RewardConfig(kind="mine.py:table", verifiers={"ends": "mine.py:ends"})
    with rewards.start_pool(config, num_workers=1) as pool:
        pool.wait_until_ready()
        monkeypatch.chdir("/")
        monkeypatch.setenv("PYTHONPATH", "/nowhere")
        verdicts = pool.judge([("true", "1", "ends"), ("true", "1")])
    assert [one.outcome for one in verdicts] == [Outcome.UNKNOWN, Outcome.CORRECT]


NO_VERDICTS = {
    "async def f(): return True\ndef verify(response, answer): return f()": "coroutine",
    "async def verify(response, answer): yield True": "async_generator",
    "def verify(response, answer): yield True": "generator",
    "def verify(response, answer): return 'yes'": "str",
    "def verify(response, answer): return float('nan')": "nan",
    "class verify:\n  def verify(self, response, answer): yield True": "generator",
    "def verify(response, answer): return {'acc': 1}": "score",
    "def verify(response, answer): return {'score': {'score': 'high'}}": "str",
    "def verify(responses, answer): return True": "list",
    "def verify(responses, answer): return [True, True]": "list of 2",
    "def verify(completions, **kwargs): return []": "list of 0",
}


@pytest.mark.parametrize(("body", "returned"), NO_VERDICTS.items())
def test_what_returns_no_verdict_is_found_by_a_call(source: Path, body: str, returned: str) -> None:
    source.write_text(body)
    name = "other" if returned == "nan" else ""
    others = {"other": "mine.py:verify"} if name else {}
    config = RewardConfig(kind="exact" if name else "mine.py:verify", verifiers=others)
    setting = "reward.verifiers.other" if name else "reward.kind"
    with pytest.raises(ConfigError, match=mentions(setting, "mine.py:verify", returned)):
        rewards.try_verifiers(config, [("1", "1", name, {})])


def test_a_trial_gives_verdicts_with_the_reasons(source: Path) -> None:
    """Exceptions name the verifier's own line, also where a library raises."""
    source.write_text(
        "import json\ndef verify(response, answer):\n    return json.loads(response)\n"
        "def refuse(response, answer):\n    raise OSError('the file cannot be read: gone')\n"
    )
    config = RewardConfig(kind="mine.py:verify")
    verdicts = rewards.try_verifiers(config, [("true", "1"), ("0", "1"), ("\x1b[2J", "1")])
    assert [one.outcome for one in verdicts] == ["correct", "wrong", "unknown"]
    assert verdicts[2].reason.startswith(f"mine.py:verify: {source}:3: JSONDecodeError: ")
    [raised] = rewards.try_verifiers(RewardConfig(kind="mine.py:refuse"), [("1", "1")])
    assert raised.outcome == "unknown" and "OSError" in raised.reason


def test_what_a_verifier_prints_and_one_traceback_go_to_a_file(source: Path) -> None:
    source.write_text(
        "import os, sys\n"
        "def verify(response, answer):\n"
        "    print('on stdout', response)\n"
        "    print('on stderr', response, file=sys.stderr)\n"
        "    if response == 'exit': os._exit(3)\n"
        "    raise KeyError(f'{response}\\n\\x1b[2J')\n"
    )
    output, config = source.parent / "out.log", RewardConfig(kind="mine.py:verify")
    with rewards.start_pool(config, num_workers=1, output=output) as pool:
        verdicts = pool.judge([("one", ""), ("two", ""), ("exit", "")])
    text = output.read_text()
    for response in ("one", "two", "exit"):
        assert f"on stdout {response}" in text and f"on stderr {response}" in text
    assert text.count("Traceback") == 1
    assert verdicts[0].reason.isprintable() and verdicts[0].reason.endswith(r"\x1b[2J'")


def test_a_verifier_without_a_limit_has_that_of_the_section() -> None:
    own = {"a": {"kind": "math"}, "b": {"kind": "math", "timeout_s": 2}, "c": {"kind": "code"}}
    for given, wanted in ((7, [7, 7, 2, 7]), (None, [10, 10, 2, 60])):
        config = RewardConfig(kind="exact", timeout_s=given, verifiers=own)
        found = [rewards.timeout_s(one, config) for one in config.by_name.values()]
        assert found == wanted
