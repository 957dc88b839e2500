"""Model folders: what is damaged is named before anything is made of it, and no code is run."""

from __future__ import annotations

import builtins
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from gapo_megatron.config import Config, DataConfig, parse_config
from gapo_megatron.data.end_tokens import find_end_tokens
from gapo_megatron.data.schema import encode_prompt
from gapo_megatron.data.tokenizer import load_tokenizer
from gapo_megatron.errors import ConfigError, ConversionError, GapoError
from gapo_megatron.formats import model_folder
from gapo_megatron.formats.headers import read_header, read_headers
from gapo_megatron.formats.model_folder import check_model_folder, end_tokens, non_weight_files
from gapo_megatron.formats.weights import HfFolder, carry_over, read_hf
from gapo_megatron.models.checks import num_experts
from gapo_megatron.policy.model import read_hf_config
from gapo_megatron.run.supervised import _read_examples
from gapo_megatron.sft import train_supervised
from gapo_megatron.train import check_before_imports
from gapo_megatron.types import Prompt
from gapo_tools.demonstration import demo_task as arithmetic
from gapo_tools.dry_run.command import print_dry_run
from gapo_tools.planner.flops import Shape
from tests.convert_setup import make_config
from tests.convert_tools_setup import assert_refused, to_hf, to_megatron
from tests.messages import mentions
from tests.problem_files import read_problems
from tests.tokenizers import byte_level

