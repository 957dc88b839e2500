"""The problem file: JSONL, one problem a line, read and checked whole before any model is built.

    {"id": "a-17", "prompt": "3+8+5=", "answer": "16", "level": "2 additions"}

`id` is unique within the file, `answer` is what the verifier compares with, `level` is optional and
names the stratum in reports. Other keys are left alone: a file may carry what else it likes.
Answers too large for every rank to hold (tests of programs) lie in a file beside it, and `answer`
says where:

    "answer": {"file": "tests.jsonl", "offset": 0, "length": 5126}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_prompts(
    path: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    chat_template: bool = False,
) -> list[Prompt]:
    """Read, check and tokenise a problem file.

    Args:
        path: JSONL file in UTF-8; blank lines are skipped.
        tokenizer: of the policy; adds its own special tokens (a BOS where it has one).
        max_prompt_tokens: longest prompt that passes, in tokens, template included.
        chat_template: wrap `prompt` as a user message in the tokenizer's chat template.

    Returns:
        The problems in file order, the same on every rank.

    Raises:
        DataError: names the file, the line and the rule it breaks.
        ConfigError: `chat_template` is asked for and the tokenizer has none.
    """
    if chat_template and not tokenizer.chat_template:
        raise ConfigError(
            "data.chat_template (True): the tokenizer has no chat template; set it to false, or "
            "use the tokenizer of an instruction-tuned model"
        )
    prompts: list[Prompt] = []
    line_of: dict[str, int] = {}
    sizes: dict[Path, int] = {}
    for number, row in read_jsonl(path, keys=("id", "prompt"), optional=("level",)):
        where = f"{path}:{number}"
        answer = _answer(row, Path(path).parent, sizes, where=where)
        if row["id"] in line_of:
            raise DataError(f"{where}: id {row['id']!r} was used in line {line_of[row['id']]}")
        line_of[row["id"]] = number
        token_ids = encode_prompt(row["prompt"], tokenizer, chat_template=chat_template)
        if not 0 < len(token_ids) <= max_prompt_tokens:
            raise DataError(
                f"{where}: the prompt of {row['id']!r} has {len(token_ids)} tokens; "
                f"data.max_prompt_tokens allows 1 to {max_prompt_tokens}"
            )
        prompts.append(Prompt(row["id"], token_ids, answer, row.get("level", "")))
    if not prompts:
        raise DataError(f"{path}: holds no problems")
    return prompts


def _answer(row: dict[str, Any], folder: Path, sizes: dict[Path, int], *, where: str) -> str:
    """The answer; of one in another file the reference, as JSON text, whose file is there.

    `sizes` remembers files that were looked at: every line may name the same one.
    """
    reference = row.get("answer")
    if not isinstance(reference, dict):
        _check(row, ("answer",), (), where=where)
        return str(row["answer"])
    file, offset, length = (reference.get(key) for key in ("file", "offset", "length"))
    if not (isinstance(file, str) and type(offset) is int and type(length) is int):
        raise DataError(
            f"{where}: answer ({_shown(reference)}) must be a string, or name file, offset and "
            "length of one"
        )
    there = folder / file
    try:
        if there not in sizes:
            sizes[there] = there.stat().st_size
    except OSError as error:
        raise DataError(f"{where}: answer: {there} cannot be read: {error.strerror}") from None
    if not 0 <= offset < offset + length <= sizes[there]:
        raise DataError(
            f"{where}: answer: bytes {offset} to {offset + length} are not in {there}, which has "
            f"{sizes[there]}"
        )
    return json.dumps({"file": str(there), "offset": offset, "length": length})


def read_jsonl(
    path: str | Path, *, keys: Sequence[str], optional: Sequence[str] = ()
) -> list[tuple[int, dict[str, Any]]]:
    """Read a JSONL file of objects whose named values are text.

    Args:
        path: file in UTF-8; blank lines are skipped.
        keys: required in every object, each a string that is not empty.
        optional: strings where present.

    Returns:
        (line number from 1, object) for every line that is not blank.

    Raises:
        DataError: names the file, the line and the rule it breaks.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}:{number}: not valid JSON: {error.msg} (column {error.colno})"
            ) from None
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: not valid UTF-8: {error.reason}") from None
        _check(row, keys, optional, where=f"{path}:{number}")
        rows.append((number, row))
    return rows


def _check(row: Any, keys: Sequence[str], optional: Sequence[str], *, where: str) -> None:
    if not isinstance(row, dict):
        raise DataError(f"{where}: needs a JSON object, not {_shown(row)}")
    for key in keys:
        if key not in row:
            raise DataError(f"{where}: key {key!r} is missing; it has {', '.join(row) or 'none'}")
    for key in (*keys, *(key for key in optional if key in row)):
        if not isinstance(row[key], str):
            raise DataError(f"{where}: {key} ({_shown(row[key])}) must be a string")
        if key in keys and not row[key].strip():
            raise DataError(f"{where}: {key} is empty")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def encode_prompt(
    text: str, tokenizer: PreTrainedTokenizerBase, *, chat_template: bool
) -> tuple[int, ...]:
    """Tokens of a prompt as the model sees it, special tokens and template included."""
    if chat_template:
        # The template writes every special token itself.
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    return tuple(tokenizer(text, add_special_tokens=not chat_template)["input_ids"])
