"""What others wrote, in messages: a terminal and a log get text, and no line of their own."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapo_megatron.compat.library_errors import as_config_error
from gapo_megatron.errors import ConfigError, printable, said
from gapo_megatron.launch import postmortem
from gapo_megatron.run import fail_fast as module
from gapo_megatron.run.process_group import configure_logging

FORGED = "\x1b[2J\r\nerror: all 5 steps are done\u2028\x9b1m\u202e"


@given(text=st.text(st.characters(codec=None)), most=st.integers(0, 50))
def test_it_is_one_line_of_printable_characters_and_not_long(text: str, most: int) -> None:
    line = printable(text, most=most)
    assert line.isprintable()
    line.encode()  # no halves of characters
    if len(text) <= most:
        assert printable(text, most=most, kept=text) == text
        assert not text.isprintable() or line == text
    else:
        assert line.endswith("...") and len(line) <= most * len(r"\U0010ffff") + 3


def test_what_libraries_and_others_code_say_is_one_line() -> None:
    with pytest.raises(ConfigError) as caught, as_config_error("a file"):
        raise ValueError(FORGED)
    for line in (str(caught.value), said(ValueError(FORGED))):
        assert line.isprintable() and "all 5 steps are done" in line


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    before = root.level, [*root.handlers]
    yield root
    root.level, root.handlers[:] = before


def test_a_log_and_the_last_message_of_a_program_obey_nobody(
    root_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging(0, 1)
    logging.getLogger("another.library").warning("two\nlines %s", FORGED)
    monkeypatch.setattr(module.os, "_exit", lambda code: None)
    with module.fail_fast():
        raise RuntimeError(FORGED)
    text = capsys.readouterr().err
    assert text.count("all 5 steps are done") >= 2 and "two\nlines" in text
    assert all(line.isprintable() for line in text.split("\n"))


def test_a_postmortem_shows_logs_and_does_not_obey_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank_0.log").write_text(FORGED)
    record = {"rank": 1, "host": "a", "unix_s": 1.0, "exit_code": 1, "error": "ValueError"}
    record |= {"message": FORGED, "traceback": FORGED}
    postmortem.main([str(tmp_path)])
    (tmp_path / "failure_1.json").write_text(json.dumps(record))
    postmortem.main([str(tmp_path)])
    text = capsys.readouterr().out
    assert text.count("all 5 steps are done") >= 2
    assert all(line.isprintable() for line in text.split("\n"))