ROOT = Path(__file__).parents[2]
VOCAB_SIZE = 24  # a few more than there are tokens, as in most models


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with every file that a tokenizer may have."""
    folder: Path = tmp_path_factory.mktemp("whole")
    arithmetic.write_tokenizer(["1+2=3>45", "67890+"], folder)
    torch.manual_seed(0)
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            eos_token_id=1,
        )
    ).save_pretrained(folder)
    padding = {"content": "<pad>", "lstrip": False, "normalized": False, "rstrip": False}
    change(folder / "tokenizer_config.json", added_tokens_decoder={"0": padding})
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": padding}))
    (folder / "added_tokens.json").write_text(json.dumps({"<pad>": 0}))
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    check_model_folder(folder)
    load_tokenizer(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(whole, tmp_path / "model")


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def config_of(folder: Path, **sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "run": {"output_dir": str(folder.parent / "out"), "num_steps": 1},
        "model": {"hf_dir": str(folder), "precision": "fp32"},
        "data": {"train_path": "train.jsonl", "max_prompt_tokens": 6},
        "rollout": {"max_response_tokens": 6},
        "reward": {"kind": "exact"},
        "batch": {"max_tokens_per_microbatch": 32},
    }
    return parse_config(tree | sections, source="test")


def train(folder: Path) -> None:
    check_before_imports(config_of(folder))


def warm_start(folder: Path) -> None:
    settings = {"initial_hf_dir": str(folder), "train_path": "lines.jsonl", "num_steps": 1}
    model = {"hf_dir": str(folder.parent / "out"), "precision": "fp32"}
    train_supervised(config_of(folder, model=model, supervised=settings))


def dry_run(folder: Path) -> None:
    print_dry_run(config_of(folder), world_size=1)


def convert(folder: Path) -> None:
    done = to_megatron(folder, folder.parent / "out")
    if done.exit_code:
        assert "Traceback" not in done.err
        raise ConversionError(done.err)


ENTRIES: list[Callable[[Path], None]] = [train, warm_start, dry_run, convert]


# --- config.json and generation_config.json ------------------------------------------------------

NOT_OBJECTS = [
    b"{",
    b"[]",
    b'{"eos_token_id": NaN}',
    b'{"eos_token_id": 1, "eos_token_id": 2}',
    b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"a": "\xff"}',
]


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
)
def test_what_is_no_json_object_is_refused(folder: Path, name: str) -> None:
    for content in NOT_OBJECTS:
        (folder / name).write_bytes(content)
        with pytest.raises(ConfigError, match=mentions("model.hf_dir", folder / name)):
            train(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_what_is_no_file_is_refused_and_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ConfigError, match=mentions(folder / name, "regular file")):
        check_model_folder(folder)


def test_what_nobody_reads_is_neither_looked_at_nor_carried(folder: Path) -> None:
    before = non_weight_files(folder)
    for name in ("pytorch_model.bin", "README.md"):
        (folder / name).symlink_to(folder.parent / "blob")
    os.mkfifo(folder / ".lock")
    train(folder)
    assert non_weight_files(folder) == before
    target = folder.parent / "carried"
    target.mkdir()
    carry_over(folder, target)
    assert {path.name for path in target.iterdir()} == {path.name for path in before}


@pytest.mark.parametrize("look", ENTRIES)
def test_an_adapter_beside_the_weights_is_refused(
    folder: Path, look: Callable[[Path], None]
) -> None:
    # As peft leaves it: of a model that was loaded with its adapter, it saves both.
    LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM").save_pretrained(folder)
    with pytest.raises(GapoError, match=mentions(folder / "adapter_config.json", "merge")):
        look(folder)


def test_chat_templates_by_name_are_carried(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    tokenizer.save_pretrained(folder)
    target = folder.parent / "carried"
    target.mkdir()
    carry_over(folder, target)
    assert load_tokenizer(target).chat_template == tokenizer.chat_template
    (path,) = folder.glob("*/*.jinja")
    path.write_text("x" * (model_folder.MAX_TEMPLATE_CHARACTERS + 1))
    with pytest.raises(ConfigError, match=mentions(path)):
        check_model_folder(folder)


@pytest.mark.parametrize(
    ("stated", "given", "written"),
    [
        ({"eos_token_id": 1, "top_k": 5}, (3, 2, 1), {"eos_token_id": [1, 2, 3], "top_k": 5}),
        ({"eos_token_id": [3, 2]}, (2,), {"eos_token_id": [3, 2]}),
        ({}, (2,), {"eos_token_id": [2]}),
        (None, (1,), None),  # config.json, which readers then use, names it
        (None, (2, 1), {"eos_token_id": [1, 2], "bos_token_id": 4, "pad_token_id": 0}),
    ],
)
def test_an_exported_model_names_what_ends_its_responses(
    folder: Path, stated: Any, given: tuple[int, ...], written: Any
) -> None:
    path, target = folder / "generation_config.json", folder.parent / "carried"
    path.unlink()
    if stated is not None:
        path.write_text(json.dumps(stated))
    change(folder / "config.json", bos_token_id=4, pad_token_id=0)
    target.mkdir()
    carry_over(folder, target, end_tokens=given)
    copy = target / path.name
    assert (json.loads(copy.read_text()) if copy.exists() else None) == written


def test_a_folder_is_named_by_its_own_setting_and_once(folder: Path) -> None:
    facts = check_model_folder(folder)
    change(folder / "tokenizer.json", normalizer=5)
    with pytest.raises(ConfigError, match=mentions("--model", folder)) as caught:
        load_tokenizer(folder, field="--model")
    assert str(caught.value).count(str(folder)) == 1 and "hf_dir" not in str(caught.value)
    for name in model_folder.VOCABULARY_FILES:
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=mentions("--model", folder, "tokenizer.json")) as caught:
        load_tokenizer(folder, field="--model", facts=facts)
    assert str(caught.value).count(str(folder)) == 1


@pytest.mark.parametrize(
    ("name", "field", "value", "shown"),
    [
        ("config.json", "eos_token_id", VOCAB_SIZE, VOCAB_SIZE),
        ("config.json", "pad_token_id", -2, -2),
        ("generation_config.json", "eos_token_id", [1, 10**30], 10**30),
        ("config.json", "eos_token_id", "1", "'1'"),
        ("config.json", "eos_token_id", True, "True"),
        ("config.json", "eos_token_id", [[1]], "[1]"),
    ],
)
def test_tokens_that_the_model_does_not_have(
    folder: Path, name: str, field: str, value: Any, shown: Any
) -> None:
    change(folder / name, **{field: value})
    with pytest.raises(ConfigError, match=mentions(folder / name, field, shown)):
        check_model_folder(folder)


@pytest.mark.parametrize("field", ["is_encoder_decoder", "add_cross_attention"])
@pytest.mark.parametrize("value", [True, None])
def test_a_model_that_is_no_decoder_alone(folder: Path, field: str, value: Any) -> None:
    change(folder / "config.json", **{field: False})
    check_model_folder(folder)
    change(folder / "config.json", **{field: value})
    with pytest.raises(ConfigError, match=mentions("config.json", field, json.dumps(value))):
        check_model_folder(folder)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_is_no_book(folder: Path, name: str) -> None:
    most = model_folder.MAX_TEMPLATE_CHARACTERS
    with pytest.raises(ConfigError, match=mentions(_CONFIG, "chat_template", "default")):
        change(folder / _CONFIG, chat_template=[{"name": "default"}])
        check_model_folder(folder)
    change(folder / _CONFIG, chat_template=None)
    for size in (most, most + 1):
        if name == "tokenizer_config.json":
            change(folder / name, chat_template="x" * size)
        else:
            (folder / name).write_text("x" * size)
        if size == most:
            check_model_folder(folder)
    with pytest.raises(ConfigError, match=mentions(name, str(most))):
        check_model_folder(folder)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": None}, ["architectures"]),
        ({"architectures": 7}, ["architectures", 7]),
        ({"dtype": "float33"}, ["dtype", "float33", "bfloat16"]),
        ({"torch_dtype": {"a": "float32"}}, ["torch_dtype", "float32"]),
        ({"vocab_size": 0}, ["vocab_size (0)"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers (1000000000)"]),
        ({"num_experts": "8"}, ['num_experts ("8")']),
        ({"head_dim": 15}, ["head_dim (15)", "even"]),
        ({"rms_norm_eps": 1e300}, ["rms_norm_eps (1e+300)"]),
        ({"rope_parameters": None, "rope_theta": 1e308 * 10}, ["1e999"]),
        ({"configuration_files": ["config.5.0.0.json"]}, ["configuration_files"]),
        # Not wrong alone, but of another model than the weights.
        ({"intermediate_size": 64}, ["intermediate_size", 64, "gate_proj"]),
        ({"num_hidden_layers": 3, "layer_types": None}, ["num_hidden_layers", 3]),
        ({"vocab_size": 32}, ["vocab_size", 32, "embed_tokens"]),
    ],
)
def test_a_config_that_would_end_late(
    folder: Path, fields: dict[str, Any], named: list[object]
) -> None:
    text = json.dumps(json.loads((folder / "config.json").read_text()) | fields)
    (folder / "config.json").write_text(text.replace("Infinity", "1e999"))
    with pytest.raises(ConfigError, match=mentions("model.hf_dir", folder / "config.json", *named)):
        train(folder)


def test_experts_that_a_dense_model_names_are_none(folder: Path) -> None:
    change(folder / "config.json", num_experts=8, num_experts_per_tok=2)
    train(folder)
    for hf_config in (check_model_folder(folder), read_hf_config(str(folder))):
        assert num_experts(hf_config) is None
        assert Shape.of(hf_config).num_experts == 0


def test_more_experts_for_a_token_than_there_are(folder: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 8}
    named = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    change(folder / "config.json", **named, **experts)
    with pytest.raises(ConfigError, match=mentions("num_experts_per_tok (8)", "num_experts (4)")):
        check_model_folder(folder)


# --- tokenizer -----------------------------------------------------------------------------------

_CONFIG, _MAIN = "tokenizer_config.json", "tokenizer.json"


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        (_CONFIG, "added_tokens_decoder", {"x": {"content": "x"}}),
        (_CONFIG, "added_tokens_decoder", {str(VOCAB_SIZE): {"content": "x"}}),
        (_MAIN, "added_tokens", [{"id": "0", "content": "<pad>"}]),
        (_MAIN, "added_tokens", [{"id": VOCAB_SIZE, "content": "<pad>"}]),
        (_MAIN, "model.vocab", {"a": VOCAB_SIZE}),
        (_MAIN, "model.vocab", {"a": 3, "b": 3}),
        (_MAIN, "model.vocab", [["a", 0.0]] * (VOCAB_SIZE + 1)),
        ("added_tokens.json", "", {"<pad>": VOCAB_SIZE}),
        (_CONFIG, "fast_tokenizer_files", ["../tokenizer.4.0.0.json"]),
    ],
)
def test_what_the_library_would_read_otherwise_is_refused(
    folder: Path, name: str, field: str, value: Any
) -> None:
    if field == "model.vocab":
        model = json.loads((folder / name).read_text())["model"]
        change(folder / name, model=model | {"vocab": value})
    else:
        change(folder / name, **({field: value} if field else value))
    for look in (train, load_tokenizer):
        with pytest.raises(ConfigError, match=mentions("model.hf_dir", folder / name, field)):
            look(folder)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        (_MAIN, {"normalizer": 5}),
        (_MAIN, {"model": []}),
        (_CONFIG, {"eos_token": 5}),
        (_CONFIG, {"tokenizer_class": 5}),
        (_MAIN, {"model": {"type": "BPE", "vocab": {"</s>": 1}, "merges": 5}}),
        (_CONFIG, {"padding_side": "up"}),
        (_CONFIG, {"tokenizer_class": "Trainer"}),
    ],
)
def test_what_only_the_library_can_tell_is_our_error(
    folder: Path, name: str, fields: dict[str, Any]
) -> None:
    change(folder / name, **fields)
    with pytest.raises(ConfigError, match=mentions("model.hf_dir", folder, "tokenizer")):
        load_tokenizer(folder)


IMAGE = "<image_soft_token>"


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    """A folder as Gemma 3's language models have it: the last special token has no row."""
    tokenizer, folder = byte_level("<bos>", IMAGE), tmp_path / "gemma"
    tokenizer.save_pretrained(folder)
    end, image = tokenizer.convert_tokens_to_ids(["<|im_end|>", IMAGE])
    assert image == len(tokenizer) - 1
    config = make_config("gemma3_text", vocab_size=image, eos_token_id=end)
    config.architectures = ["Gemma3ForCausalLM"]
    config.save_pretrained(folder)
    change(folder / _CONFIG, extra_special_tokens={"image_token": IMAGE}, bos_token="<bos>")
    (folder / "added_tokens.json").write_text(json.dumps({IMAGE: image}))
    return folder


