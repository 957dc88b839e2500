"""Rows of JSONL, JSON and Parquet files."""

from __future__ import annotations

import json
import os
import tracemalloc

import pytest

from gapo_megatron.data import rows as rows_module
from gapo_megatron.data.rows import check_format, count_rows, read_rows
from gapo_megatron.errors import DataError
from tests.messages import mentions
from tests.prepare_data_setup import put


def read(path, **options):
    return [(number, row) for number, row, _ in read_rows(path, **options)]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_every_format_gives_the_same_rows(tmp_path, suffix):
    rows = [{"a": "[é]", "b": 1}, {"a": '",}{"', "b": 2}] * 20
    numbered = list(enumerate(rows, start=1))
    path = put(tmp_path / f"rows{suffix}", rows, row_group_size=7)
    assert read(path, columns=("a", "b"), optional=("absent",)) == numbered
    for after in (1, 6, 7, 8, 20, 21, 39, 40):  # of row groups, too
        assert read(path, columns=("a", "b"), after=after) == numbered[after:]
    shares = [share for _, _, share in read_rows(path, columns=())]
    assert shares == sorted(shares)
    assert 0 < shares[0] <= shares[-1] == 1


@pytest.mark.parametrize(("suffix", "form"), [(".jsonl", "{}\n"), (".json", "[{}]")])
def test_a_row_may_have_any_sign_that_ends_a_line_elsewhere(tmp_path, suffix, form):
    row = {"a": "x\u2028y\x85z\x0c"}
    path = tmp_path / f"rows{suffix}"
    path.write_text(form.format(json.dumps(row, ensure_ascii=False)), encoding="utf-8")
    assert read(path) == [(1, row)]


def test_an_empty_list_and_blank_lines_have_no_rows(tmp_path):
    assert list(read_rows(put(tmp_path / "a.json", []), columns=())) == []
    (tmp_path / "b.jsonl").write_text('\n{"a": 1}\n\n')
    assert read(tmp_path / "b.jsonl", columns=()) == [(2, {"a": 1})]
    for name, text in (("c.json", '\ufeff[{"a": 1}]'), ("c.jsonl", '\ufeff{"a": 1}\n')):
        (tmp_path / name).write_text(text, encoding="utf-8")  # Windows' mark
        assert read(tmp_path / name, columns=()) == [(1, {"a": 1})]


def test_memory_holds_a_few_rows(tmp_path):
    path = put(tmp_path / "rows.jsonl", [{"a": "x" * 10_000}] * 400)
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_rows(path, columns=())) == 400
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 4_000_000
    assert peak < 1_000_000


def test_a_row_without_end_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "MAX_ROW_BYTES", 2**16)
    path = put(tmp_path / "rows.jsonl", [{"a": "x"}, {"a": "y" * 2**15}])
    assert len(read(path)) == 2
    path.write_bytes(b'{"a": 1}\n')
    os.truncate(path, 2**30)  # a hole, of zeros
    tracemalloc.start()
    try:
        for reads in (read, count_rows):
            with pytest.raises(DataError, match=mentions(path, 2**16)):
                reads(path)
        assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', ("a.jsonl:2:", "JSON")),
        ("a.jsonl", b'{"a": "\xff"}\n', ("a.jsonl:1:", "UTF-8")),
        ("a.jsonl", b'{}\n{"a": 1' + b"0" * 5000 + b"}", ("a.jsonl:2:", "digits")),
        ("a.jsonl", b'{}\n{"a": ' + b"[" * 100_000, ("a.jsonl:2:", "deep")),
        ("a.jsonl", b'{"a": 1, "a": 2}', ("a.jsonl:1:", "'a'")),
        ("a.jsonl", b"[1]\n", ("a.jsonl:1:", "object", "[1]")),
        ("a.json", b'"a"', ("a.json:", "JSON list")),
        ("a.json", b'[{"a": 1}, {"a": ', ("a.json:2:", "JSON")),
        ("a.json", b'[{"a": 1} {"a": 2}]', ("a.json:", "','", "']'", "row 1")),
        ("a.json", b'[{"a": 1}', ("a.json:", "','", "']'", "row 1")),
        ("a.json", b'[{"a": "\xff"}]', ("a.json:", "UTF-8")),
        ("a.json", b'[{"a": 1}] [{"a": 2}]', ("a.json:", "after the end")),
        ("a.json", b"[] 1", ("a.json:", "after the end")),
        ("a.json", b'[{"a": 1' + b"0" * 5000 + b"}]", ("a.json:1:", "JSON", "Exceeds")),
        ("a.json", b'[{}, {"a": ' + b"[" * 100_000, ("a.json:2:", "deep")),
        ("a.json", b'[{}, {"a": 1, "a": 2}]', ("a.json:2:", "'a'")),
        ("a.parquet", b"PAR1", ("a.parquet:", "Parquet")),
        ("gone.jsonl", None, ("gone.jsonl:", "No such file")),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_row(tmp_path, name, content, named):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=mentions(*named)):
        list(read_rows(tmp_path / name, columns=()))


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"a{suffix}"
    os.mkfifo(path)
    with pytest.raises(DataError, match=mentions(path, "regular file")):
        list(read_rows(path))
    with pytest.raises(DataError, match=mentions(path, "regular file")):
        check_format(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match=mentions(path, "directory")):
        list(read_rows(path))


def test_what_nobody_reads_of_a_row_may_be_whatever_python_reads(tmp_path):
    deep = "[" * 70 + "]" * 70
    row = '{"a": [NaN, Infinity, "\\ud800"], "b": {"c": 1, "c": ' + deep + "}}"
    for name, text in (("a.jsonl", row), ("a.json", f"[{row}]")):
        (tmp_path / name).write_text(text)
        ((_, read_row),) = read(tmp_path / name)
        assert str(read_row["a"][:2]) == "[nan, inf]"
        assert str(read_row["b"]["c"]) == deep


def test_a_parquet_file_without_a_column_says_which_it_has(tmp_path):
    path = put(tmp_path / "a.parquet", [{"question": "q", "answer": "1"}])
    with pytest.raises(
        DataError, match=mentions(path, "prompt;", "question, answer", "--prompt-key")
    ):
        list(read_rows(path, columns=("prompt", "answer"), optional=("id",)))
