"""Files of tokens: what they hold, what a resume leaves of them, and how much room they take."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gapo_megatron.errors import DataError, MachineError
from gapo_megatron.io import token_files as module
from gapo_megatron.io.token_files import TokenLog, read_tokens, token_files
from gapo_megatron.types import Sample, SampleTokens
from tests.full_disk import full_disk
from tests.io.test_sample_files import sample_of
from tests.messages import mentions


def tokens_of(step: int, number: int = 0, *, learned: bool = True) -> SampleTokens:
    """Of three tokens, the second of an environment."""
    mask = np.array([True, False, True])

    def numbers(first: float) -> np.ndarray:
        return np.where(mask, np.float32(first) + np.arange(3, dtype=np.float32) / 8, np.nan)

    one = SampleTokens(
        sample=replace(sample_of(step, number, response="a\u2028</b>"), num_tokens=3),
        token_ids=np.array([5, 6, 7], np.int32),
        pieces=["a", "\u2028", "</b>"],
        response_mask=mask,
        conversations=np.zeros(3, np.int32),
        policy_versions=np.array([1, 1, 2], np.int32),
        rollout_log_probs=numbers(-1.0),
        advantage=-0.5,
    )
    if not learned:
        return one
    return replace(
        one,
        update=1,
        ratio=1.01,
        clip_low=0.99,
        clip_high=1.005,
        clipped=1.0,
        clip_side="high",
        old_log_probs=numbers(-1.5),
        log_probs=numbers(-1.25),
        log_ratio=numbers(0.25),
    )


def expected(one: SampleTokens) -> dict[str, Any]:
    """What a reader gets: None for what is not there."""

    def plain(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        return [None if item != item else item for item in value.tolist()]

    found = {field.name: getattr(one.sample, field.name) for field in fields(Sample)}
    names = [field.name for field in fields(SampleTokens) if field.name != "sample"]
    return found | {name: plain(getattr(one, name)) for name in names}


def contents(run_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in token_files(run_dir).values()}


def test_every_value_is_read_as_it_was_written(tmp_path: Path) -> None:
    clips, talks = np.array([1, np.nan, 0], np.float32), np.array([0, 1, 1], np.int32)
    rows = [
        tokens_of(3),
        replace(tokens_of(3, 1, learned=False), conversations=talks),
        replace(tokens_of(3, 2), ratio=None, clipped=0.5, token_clipped=clips, old_log_probs=None),
    ]
    TokenLog(tmp_path, resume_step=0).write(3, rows)
    (path,) = token_files(tmp_path).values()
    assert path == tmp_path / "tokens/step_00000003.parquet"
    found = read_tokens(path)
    assert found == [expected(one) for one in rows]
    assert found[2]["token_clipped"] == [True, None, False] and found[1]["log_ratio"] is None
    assert [one["conversations"] for one in found] == [[0, 0, 0], [0, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize("resume_step", [0, 2, 4])
def test_a_resumed_run_has_the_files_of_an_undisturbed_one(
    tmp_path: Path, resume_step: int
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder, steps in ((whole, range(6)), (killed, range(4))):
        folder.mkdir()
        log = TokenLog(folder, resume_step=0)
        for step in steps:
            log.write(step, [tokens_of(step, number) for number in range(2)])
    before = contents(killed)
    (killed / "tokens/.step_00000004.parquet.77").write_bytes(b"half")
    log = TokenLog(killed, resume_step=resume_step)
    assert contents(killed) == dict([*before.items()][:resume_step])
    for step in range(resume_step, 6):
        log.write(step, [tokens_of(step, number) for number in range(2)])
    assert contents(killed) == contents(whole) and len(contents(whole)) == 6


def test_the_oldest_files_go_when_all_together_are_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = TokenLog(tmp_path, resume_step=0)
    log.write(0, [tokens_of(0)])
    (size,) = map(len, contents(tmp_path).values())
    monkeypatch.setattr(module, "MAX_BYTES", 3 * size + size // 2)
    for step in range(1, 8):
        log.write(step, [tokens_of(step)])
    assert [*token_files(tmp_path)] == [5, 6, 7]
    monkeypatch.setattr(module, "MAX_BYTES", 1)
    log.write(8, [tokens_of(8)])
    assert [*token_files(tmp_path)] == [8]  # the newest stays, whatever its size


def test_a_full_disk_is_named_and_leaves_no_half_of_a_file(tmp_path: Path) -> None:
    log = TokenLog(tmp_path, resume_step=0)
    log.write(0, [tokens_of(0)])
    path = tmp_path / "tokens/step_00000001.parquet"
    with full_disk(100), pytest.raises(MachineError, match=mentions(path)):
        log.write(1, [tokens_of(1)])
    assert [one.name for one in path.parent.iterdir()] == ["step_00000000.parquet"]


def test_what_is_no_file_of_tokens_is_named(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet, table

    TokenLog(tmp_path, resume_step=0).write(0, [tokens_of(0), tokens_of(0, 1)])
    (path,) = token_files(tmp_path).values()
    whole, found = path.read_bytes(), parquet.read_table(path)
    for content in (whole[: len(whole) // 2], b"", whole[:40] + b"\0" * 300 + whole[340:]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=mentions(path, "damaged")):
            read_tokens(path)

    def talks(values: list[list[int | None]]) -> Any:
        place = found.schema.get_field_index("conversations")
        return found.set_column(place, "conversations", pyarrow.array(values))

    for other, said in (
        (found.drop_columns(["pieces"]), "pieces"),
        (found.drop_columns(["conversations"]), "conversations"),
        (talks([[0, None, 0], [0, 0, 0]]), "conversations"),
        (talks([[0, 0], [0, 0, 0]]), "num_tokens"),
        (table({"step": ["x"]}), "step"),
        (found.set_column(0, "step", [[None, None]]), "step"),
        (found.set_column(9, "num_tokens", [[3, 4]]), "num_tokens"),
    ):
        parquet.write_table(other, path)
        with pytest.raises(DataError, match=mentions(path, said)):
            read_tokens(path)