def test_a_special_token_that_the_model_lacks_is_refused_where_it_is_used(gemma: Path) -> None:
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(gemma)
    image = tokenizer.convert_tokens_to_ids(IMAGE)
    path = gemma.parent / "rows.jsonl"
    rows = [{"prompt": f"Add {n}.", "answer": "3", "response": "3"} for n in range(3)]
    options: dict[str, Any] = {"tokenizer": tokenizer, "kind": "math"}

    def read() -> list[Prompt]:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read_problems(path, **options)

    def examples() -> object:
        data = DataConfig(train_path="unused")
        return _read_examples(str(path), tokenizer, end=1, data=data, longest=200)

    assert len(read()) == 3 and max(map(max, (one.token_ids for one in read()))) < image
    examples()
    rows[1]["response"] = f"It is {IMAGE}"
    read()
    with pytest.raises(ConfigError, match=mentions(f"{path}:2", "response", IMAGE, image)):
        examples()
    rows[1]["prompt"] += IMAGE
    for look in (read, examples):
        with pytest.raises(ConfigError, match=mentions(f"{path}:2", IMAGE, image)):
            look()
    rows[1]["prompt"] = "Add 1."
    tokenizer.chat_template = f"{IMAGE}{{{{ messages[0].content }}}}"
    with pytest.raises(ConfigError, match=mentions(f"{path}:1", IMAGE, image)):
        options["chat_template"] = True
        read()
    data = DataConfig(train_path="unused", end_tokens=[IMAGE])
    with pytest.raises(ConfigError, match=mentions("data.end_tokens", IMAGE, image)):
        find_end_tokens(tokenizer, data, gemma, vocab_size=image)


