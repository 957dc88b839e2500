"""Files of rows in the forms in which other frameworks publish them, with problems of our own."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

ASKED = (("What is 17 + 25?", "42"), ("What is 9 * 8?", "72"), ("What is 81 / 3?", "27"))


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def verl(i: int, text: str, answer: Any) -> dict[str, Any]:
    """As DAPO-Math-17k's: `content` before `role`, a constant `ability`, an id in `extra_info`."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": f"Solve it.\n\n{text}", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"9a9b6eb4-{i}", "split": ["train", "dapo"], "tries": None},
    }


def slime(i: int, text: str, answer: Any) -> dict[str, Any]:
    return {"prompt": user(text), "label": answer, "metadata": {"rm_type": "math", "n": i}}


def orz(i: int, text: str, answer: Any) -> list[dict[str, Any]]:
    return [
        {"from": "human", "value": text},
        {"from": "assistant", "ground_truth": {"value": answer}},
    ]


def trl(i: int, text: str, answer: Any) -> dict[str, Any]:
    return {"prompt": user(text), "solution": f"${answer}$", "difficulty": 3}


def openai(i: int, text: str, answer: Any) -> dict[str, Any]:
    return {"messages": [*user(text), {"role": "assistant", "content": answer}]}


def gapo(i: int, text: str, answer: Any) -> dict[str, Any]:
    return {"id": f"own-{i}", "prompt": text, "answer": answer, "level": "easy"}


FORMS = {
    "gapo.csv": (gapo, "gapo format", "answer"),
    "gapo.tsv.gz": (gapo, "gapo format", "answer"),
    "verl.parquet": (verl, "verl format", "prompt, reward_model.ground_truth"),
    "verl.jsonl.gz": (verl, "verl format", "prompt, reward_model.ground_truth"),
    "slime.jsonl": (slime, "slime format", "label"),
    "orz.json": (orz, "orz format", "0.value, 1.ground_truth.value"),
    "orz.json.gz": (orz, "orz format", "0.value, 1.ground_truth.value"),
    "trl.parquet": (trl, "trl format", "prompt, solution"),
    "openai.jsonl": (openai, "openai format", "messages, messages.-1.content"),
}
"""File -> its rows, and what they are recognised as, with the keys."""


def put_form(path: Path) -> Path:
    """Write the file of `FORMS` that has this name."""
    make, _, _ = FORMS[path.name]
    return put_rows(path, [make(i, *one) for i, one in enumerate(ASKED)])


def put_rows(path: Path, rows: list[Any]) -> Path:
    """Write rows in the format that the file's suffix names."""
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    if suffix == ".json":
        text = json.dumps(rows, indent=1)
    elif suffix == ".jsonl":
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
    else:
        table = io.StringIO()
        delimiter = {".csv": ",", ".tsv": "\t"}[suffix]
        writer = csv.DictWriter(table, rows[0], delimiter=delimiter, lineterminator="\r\n")
        writer.writeheader()
        writer.writerows(rows)
        text = table.getvalue()
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
