"""Broken and hostile verifiers in real workers: none scores, none changes another's verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from gapo_megatron import rewards
from gapo_megatron.config import RewardConfig
from gapo_megatron.types import Outcome
from tests.hostile.behaviours import NUMBERS, OBJECTS, PATCHES, RAISED, STATE, verifier_file

NUM_WORKERS = 4
LIMIT_S = 4

DEATHS = {
    "leaves": "sys.exit(0)",
    "leaves at once": "os._exit(0)",
    "leaves at once with a code": "os._exit(77)",
    "aborts": "os.abort()",
    "reads nowhere": "ctypes.string_at(0)",
    "calls nowhere": "ctypes.CFUNCTYPE(None)(0)()",
    "overflows the stack": ("sys.setrecursionlimit(10**9)\nrepr(deep(10**6))\nos.abort()"),
    "becomes another program": "os.execv('/bin/true', ['true'])",
    "becomes one that sleeps": "os.execv('/bin/sleep', ['sleep', '3600'])",
    "kills its group": "os.killpg(0, signal.SIGKILL)",
    **{
        f"sends itself {name}": f"os.kill(os.getpid(), {name}); return False"
        for name in (
            *("signal.SIGHUP", "signal.SIGINT", "signal.SIGQUIT", "signal.SIGKILL"),
            *("signal.SIGSEGV", "signal.SIGPIPE", "signal.SIGTERM", "signal.SIGCHLD"),
            *("signal.SIGSTOP", "signal.SIGXCPU", "signal.SIGUSR1", "signal.SIGSYS"),
            *("signal.SIGRTMIN", "signal.SIGRTMIN + 1", "signal.SIGRTMAX"),
        )
    },
}

HANGS = {
    "sleeps": "time.sleep(3600)",
    "waits for nobody": "threading.Event().wait()",
    "waits for a signal": "signal.pause()",
    "reads an empty pipe": "os.read(os.pipe()[0], 1)",
    "waits for its own lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "waits for a guest": "socket.create_server(('127.0.0.1', 0)).accept()",
    "waits for a child": "subprocess.run(['sleep', '3600'])",
    "selects nothing": "select.select([], [], [])",
    "computes for ever": "while True: pass",
    "computes in C": "(10**8)**(10**8)",
    "searches for ever": "re.match('(a*)*b', 'a' * 99)",
    "runs a loop that never ends": "asyncio.run(asyncio.Event().wait())",
}

FORKS = {
    "forks": "os.fork(); return False",
    "forks and both answer": "os.fork(); return len(given) > 9",
    "forks and the child raises": "if not os.fork(): raise ValueError\nreturn False",
    "forks and the child sleeps": "if not os.fork(): time.sleep(3600)\nreturn False",
    "forks many": "for _ in range(6):\n    if not os.fork(): time.sleep(3600)\nreturn False",
    "forks twice": "if not os.fork():\n    os.fork()\n    os._exit(0)\nreturn False",
    "leaves a program": "subprocess.Popen(['sleep', '3600']); return False",
    "leaves a session": "subprocess.Popen(['sleep', '60'], start_new_session=True); return False",
    "ends later": "threading.Timer(0.2, os._exit, [0]).start(); return False",
    "ends later by an alarm": "signal.setitimer(signal.ITIMER_REAL, 0.2); return False",
    "has threads that print": (
        "threading.Thread(target=lambda: [print('x' * 999) for _ in range(999)]).start()\n"
        "return False"
    ),
}

_EVERYWHERE = "for i in range(64):\n    try: os.write(i, {data})\n    except OSError: pass\n"
DESCRIPTORS = {
    "closes all": "os.closerange(0, 256); return True",
    "closes the standard ones": "os.closerange(0, 3); return False",
    "closes its streams": "sys.stdin.close(); sys.stdout.close(); sys.stderr.close(); return False",
    "redirects all": (
        "nowhere = os.open(os.devnull, os.O_RDWR)\n"
        "for i in range(64):\n    try: os.fstat(i); os.dup2(nowhere, i)\n    except OSError: pass\n"
    ),
    "makes all impatient": (
        "for i in range(64):\n    try: os.set_blocking(i, False)\n    except OSError: pass\n"
        "return False"
    ),
    **{
        f"writes {name} everywhere": _EVERYWHERE.format(data=data) + "return False"
        for name, data in {
            "garbage": r"b'\xff\x00\n'",
            "an open line": "b'[0, '",
            "much": "b'x' * 2**20",
            "ready": r"b'ready\n'",
            "a verdict of another": r"""b'[0, "correct", "", null]\n'""",
            "a large number": r"b'[' + b'9' * 9999 + rb', 5, 5, 5]' + b'\n'",
            "depth": r"b'[' * 9999 + b'\n'",
            "an infinite grade": r"""b'[0, "correct", "", 1e999]\n'""",
        }.items()
    },
    "prints a flood": "print('x' * 10**7); return False",
    "complains": "sys.stderr.write('x' * 10**7); return False",
}

MEMORY = {
    "long text": "return len('x' * 2**40)",
    "long list": "return len([0] * 10**12)",
    "array": "return np.zeros(10**13).sum()",
    "mapping": "return len(mmap.mmap(-1, 2**45))",
    "recursion": "def again(): return again()\nreturn again()",
}

OWN_LIMITS = {
    name: f"resource.setrlimit(resource.{name}, (0, 0)); return False"
    for name in ("RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_CPU", "RLIMIT_STACK", "RLIMIT_CORE")
}

GIVEN = {
    "changes its row": "row['levels'].clear(); row.clear(); return False",
    "changes its file": "globals().clear()",
    "blocks signals": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); return False"
    ),
    "ignores signals": (
        "for one in signal.valid_signals():\n"
        "    try: signal.signal(one, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "return False"
    ),
}

CASES = {
    **{f"returns {one}": f"return {one}" for one in (*OBJECTS, *NUMBERS)},
    **{f"raises {one}": f"raise {one}" for one in RAISED},
    **{f"replaces {name}": f"{body}\nreturn False" for name, body in PATCHES.items()},
    **{f"changes {name}": f"{body}\nreturn False" for name, body in STATE.items()},
    **{f"limits {name}": body for name, body in OWN_LIMITS.items()},
    **{f"fills memory by {name}": body for name, body in MEMORY.items()},
    **DEATHS, **HANGS, **FORKS, **DESCRIPTORS, **GIVEN,
}  # fmt: skip

NEIGHBOURS = [
    ("fine", "1", "own"),
    ("1>1", "1", ""),
    ("fine", "2", "own"),
    ("1>1", "2", ""),
]


@pytest.mark.system
def test_no_verifier_scores_by_misbehaving_or_changes_anothers_verdict(tmp_path: Path) -> None:
    """All in one batch of four workers, each behaviour between two that behave."""
    path = tmp_path / "mine.py"
    path.write_text(verifier_file(CASES))
    config = RewardConfig(
        kind="exact",
        timeout_s=LIMIT_S,
        verifiers={"own": {"kind": f"{path}:verify", "timeout_s": LIMIT_S}},
    )
    bad = [(name, "1", "own") for name in CASES]
    healthy = [NEIGHBOURS[i % len(NEIGHBOURS)] for i in range(len(bad))]
    mixed = [one for pair in zip(bad, healthy, strict=True) for one in pair]
    with rewards.start_pool(config, num_workers=NUM_WORKERS) as pool:
        pool.wait_until_ready()
        expected, verdicts = (
            pool.judge([(*one, {"levels": [1]}) for one in items]) for items in (NEIGHBOURS, mixed)
        )
    assert [one.outcome for one in expected].count(Outcome.CORRECT) == 2
    assert len(bad) > 200
    scored = [
        name
        for (name, *_), one in zip(bad, verdicts[::2], strict=True)
        if one.outcome is Outcome.CORRECT
    ]
    assert not scored
    changed = [
        (bad[i][0], one)
        for i, one in enumerate(verdicts[1::2])
        if one != expected[i % len(NEIGHBOURS)]
    ]
    assert not changed
