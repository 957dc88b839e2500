"""The two conversion tools as a user has them, and a model folder with all that belongs to one."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from gapo_tools import convert_hf_to_megatron, convert_megatron_to_hf
from tests.distributed.conversion_setup import VOCAB_SIZE, save_model

TOOLS = Path(__file__).parents[1] / "tools"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


class Done(NamedTuple):
    """What a tool that has ended said."""

    exit_code: int
    out: str
    err: str


def _run(tool: ModuleType, *arguments: Any) -> Done:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            exit_code = tool.main(list(map(str, arguments)))
        except SystemExit as end:  # argparse
            exit_code = end.code
    return Done(exit_code, out.getvalue(), err.getvalue())


def succeeded(done: Done) -> Done:
    assert done.exit_code == 0, done.err
    return done


def to_megatron(hf_dir: Path, output: Path, *options: Any) -> Done:
    return _run(convert_hf_to_megatron, "--hf", hf_dir, "--megatron", output, *options)


def to_hf(megatron_dir: Path, output: Path, *options: Any) -> Done:
    return _run(convert_megatron_to_hf, "--megatron", megatron_dir, "--hf", output, *options)


def save_model_with_tokenizer(folder: Path, name: str, **changes: Any) -> None:
    """See `save_model`; a token is a character, and most of them are unknown."""
    save_model(folder, name, **changes)
    characters = "\n ()*+-/0123456789:=?<>,.'abcdefghijklmnopqrstuvwxyz"
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<eos>", *characters])}
    assert len(vocabulary) <= VOCAB_SIZE
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("[\\s\\S]"), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    (folder / "README.md").write_text("what the model is\n")


def leftovers(folder: Path) -> list[str]:
    """Temporary folders and locks."""
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def set_field(config: Path, **fields: Any) -> None:
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def assert_refused(done: Done, output: Path, *said: str, exit_code: int | None = None) -> None:
    """Not 0, every word said in one line, and nothing where the output would be."""
    assert done.exit_code == exit_code or (exit_code is None and done.exit_code in (1, 2)), done
    errors = [line for line in done.err.splitlines() if "error: " in line]
    assert len(errors) == 1 and "Traceback" not in done.err, done.err
    for word in said:
        assert word in errors[0]
    assert not output.exists()
    assert leftovers(output.parent) == []
