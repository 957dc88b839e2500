"""Broken and hostile environments in real threads: they harm neither their neighbours nor the run.

An environment runs in the trainer's own process. What no process can defend against is in
`NOT_DEFENDED`, with the reason; docs/environments.md says so to users.
"""

from __future__ import annotations

import locale
import os
import random
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gapo_megatron import rewards
from gapo_megatron.clock import Stopwatch
from gapo_megatron.config import RewardConfig
from gapo_megatron.data.source import PromptSource
from gapo_megatron.io.run_folder import JOURNAL_FOLDER
from gapo_megatron.rollout.calls import in_thread
from gapo_megatron.rollout.engine import Request
from gapo_megatron.rollout.requests import SamplingSettings
from gapo_megatron.rollout.rollouter import Rollouter
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.types import Episode, Prompt
from tests.acting import EOS, acting_of
from tests.hostile.behaviours import NUMBERS, OBJECTS, RAISED, STATE, function
from tests.rollout.test_sample import ATTEMPT, config_of
from tests.scripted_engine import ScriptedEngine
from tests.two_turn import TwoTurn

GIVEN = (7, 8)
"""What the healthy environment says after the first turn."""
GROUP_SIZE = 4
LIMIT_S = 10
_LATE = ("the recursion limit", "the umask", "the switch interval", "the end")
"""Changes that matter while the engine decodes, or are the verifiers' alone."""

TOKENS = {
    "a float": "[1.0]",
    "a bool": "[True]",
    "a text": "['1']",
    "None": "[None]",
    "a nested list": "[[1]]",
    "a negative token": "[-1]",
    "a large token": "[10**5]",
    "a huge token": "[10**400]",
    "a token of 64 bits": "np.array([2**63], np.uint64)",
    "floats": "np.array([1.0])",
    "bools": "np.array([True])",
    "texts": "np.array(['1'])",
    "objects": "np.array([None])",
    "no dimension": "np.array(5)",
    "two dimensions": "np.zeros((2, 2), np.int64)",
    "too many": "[5] * 10**6",
    "a huge array": "np.zeros(10**8, np.int8)",
    "dates": "np.array(['2020-01-01'], 'M8[D]')",
    "a list that is its own": "own_list()",
    "NaN": "[float('nan')]",
    "numpy's bool": "[np.True_]",
    "a list without end": "type('Many', (list,), {'__iter__': lambda _: iter(lambda: 5.0, 1)})()",
    "an index that leaves": "[type('One', (int,), {'__index__': lambda _: sys.exit(0)})(10**6)]",
    "a length that leaves": (
        "type('Many', (list,), {'__len__': lambda _: sys.exit(0), '__iter__': lambda _: 1 / 0})()"
    ),
    "an iterator that raises": "type('Many', (list,), {'__iter__': lambda _: 1 / 0})()",
    "a claim to be a token": "[Claims(int)]",
    "a claim to be a list": "Claims(list)",
}

OTHERS = {
    "sleeps": "time.sleep(3600)",
    "waits for nobody": "threading.Event().wait()",
    "waits for its own lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "waits for a guest": "socket.create_server(('127.0.0.1', 0)).accept()",
    "waits for a child": "subprocess.run(['sleep', '60'])",
    "reads an empty pipe": "os.read(os.pipe()[0], 1)",
    "recurses": "def again(): return again()\nagain()",
    "fills memory": "return 'x' * 2**60",
    "handles a signal": "signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
    "writes to the tokens": "given[0].token_ids[:] = 5",
    "writes to the log-probs": "given[0].log_probs[:] = 5",
    "writes to the base": "given[0].token_ids.base[:] = 5",
    "changes the episode": "given[0].sample = 5",
    "runs in a thread that ends": "raise SystemExit",
    "forks and the child raises": "if not os.fork(): raise ValueError\nraise KeyError",
}
"""Must fail: the verdict is unknown."""

HARMLESS = {
    **{name: body for name, body in STATE.items() if name not in _LATE},
    "the default dtype": "import torch; torch.set_default_dtype(torch.float64)",
    "the gradient mode": "import torch; torch.set_grad_enabled(False)",
    "torch's seed": "import torch; torch.manual_seed(5)",
    "torch's threads": "import torch; torch.set_num_threads(3)",
    "its row": "given[0].prompt.row['levels'].append(5); given[0].prompt.row['more'] = 5",
    "its copy of the tokens": (
        "given[0].token_ids.setflags(write=True)\ngiven[0].token_ids[:] = 5"
    ),
    "the episode": "object.__setattr__(given[0], 'sample', 77)",
    "its fork": "if not os.fork(): pass",
    "forks": "child = os.fork()\nif not child: os._exit(0)\nos.waitpid(child, 0)",
    "the standard output": "print('x' * 10**5, file=open(os.devnull, 'w'))",
}
"""Changes that must not reach others; the episode then ends as a healthy one does."""

