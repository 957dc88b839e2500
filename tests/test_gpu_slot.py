"""`make test-gpu` in a slot: order, what is cut off, a torch that does not import."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import __main__ as command
from tests.gpu import runner
from tests.gpu.parts import PARTS, Part

FACTS = {"modules": [*runner.NEEDED, "vllm"], "device": "H100", "why": "", "broken": ""}
FIRST = "tiny_update equal_bits fp16 engine gpt_oss moonlight speed marked_tests save_and_load"


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> tuple[int, list[str]]:
    """Exit code of the command, and the parts it would run."""
    asked: list[str] = []

    def run_parts(
        parts: list[Part], facts: Any, folder: Path, *_: Any, **__: Any
    ) -> list[dict[str, Any]]:
        folder.mkdir(parents=True, exist_ok=True)
        asked.extend(part.name for part in parts)
        return [result("speed", tokens=100.0)]

    monkeypatch.setattr(runner, "look", lambda parts: FACTS)
    monkeypatch.setattr(runner, "run_parts", run_parts)
    return command.main(["--output", str(folder / "out"), *arguments]), asked


def test_the_most_telling_parts_come_first_and_the_head_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, asked = run(monkeypatch, tmp_path)
    assert code == 0 and asked[:10] == [*FIRST.split(), "memory"]
    assert {part.name for part in PARTS} - set(asked) == {"head"}
    assert run(monkeypatch, tmp_path, "--only", "head") == (0, ["head"])


def test_a_slot_cuts_off_what_runs_and_says_what_it_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now, limits, lines = [0.0], [], list[str]()

    def run_part(part: Part, *_: Any, log: Path) -> dict[str, Any]:
        log.touch()
        limits.append(part.limit_s)
        now[0] += min(part.limit_s, 250)
        status = "passed" if part.limit_s >= 250 else "timed out"
        return result(part.name, tokens=12.5) | {"status": status}

    monkeypatch.setattr(runner, "run_part", run_part)
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: now[0]))
    parts = [Part(name, "programs", "something", 300) for name in "abc"]
    found = runner.run_parts(
        parts, FACTS, tmp_path, lambda *_: [], again=True, slot_s=400, say=lines.append
    )
    assert limits == [300, 150]
    assert [one["status"] for one in found] == ["passed", "timed out", "not run"]
    assert sum("rate: 12.5 tokens/s" in line for line in lines) == 2
    assert not (tmp_path / "c.json").exists()  # the next slot runs it


def test_a_torch_that_does_not_import_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert command.main(["--output", str(tmp_path / "out")]) == 2
    first, *rest = capsys.readouterr().out.splitlines()
    assert sys.executable in first and "libcudart.so.13: cannot open" in first
    assert not any("pip install" in line for line in rest)


def row(what: str, value: Any, unit: str) -> dict[str, Any]:
    return {"what": what, "value": value, "unit": unit}


def result(part: str, *, tokens: float) -> dict[str, Any]:
    rows = [row("rate", tokens, "tokens/s"), row("seconds", 3.0, "s"), row("rate", "no", "MFU")]
    return {"part": part, "status": "passed", "why": "", "seconds": 1.0, "rows": rows}
