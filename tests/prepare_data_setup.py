"""Files of made-up rows for the tests of data preparation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gapo_megatron.data.tokenizer import load_tokenizer
from gapo_megatron.types import Prompt
from gapo_tools import prepare_data as tool
from tests.problem_files import read_problems


def runner(tmp_path: Path, hf_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command on rows or files, with its exit code."""

    def run(source, given, *options, output="out", suffix=".jsonl"):
        if not (given and isinstance(given[0], Path)):
            given = [put(tmp_path / f"{source}{suffix}", given)]
        command = [source, "--input", *map(str, given), "--output", str(tmp_path / output)]
        command += ["--model", str(hf_dir), *map(str, options)]
        monkeypatch.setattr(sys, "argv", ["prepare_data.py", *command])
        return tool.main()

    return run


def written(folder: Path, name: str = "problems") -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def counts_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())["counts"]


def prompts_of(folder: Path, hf_dir: Path, kind: str, *, max_tokens: int = 2048) -> list[Prompt]:
    """The problems as training reads them."""
    return read_problems(
        folder / "problems.jsonl",
        tokenizer=load_tokenizer(hf_dir),
        max_prompt_tokens=max_tokens,
        kind=kind,
    )


def put_tokenizer(folder: Path) -> Path:
    """A model's folder with a tokenizer to which every word is one token."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)
    # Not of a model whose class of tokenizers would read the file in its own way.
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def put(path: Path, rows: list, *, row_group_size: int | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=row_group_size)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def problem(text: str, answer: object = "1") -> dict:
    return {"problem": text, "answer": answer, "solution": "left alone"}


def put_benchmarks(folder: Path) -> Path:
    """Two problems of AIME24 and one of HumanEval+, as published."""
    sentence = "A train leaves the town at noon and goes on for three hours without a stop."
    put(folder / "aime24" / "a.jsonl", [problem(sentence), problem("Find $x+y$.")])
    signature = "def longest(words):\n    '''Return the longest of the words, the first if many.'''"
    row = {"prompt": signature, "entry_point": "longest", "canonical_solution": " pass"}
    row |= {"base_input": [[["a"]]], "plus_input": [], "atol": 0}
    put(folder / "humaneval_plus" / "h.jsonl", [row])
    return folder
