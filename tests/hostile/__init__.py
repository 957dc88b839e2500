"""Programs that attack the sandbox or the judge.

Each prints (text.txt) or returns (calls.txt) the right sum only where its attack succeeds. So
`wrong` means that it was stopped, `correct` that it got through, and `unknown` that it broke the
judge, which would spare it the penalty. A program stands under its name and the pattern of the
reason for which it must fail, not by accident. `@FILE` and the like become what `test_code_hostile`
puts on the machine for it to find.
"""

from __future__ import annotations

import re
from pathlib import Path

READS_TEXT = """
import ctypes, os, resource, signal, sys, threading, time
a, b = map(int, input().split())
libc = ctypes.CDLL(None, use_errno=True)
def call(x86, arm, *args):
    if libc.syscall(x86 if os.uname().machine == 'x86_64' else arm, *args) < 0: sys.exit(7)
def burn(seconds, clock=time.process_time):
    start = clock()
    while clock() < start + seconds: pass
"""
"""Stands before every program of text.txt."""


def read_programs(name: str) -> list[tuple[str, str, str]]:
    """(name, reason, source) of every program of a file of this folder."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    parts = re.split(r"^=== (.+) === (.+)$", text, flags=re.MULTILINE)[1:]
    return list(zip(parts[0::3], parts[1::3], parts[2::3], strict=True))
