"""Private parts of the standard library's pickle in use."""

from __future__ import annotations

from pickle import _Unpickler as Unpickler

__all__ = ["Unpickler"]
# Re-export: the unpickler that is written in Python, whose operations (`dispatch`) can be checked
# Uses: pickle._Unpickler, its dispatch, memo and stack
# Versions: CPython 3.11, 3.12, 3.13
# Upstream: none found