NOT_DEFENDED = {
    "os._exit, os.abort, a signal to itself, a crash of C code": "it is the trainer's process",
    "C code that holds Python's lock": "no other thread runs, the trainer's included",
    "closing descriptors of others": "they are the trainer's connections",
    "replacing functions of Python, torch or this package": "they are the trainer's own functions",
    "memory beyond the machine's": "the kernel ends the process",
    "a hang in begin or judge": "they run in the trainer's main thread",
    "KeyboardInterrupt in begin or judge": "there it is Ctrl-C",
    "removing the run folder": "the run cannot continue without it",
    "a directory, a dtype or filters of warnings while the engine decodes": (
        "restored once the generation has ended"
    ),
}


_TOKENS = {"[]", "np.array([])", "np.array([1, 1])"}
_TEXTS = {"'correct'", "''", "'1'", "Outcome.CORRECT", "Text('correct')", "np.str_('1')"}
_FINE = _TOKENS | _TEXTS
"""Objects that are tokens, and such that are texts; `respond` may return both."""

TEXTS = {
    **{f"the pair with {one}": f"return {one}, '1'" for one in OBJECTS if one not in _TEXTS},
    "one text": "return ('1',)",
    "three texts": "return '1', '1', '1'",
    "other texts the second time": (
        "class Pair(tuple):\n"
        "    def __iter__(self): yield from [self.pop(), 5]\n"
        "    def pop(self, seen=[]): seen.append(1); return '1' if len(seen) == 1 else 5\n"
        "return Pair('11')"
    ),
    "a pair without end": "return type('Pair', (tuple,), {'__iter__': lambda _: [][0]})('11')",
}
"""What `judge` may return instead of two texts."""

OVERFULL = ("returns too many", "returns a huge array")
"""No failures: the response is truncated, as with any tokens for which it has no room."""

RESPOND = {
    **{f"returns {one}": f"return {one}" for one in (*OBJECTS, *NUMBERS) if one not in _FINE},
    **{f"returns {name}": f"return {one}" for name, one in TOKENS.items()},
    **{f"raises {one}": f"raise {one}" for one in RAISED},
    **OTHERS,
}
JUDGE = {
    **{f"returns {one}": f"return {one}" for one in (*OBJECTS, *NUMBERS, "None")},
    **{f"raises {one}": f"raise {one}" for one in RAISED if one != "KeyboardInterrupt"},
    **TEXTS,
}


class Behaves(TwoTurn):
    """Behaves by the problem's id in its second sample, in one method; well elsewhere."""

    def __init__(self, cases: Mapping[str, Callable[..., Any]], *, place: str) -> None:
        super().__init__(GIVEN)
        self._cases, self._place = cases, place

    def respond(self, episode: Episode) -> Any:
        good = super().respond(episode)
        is_second = episode.response_mask is not None
        return self._behave(episode, good) if self._place == "respond" and is_second else good

    def judge(self, episode: Episode) -> Any:
        good = super().judge(episode)
        return self._behave(episode, good) if self._place == "judge" else good

    def close(self, episode: Episode) -> None:
        if self._place == "close":
            self._behave(episode, None)

    def _behave(self, episode: Episode, good: Any) -> Any:
        if episode.sample != 1:
            return good
        name = episode.prompt.id
        found = self._cases[name](episode)
        return good if name in HARMLESS else found


def says(request: Request) -> list[int]:
    """The first turn is 5; the second is right for every second sample."""
    if not len(request.response_ids):
        return [5, EOS]
    return [84 if request.name.endswith(("/0", "/1")) else 85, EOS]


