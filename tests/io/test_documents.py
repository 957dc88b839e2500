"""JSON and TOML from outside: what the parsers let through is refused by name."""

import json
import os

import pytest

from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.io.documents import (
    MAX_BITS,
    MAX_DEPTH,
    parse_json,
    parse_toml,
    read_json,
    read_text,
    read_toml,
)
from tests.messages import mentions


@pytest.mark.parametrize(
    ("text", "what"),
    [
        pytest.param("", "Expecting value", id="empty"),
        pytest.param('{"a": 1', "column", id="cut"),
        pytest.param("[1] [2]", "Extra data", id="goes on"),
        pytest.param("9" * 5000, "largest", id="a number of 5,000 digits"),
        pytest.param("[-1" + "0" * 400 + "]", "largest", id="no float can be so large"),
        pytest.param("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), str(MAX_DEPTH), id="deep"),
        pytest.param("[" * 100_000, "deep", id="deeper than the parser's stack"),
        pytest.param('{"a": {"b": 1, "b": 2}}', "'b'", id="a key twice"),
        pytest.param('{"a": NaN}', "NaN", id="NaN"),
        pytest.param("[-Infinity]", "-Infinity", id="Infinity"),
        pytest.param('{"a": 1e999}', "1e999", id="a number beyond the largest"),
        pytest.param('{"a": ["x\\ud800y"]}', "ud800", id="half of a pair"),
        pytest.param('{"\\udfff": 1}', "udfff", id="half of a pair in a key"),
        pytest.param(b'"\xff"', "UTF-8", id="no UTF-8"),
        pytest.param('\ufeff{"a": 1}', "BOM", id="a byte order mark"),
    ],
)
def test_json_that_only_a_parser_takes_is_refused_with_its_place(text, what):
    with pytest.raises(DataError, match=mentions("FILE:7", what)):
        parse_json(text, where="FILE:7", error=DataError)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, 2.5, null, true]}', {"a": [1, 2.5, None, True]}),
        ('"\\ud83d\\ude00"', "😀"),
        ("[" * MAX_DEPTH + "]" * MAX_DEPTH, json.loads("[" * MAX_DEPTH + "]" * MAX_DEPTH)),
        (json.dumps([{"a": 1}] * 200), [{"a": 1}] * 200),
        (b" 1 ", 1),
    ],
)
def test_json_is_read_as_it_is(text, value):
    assert parse_json(text, where="FILE", error=DataError) == value


def test_a_row_of_data_is_refused_for_its_own_keys_alone():
    deep = "[" * 500 + "]" * 500
    text = '{"a": {"b": 1, "b": 2}, "c": [NaN, 1e999, "\\ud800", ' + deep + "]}"
    row = parse_json(text, where="FILE:7", error=DataError, is_data=True)
    assert row["a"] == {"b": 2}
    assert parse_json('[{"b": 1, "b": 2}]', where="FILE:7", is_data=True) == [{"b": 2}]
    for text, what in (
        ('{"a": 1, "b": {"c": 1}, "a": 2}', "'a'"),
        ('{"a": ' + "[" * 100_000, "deep"),
    ):
        with pytest.raises(DataError, match=mentions("FILE:7", what)):
            parse_json(text, where="FILE:7", error=DataError, is_data=True)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        pytest.param("a = ", "Invalid value", id="cut"),
        pytest.param("a = " + "9" * 5000, "digits", id="a number of 5,000 digits"),
        pytest.param("a = 0x" + "f" * 5000, str(MAX_BITS), id="more digits than Python writes"),
        pytest.param("a = " + "[" * 70 + "]" * 70, str(MAX_DEPTH), id="deep"),
        pytest.param("a = " + "[" * 100_000, "deep", id="deeper than the parser's stack"),
        pytest.param(".".join("a" * 100) + " = 1", str(MAX_DEPTH), id="deep by dots"),
    ],
)
def test_toml_that_only_a_parser_takes_is_refused_with_its_place(text, what):
    with pytest.raises(ConfigError, match=mentions("FILE", what)):
        parse_toml(text, where="FILE")


def test_a_toml_file_from_windows_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbf[run]\r\nseed = 3\r\n")
    assert read_toml(tmp_path / "file") == {"run": {"seed": 3}}


@pytest.mark.parametrize("read", [read_text, read_json, read_toml])
def test_what_is_no_file_is_refused_and_not_waited_for(read, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_bytes(b"\xff\xfe")
    for path, parts in (
        (tmp_path / "fifo", ("fifo", "regular file")),
        (tmp_path, (str(tmp_path),)),
        (tmp_path / "loop", ("loop",)),
        ("a\0b", ("NUL",)),
        (tmp_path / "file", ("file", "UTF-8")),
    ):
        with pytest.raises(DataError, match=mentions(*parts)):
            read(path, error=DataError)
    for absent in ("absent", "file/absent"):  # left to the caller
        with pytest.raises(FileNotFoundError):
            read(tmp_path / absent)


def test_a_file_that_is_too_long_is_not_read_whole(tmp_path):
    (tmp_path / "file").write_bytes(b"1" * 11)
    with pytest.raises(ConfigError, match=mentions("file", "10")):
        read_text(tmp_path / "file", max_bytes=10)
    assert read_text(tmp_path / "file", max_bytes=11) == "1" * 11