@pytest.mark.parametrize("name", ["eos_token", "bos_token", "pad_token"])
@pytest.mark.parametrize("text", [IMAGE, "<new>"])  # the second transformers adds behind the others
def test_a_named_token_that_the_model_lacks_is_refused(gemma: Path, name: str, text: str) -> None:
    change(gemma / _CONFIG, **{name: text})
    with pytest.raises(ConfigError, match=mentions("model.hf_dir", gemma, name, "vocab_size")):
        load_tokenizer(gemma)


def test_an_ordinary_token_that_the_model_lacks_is_refused(gemma: Path) -> None:
    added = json.loads((gemma / _MAIN).read_text())["added_tokens"]
    change(gemma / _MAIN, added_tokens=[one | {"special": False} for one in added])
    with pytest.raises(ConfigError, match=mentions("model.hf_dir", gemma / _MAIN, "added_tokens")):
        load_tokenizer(gemma)


@pytest.mark.parametrize("template", ["{{", "{{ 1 / 0 }}"])
def test_a_template_that_fails_is_our_error(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(folder)
    with pytest.raises(ConfigError, match=mentions(folder, "template")):
        encode_prompt("1+2=", tokenizer, chat_template=True, max_tokens=64)


# --- weights -------------------------------------------------------------------------------------


def rewrite(folder: Path, name: str, tensor: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name: tensor}, file, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn])
@pytest.mark.parametrize("look", ENTRIES)
def test_weights_that_are_no_numbers_of_their_own_are_refused(
    folder: Path, look: Callable[[Path], None], dtype: torch.dtype
) -> None:
    rewrite(folder, "model.norm.weight", torch.ones(32).to(dtype))
    with pytest.raises(GapoError, match=mentions("model.norm.weight", "model.safetensors")):
        look(folder)