def collected(
    cases: Mapping[str, Callable[..., Any]], *, place: str, run_dir: Path
) -> tuple[Rollouts, dict[str, float]]:
    """A batch of a problem for each case, and its metrics."""
    run_dir.mkdir()
    problems = [
        Prompt(name, (10,), answer=f"84 {EOS}", row={"levels": [1]}, verifier="own")
        for name in cases
    ]
    path = run_dir / "verifier.py"
    path.write_text(
        "def verify(response, answer, **row):\n"
        "    return response == answer and row == {'levels': [1]}\n"
    )
    config = config_of(len(problems))
    reward = RewardConfig(kind="exact", verifiers={"own": f"{path}:verify"})
    acting = acting_of(
        Behaves(cases, place=place), run=in_thread, run_dir=run_dir, call_timeout_s=LIMIT_S,
        max_response_tokens=100,
    )  # fmt: skip
    with rewards.start_pool(reward, num_workers=1) as pool:
        rollouter = Rollouter(
            ScriptedEngine(says),
            PromptSource(problems, seed=0),
            pool,
            acting,
            batch=config.batch,
            sampling=SamplingSettings(num_samples=GROUP_SIZE, max_response_tokens=100, seed=7),
            reward=reward,
        )
        found = rollouter.collect(0, attempt=ATTEMPT, stopwatch=Stopwatch())
    assert found is not None
    return found, found.metrics


def fails(_: Episode) -> Any:
    raise ValueError


def overfills(_: Episode) -> list[int]:
    """More than a response has room for: it is truncated."""
    return [5] * 1000


def ends(_: Episode) -> None:
    """As a healthy environment after its second turn."""


def state_of_the_process() -> list[Any]:
    return [
        *(os.getcwd(), dict(os.environ), sys.getrecursionlimit(), sys.stdout, sys.stderr),
        *(random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        *(torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()),
        *(warnings.filters[:], locale.setlocale(locale.LC_ALL), sys.getswitchinterval()),
    ]


_HANGS = {"sleeps", "waits for nobody", "waits for its own lock", "waits for a guest"} | {
    *("waits for a child", "reads an empty pipe"),
}
CLOSE = {name: OTHERS[name] for name in OTHERS if name not in {*_HANGS, "handles a signal"}} | {
    **{f"raises {one}": f"raise {one}" for one in RAISED if one != "KeyboardInterrupt"},
    **{f"returns {one}": f"return {one}" for one in OBJECTS},
}
"""Whatever it does: the episode has ended."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", ["respond", "judge"])
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.system)])
def test_no_environment_harms_its_neighbours(tmp_path: Path, place: str, every: int) -> None:
    """The batch, its tokens and its metrics are those of calls that plainly fail or end."""
    bad = RESPOND if place == "respond" else JUDGE
    bad = {name: bad[name] for name in [*bad][::every] if every == 1 or name not in _HANGS}
    cases = {name: function(body) for name, body in {**bad, **HARMLESS}.items()}
    before = state_of_the_process()
    found, metrics = collected(cases, place=place, run_dir=tmp_path / "found")
    assert state_of_the_process() == before
    plain = {name: ends if name in HARMLESS else fails for name in cases}
    overfull = {name: overfills for name in OVERFULL if name in cases}
    if place == "respond":
        plain |= overfull
    expected, expected_metrics = collected(plain, place=place, run_dir=tmp_path / "expected")
    names = [*cases]
    differs = [
        (names[ours["problem"]], ours["sample"])
        for ours, theirs in zip(found.table, expected.table, strict=True)
        if ours != theirs
    ]
    assert not differs
    assert metrics == expected_metrics
    for name, arrays in expected.tokens.items():
        for row, array in arrays.items():
            assert found.tokens[name][row].tolist() == array.tolist()
    unknown = found.table["outcome"] == 2
    assert unknown.sum() == len(bad) - (len(overfull) if place == "respond" else 0)
    if place == "respond":  # each call has begun once, and ended at most once
        lines = (tmp_path / "found" / JOURNAL_FOLDER / "step_0_0.jsonl").read_text().splitlines()
        assert len(lines) == len({*lines})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.system)])
def test_no_close_changes_an_episode(tmp_path: Path, every: int) -> None:
    bad = {name: CLOSE[name] for name in [*CLOSE][::every]} | {
        name: CLOSE[name] for name in ("writes to the tokens", "raises SystemExit(0)")
    }
    cases = {name: function(body) for name, body in {**bad, **HARMLESS}.items()}
    before = state_of_the_process()
    found, metrics = collected(cases, place="close", run_dir=tmp_path / "found")
    assert state_of_the_process() == before
    plain = dict.fromkeys(cases, ends)
    expected, expected_metrics = collected(plain, place="close", run_dir=tmp_path / "expected")
    assert found.table.tolist() == expected.table.tolist() and metrics == expected_metrics
    for name, arrays in expected.tokens.items():
        for row, array in arrays.items():
            assert found.tokens[name][row].tolist() == array.tolist()
