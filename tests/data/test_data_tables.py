"""Rows of CSV and TSV files, and of gzipped ones."""

from __future__ import annotations

import gzip
import random
import tracemalloc
from pathlib import Path

import pytest

from gapo_megatron.data import rows as rows_module
from gapo_megatron.data.rows import check_format, count_rows, read_rows
from gapo_megatron.errors import ConfigError, DataError
from tests.messages import mentions
from tests.row_files import put_rows

TEXTS = ['a "quoted", one', "two\r\nlines", "tab\tand é\u2028", "'", " x ", '"', "\ufeff", "1\n"]


def read(path: Path, **options: object) -> list[tuple[int, object]]:
    return [(number, row) for number, row, _ in read_rows(path, **options)]  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
@pytest.mark.parametrize("packed", ["", ".gz"])
def test_tables_give_the_texts_that_were_written(tmp_path: Path, suffix: str, packed: str) -> None:
    pick = random.Random(0).choice
    rows = [{"a": pick(TEXTS), "b": pick(TEXTS), "c": str(i)} for i in range(200)]
    path = put_rows(tmp_path / f"t{suffix}{packed}", rows)
    numbered = list(enumerate(rows, start=1))
    assert read(path) == numbered
    assert count_rows(path) == 200
    for after in (1, 7, 199, 200):
        assert read(path, after=after) == numbered[after:]
    check_format(path)


@pytest.mark.parametrize("name", ["r.jsonl.gz", "r.json.gz", "r.csv.gz", "r.tsv.gz"])
def test_a_gzipped_file_is_the_file(tmp_path: Path, name: str) -> None:
    """Also in several members, as `cat a.gz b.gz` and bgzip write them."""
    rows = [{"a": f"{i} é" * (i % 5), "b": "x"} for i in range(1, 400) if i % 5]
    packed = put_rows(tmp_path / name, rows)
    data = gzip.decompress(packed.read_bytes())
    plain = tmp_path / name.removesuffix(".gz")
    plain.write_bytes(data)
    packed.write_bytes(gzip.compress(data[:500]) + gzip.compress(data[500:]))
    assert read(packed) == read(plain) == list(enumerate(rows, start=1))
    assert count_rows(packed) == count_rows(plain) == len(rows)
    shares = [share for _, _, share in read_rows(packed)]
    assert shares == sorted(shares) and 0 < shares[0] <= shares[-1] <= 1
    for broken, said in ((b"a,b\n", "gzip"), (packed.read_bytes()[:-300], "gzip")):
        packed.write_bytes(broken)
        for reads in (read, count_rows):
            with pytest.raises(DataError, match=mentions(packed, said)):
                reads(packed)


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MAX_ROW_BYTES", 2**16)
    monkeypatch.setattr(rows_module, "MAX_UNPACKED_BYTES", 2**17)
    bomb = gzip.compress(b'[{"a": "' + b"0" * 2**24 + b'"}]')
    endless = gzip.compress(b'a,b\n1,"' + b"0\n" * 2**23)
    for name, data in (("b.jsonl.gz", bomb), ("b.json.gz", bomb), ("b.csv.gz", endless)):
        path = tmp_path / name
        path.write_bytes(data)
        tracemalloc.start()
        try:
            with pytest.raises(DataError, match=mentions(path, "bytes")):
                read(path)
            assert tracemalloc.get_traced_memory()[1] < 4 * 2**20, name
        finally:
            tracemalloc.stop()
    (tmp_path / "r.json").write_text('[{}, {"a": "' + "0" * 2**16 + '"}]')
    with pytest.raises(DataError, match=mentions(f"{tmp_path / 'r.json'}:2", 2**16)):
        read(tmp_path / "r.json")


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("t.csv", b"a,b\n1,2\n3\n", ("t.csv:2:", "1 cells", "a, b")),
        ("t.csv", b"a,b\n1,2\n3,4,5\n", ("t.csv:2:", "3 cells")),
        ("t.csv", b"a,a\n1,2\n", ("'a'", "2 times")),
        ("t.csv", b'a,b\n1,2\n"3"x,4\n', ("t.csv:2:", "','")),
        ("t.csv", b'a,b\n1,2\n3,"4\n', ("t.csv:2:", "unexpected end")),
        ("t.csv", b"a,b\n1,2\n3,\xff\n", ("t.csv:2:", "UTF-8")),
        ("t.csv", "a,b\n1,2\n".encode("utf-16"), ("t.csv:0:", "UTF-8")),
        ("t.tsv", b'a\tb\n"Hello" she said\t2\n', ("t.tsv:1:", "expected after")),
    ],
)
def test_a_table_that_cannot_be_read_is_named_with_the_row(
    tmp_path: Path, name: str, content: bytes, named: tuple[str, ...]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=mentions(*named)):
        read(path)


def test_what_tables_of_others_have(tmp_path: Path) -> None:
    """A mark at the start, an index without a name, empty cells, blank lines, no last line end."""
    path = tmp_path / "t.csv"
    path.write_bytes(b'\xef\xbb\xbf,"prompt",answer,level\r\n0,1+2=,3,\r\n\r\n1,,4,"x"')
    assert read(path) == [
        (1, {"prompt": "1+2=", "answer": "3", "level": None}),
        (2, {"prompt": None, "answer": "4", "level": "x"}),
    ]
    path.write_bytes(b"")
    assert read(path) == [] and count_rows(path) == 0
    lines = tmp_path / "lines.json.gz"  # of lines, as many published files of this suffix
    lines.write_bytes(gzip.compress(b'\xef\xbb\xbf\r\n{"a": 1}\r\n\r\n{"a": 2}'))
    assert read(lines) == [(2, {"a": 1}), (4, {"a": 2})]
    assert count_rows(lines) == 2


def test_packed_parquet_and_unknown_suffixes_are_refused(tmp_path: Path) -> None:
    for name in ("a.parquet.gz", "a.txt.gz", "a.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b"{}"))
        with pytest.raises(ConfigError, match=mentions(name, "*.csv", "*.gz")):
            check_format(tmp_path / name)
    with pytest.raises(DataError, match=mentions("a.parquet.gz", "unpack")):
        read(tmp_path / "a.parquet.gz")
