"""Write and read tokens/step_N.parquet: the samples of a step token by token, in bounded space."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from gapo_megatron.errors import DataError
from gapo_megatron.io.documents import open_file
from gapo_megatron.io.files import naming, write_atomically
from gapo_megatron.types import Sample, SampleTokens

TOKENS_NAME = "tokens"
"""Folder of the files in a run's folder."""
MAX_BYTES = 2**30
"""Size of all files of a run; beyond it the oldest go."""

_FILE = re.compile(r"step_(\d{8,})\.parquet")
_SCALARS = {"int": "int64", "str": "string", "bool": "bool", "float": "float64"}
"""Names of types in Parquet, by those in `Sample` and `SampleTokens`."""
_LISTS = {
    "token_ids": "int32",
    "pieces": "string",
    "response_mask": "bool",
    "conversations": "int32",
    "policy_versions": "int32",
    "rollout_log_probs": "float32",
    "token_clipped": "bool",
    "old_log_probs": "float32",
    "log_probs": "float32",
    "log_ratio": "float32",
}
"""Columns with a list for each response, one element a token."""


def token_files(run_dir: Path) -> dict[int, Path]:
    """The files of a run by step, in order."""
    folder = run_dir / TOKENS_NAME
    found = [(_FILE.fullmatch(path.name), path) for path in folder.glob("*.parquet")]
    return dict(sorted((int(match[1]), path) for match, path in found if match))


class TokenLog:
    """Writes a file for each step of a run; for one process."""

    def __init__(self, run_dir: Path, *, resume_step: int) -> None:
        """Remove the files of `resume_step` and later: a resumed run writes them again.

        Raises:
            MachineError: the disk fails.
        """
        self._run_dir = run_dir
        for step, path in token_files(run_dir).items():
            if step >= resume_step:
                with naming(path):
                    path.unlink()

    def write(self, step: int, rows: Sequence[SampleTokens]) -> None:
        """Write the file of a step, whole or not at all, and remove the oldest beyond `MAX_BYTES`.

        Raises:
            MachineError: the disk is full or fails.
        """
        from pyarrow import parquet  # a third of a second, where it is used

        content = io.BytesIO()
        parquet.write_table(_table(rows), content, compression="zstd", write_statistics=False)
        folder = self._run_dir / TOKENS_NAME
        with naming(folder):
            folder.mkdir(exist_ok=True)
        write_atomically(folder / f"step_{step:08d}.parquet", content.getvalue())
        sizes = {path: path.stat().st_size for path in token_files(self._run_dir).values()}
        total = sum(sizes.values())
        for path, size in [*sizes.items()][:-1]:
            if total <= MAX_BYTES:
                break
            with naming(path):
                path.unlink()
            total -= size


def count_tokens(path: Path) -> int:
    """Tokens of all responses of a file, from the one column that says so.

    Raises:
        DataError: it is no such file, or damaged; names it.
    """
    return sum(row["num_tokens"] or 0 for row in _read(path, ["num_tokens"]))


def read_tokens(path: Path) -> list[dict[str, Any]]:
    """Read the responses of a file of `token_files`: values by column, None where there is none.

    Raises:
        DataError: it is no such file, or damaged; names it.
    """
    rows = _read(path)
    for row in rows:
        lengths = {len(row[name]) for name in _LISTS if row[name] is not None}
        missing = [name for name in _schema().names if row[name] is None and name in _REQUIRED]
        missing += [name for name in _WHOLE if not missing and None in row[name]]
        if missing or lengths != {row["num_tokens"]}:
            what = f"no {missing[0]}" if missing else "lists of other lengths than its num_tokens"
            raise DataError(f"{path} is damaged: a response has {what}")
        row["metrics"] = dict(row["metrics"])
    return rows


def _read(path: Path, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Rows of a file, with all of its columns or some."""
    from pyarrow import ArrowException, parquet

    with naming(path), open_file(path) as file:
        content = io.BytesIO(file.read())
    try:
        table = parquet.read_table(content, columns=columns, schema=_schema())
        rows: list[dict[str, Any]] = table.to_pylist()
        return rows
    # OSError: its decompression; ValueError: texts that are no UTF-8.
    except (ArrowException, OSError, ValueError) as error:
        [said, *_] = str(error).splitlines() or ["unreadable"]
        raise DataError(f"{path} is damaged: {said}") from None


_WHOLE = ("token_ids", "pieces", "response_mask", "conversations", "policy_versions")
"""Lists in which every token has a value."""
_REQUIRED = {one.name for one in fields(Sample) if "None" not in str(one.type)} | {
    *_WHOLE,
    *("rollout_log_probs", "advantage"),
}


def _schema() -> Any:
    """Columns of a file, as a schema of Arrow."""
    import pyarrow

    columns = []
    for one in (*fields(Sample), *fields(SampleTokens)):
        if one.name in _LISTS:
            kind = pyarrow.list_(pyarrow.type_for_alias(_LISTS[one.name]))
        elif one.name == "sample" and one.type == "Sample":
            continue
        elif one.name == "metrics":
            kind = pyarrow.map_(pyarrow.string(), pyarrow.float64())
        else:
            kind = pyarrow.type_for_alias(_SCALARS[str(one.type).removesuffix(" | None")])
        columns.append(pyarrow.field(one.name, kind))
    return pyarrow.schema(columns)


def _table(rows: Sequence[SampleTokens]) -> Any:
    """Arrow's table of these rows."""
    import pyarrow

    schema = _schema()
    of_sample = {one.name for one in fields(Sample)}
    columns = []
    for field in schema:
        owners: list[Any] = [one.sample if field.name in of_sample else one for one in rows]
        values = [getattr(one, field.name) for one in owners]
        if field.name in _LISTS:
            columns.append(_lists(values, field.type))
        elif field.name == "metrics":
            columns.append(pyarrow.array([[*one.items()] for one in values], field.type))
        else:
            columns.append(pyarrow.array(values, field.type))
    return pyarrow.Table.from_arrays(columns, schema=schema)


def _lists(values: Sequence[Any], kind: Any) -> Any:
    """A column of lists: None is no list, NaN no element."""
    import pyarrow

    lengths = [0 if one is None else len(one) for one in values]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    if pyarrow.types.is_string(kind.value_type):
        elements = pyarrow.array([piece for one in values for piece in one or ()], kind.value_type)
    else:
        flat = np.concatenate([np.empty(0, np.float32), *(v for v in values if v is not None)])
        if kind.value_type == pyarrow.bool_():
            elements = pyarrow.array(flat != 0, mask=np.isnan(flat))
        else:
            elements = pyarrow.array(flat, from_pandas=True)
        elements = elements.cast(kind.value_type)
    mask = pyarrow.array([one is None for one in values])
    return pyarrow.ListArray.from_arrays(offsets, elements, type=kind, mask=mask)