def test_a_missing_or_misshapen_tensor_is_named_by_the_header(folder: Path) -> None:
    rewrite(folder, "model.layers.1.self_attn.o_proj.weight", torch.ones(64, 16))
    with pytest.raises(ConfigError, match=mentions("o_proj.weight", "[64, 16]", "[64, 64]")):
        train(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=mentions(folder, "layers.1.self_attn.o_proj.weight")):
        train(folder)


def header_of(content: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header


def with_header(content: bytes, header: dict[str, Any] | bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    rest = content[8 + int.from_bytes(content[:8], "little") :]
    return len(text).to_bytes(8, "little") + text + rest


@pytest.mark.parametrize(
    "damage",
    [
        {"dtype": "F99"},
        {"dtype": {"F32": None}},  # which the library takes
        {"shape": [-32]},
        {"shape": [2**62, 2**62]},
        {"data_offsets": [0, 2**70]},
        {"data_offsets": [0, 128]},  # where another tensor is
        {"more": 1},
        lambda content: content[:-1],
        lambda content: content[:4],
        lambda content: b"\xff" * 8 + content[8:],
        lambda content: with_header(content, b"[]"),
        lambda content: with_header(content, b" " + json.dumps(header_of(content)).encode()),
        lambda content: with_header(content, header_of(content) | {"__metadata__": {"a": 1}}),
        lambda content: with_header(
            content, header_of(content) | {"another": ["F32", [0], [0, 0]]}
        ),
        lambda content: with_header(
            content, json.dumps(header_of(content)).encode()[:-1] + b', "__metadata__": {}}'
        ),
    ],
)
def test_a_damaged_safetensors_file(
    folder: Path, damage: dict[str, Any] | Callable[[bytes], bytes]
) -> None:
    """In what its header says of a tensor, or anywhere."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    if isinstance(damage, dict):
        header = header_of(content)
        header["model.norm.weight"] |= damage
        path.write_bytes(with_header(content, header))
    else:
        path.write_bytes(damage(content))
    with pytest.raises((ConfigError, ConversionError), match=mentions(path)):
        read_header(path)


@pytest.mark.parametrize(
    "file",
    [
        *("../other.safetensors", "/other.safetensors", "..", "weights.bin", "a\0.safetensors", 5),
    ],
)
def test_an_index_names_files_of_the_folder_alone(folder: Path, file: Any) -> None:
    shutil.copy(folder / "model.safetensors", folder.parent / "other.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(folder / "model.safetensors"), file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=mentions("index.json", "in the folder")):
        read_headers(folder)


def test_links_into_a_cache_are_followed(folder: Path) -> None:
    """As the Hugging Face client lays its downloads out."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../blobs/{number}")
    for look in (train, load_tokenizer, read_hf_config):
        look(folder)
    assert len(list(read_hf(folder))) == len(read_headers(folder))


# --- code of a folder ----------------------------------------------------------------------------


@pytest.fixture
def hostile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Names code in every file that may; to be asked about it is as bad as to have it run."""
    (folder / "mine.py").write_text(
        f"open({str(folder.parent / 'trace')!r}, 'w')\n"
        "from transformers import PretrainedConfig, PreTrainedTokenizerFast\n"
        "class Mine(PretrainedConfig): model_type = 'mine'\n"
        "class MineTokenizer(PreTrainedTokenizerFast): pass\n"
    )
    code = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"}
    change(folder / "config.json", auto_map=code)
    change(folder / _CONFIG, auto_map={"AutoTokenizer": ["mine.MineTokenizer"] * 2})
    processor = {"AutoImageProcessor": "mine.Mine"}
    (folder / "preprocessor_config.json").write_text(json.dumps({"auto_map": processor}))

    def asked(prompt: str = "") -> NoReturn:
        raise AssertionError(f"asked: {prompt}")

    monkeypatch.setattr(builtins, "input", asked)
    return folder


@pytest.mark.parametrize("model_type", ["mine", "qwen2"])
@pytest.mark.parametrize("look", [*ENTRIES, load_tokenizer, read_hf_config])
def test_code_of_a_folder_is_neither_run_nor_asked_about(
    hostile: Path, look: Callable[[Path], object], model_type: str
) -> None:
    change(hostile / "config.json", model_type=model_type)
    named = "auto_map" if model_type == "qwen2" else "model_type 'mine'"
    with pytest.raises(GapoError, match=mentions(hostile / "config.json", named)):
        look(hostile)
    assert not (hostile.parent / "trace").exists()
    if look is not read_hf_config:  # which reads no tokenizer
        change(hostile / "config.json", auto_map=None, model_type="qwen2")
        with pytest.raises(GapoError, match=mentions(hostile / _CONFIG, "auto_map")):
            look(hostile)
        assert not (hostile.parent / "trace").exists()


def test_code_that_a_megatron_folder_brings_is_not_run(hostile: Path, whole: Path) -> None:
    megatron, output = hostile.parent / "megatron", hostile.parent / "hf"
    assert to_megatron(whole, megatron, "--verify", "none").exit_code == 0
    shutil.copy(hostile / _CONFIG, megatron / "hf" / _CONFIG)
    assert_refused(to_hf(megatron, output), output, str(megatron / "hf" / _CONFIG), "auto_map")


@pytest.mark.parametrize("chosen", ["AutoImageProcessor", "AutoTokenizer", "RagTokenizer"])
def test_a_class_that_loads_more_than_a_tokenizer_is_refused(hostile: Path, chosen: str) -> None:
    """It would ask about code: transformers does not pass on that none is trusted."""
    change(hostile / "config.json", auto_map=None)
    change(hostile / _CONFIG, auto_map=None, tokenizer_class=chosen)
    with pytest.raises(ConfigError, match=mentions(hostile / _CONFIG, "tokenizer_class", chosen)):
        load_tokenizer(hostile)
    assert not (hostile.parent / "trace").exists()


def test_end_tokens_are_of_both_files(folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=[3, 2], pad_token_id=-1)
    check_model_folder(folder)
    assert end_tokens(folder, VOCAB_SIZE) == {
        "generation_config.json": (3, 2),
        "config.json": (1,),
    }


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_refused(folder: Path, value: float) -> None:
    weight = torch.ones(32)
    weight[-1] = value
    rewrite(folder, "model.norm.weight", weight)
    named = mentions("model.norm.weight", folder / "model.safetensors", f"holds {value}")
    with pytest.raises(ConversionError, match=named):
        list(read_hf(folder))
    assert not HfFolder(folder).read("model.norm.weight").isfinite().all()  # a copy is a copy
