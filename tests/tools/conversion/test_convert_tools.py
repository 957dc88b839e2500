"""The conversion tools, as a user runs them: what they make, keep, say, and refuse."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from gapo_megatron import checkpoint
from gapo_megatron.errors import ConfigError, ConversionError
from gapo_megatron.formats.manifest import read_manifest
from gapo_megatron.formats.weights import read_hf
from gapo_megatron.policy import Policy, destroy, initialize
from gapo_megatron.policy.load import check_megatron_dir
from gapo_megatron.policy.model import read_hf_config
from tests.attempt_setup import make_attempt
from tests.convert_tools_setup import (
    CHAT_TEMPLATE,
    assert_refused,
    leftovers,
    save_model_with_tokenizer,
    set_field,
    succeeded,
    to_hf,
    to_megatron,
)
from tests.damage import TRAPS, sign, sign_document, trap_object
from tests.dist import single_rank
from tests.distributed.checkpoint_setup import make_state
from tests.distributed.policy_setup import make_config, read_weights
from tests.messages import mentions

MODELS = ("qwen2", "qwen3_moe")
CARRIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "README.md",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model, and (NAME-megatron) what the tool makes of it."""
    path: Path = tmp_path_factory.mktemp("models")
    for name in MODELS:
        save_model_with_tokenizer(path / name, name)
        done = succeeded(to_megatron(path / name, path / f"{name}-megatron", "--verify", "full"))
        (path / f"{name}.txt").write_text(done.out)
    return path


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name], tensor), name


def weights(folder: Path) -> dict[str, Tensor]:
    return dict(read_hf(folder))


# --- what they make ------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "num_parameters"), [("qwen2", 31), ("qwen3_moe", 63)])
def test_a_round_trip_changes_no_bit(root, tmp_path, name, num_parameters):
    done = to_hf(root / f"{name}-megatron", tmp_path / "back", "--verify", "full")
    assert (done.exit_code, done.err) == (0, "")
    assert_equal(weights(tmp_path / "back"), weights(root / name))
    for out in (done.out, (root / f"{name}.txt").read_text()):
        assert re.search(mentions("round trip", num_parameters), out)
        assert "not compared" not in out
        assert "100%" in out
    assert f"vllm serve {tmp_path / 'back'}" in done.out
    for file in CARRIED:
        assert (tmp_path / "back" / file).read_bytes() == (root / name / file).read_bytes(), file
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    assert AutoTokenizer.from_pretrained(tmp_path / "back").chat_template == CHAT_TEMPLATE
    assert leftovers(tmp_path) == leftovers(root) == []


def test_a_folder_says_what_it_was_made_of_and_hands_that_to_nobody(root, tmp_path):
    succeeded(to_hf(root / "qwen2-megatron", tmp_path / "back"))
    said = json.loads((tmp_path / "back" / "conversion.json").read_text())
    assert said["source"] == str(root / "qwen2-megatron" / "release")
    assert said["dtypes"] == ["float32"]
    assert list(said["checks"]) == [
        *("config", "record", "files", "accounting", "round trip", "logits")
    ]
    assert "manifest.json" in said["checks"]["files"]  # there is none
    assert re.search(mentions(24, 7, "--verify full"), said["checks"]["round trip"])  # of 31
    succeeded(to_megatron(tmp_path / "back", tmp_path / "again", "--verify", "none"))
    assert not (tmp_path / "again" / "hf" / "conversion.json").exists()
    said = json.loads((tmp_path / "again" / "conversion.json").read_text())
    assert "--verify none" in said["checks"]["logits"] == said["checks"]["round trip"]


def test_dtype(root, tmp_path):
    expected = {
        dtype: {key: tensor.to(dtype) for key, tensor in weights(root / "qwen2").items()}
        for dtype in (torch.bfloat16, torch.float16)
    }
    option = ("--dtype", "bf16", "--verify", "full")
    succeeded(to_megatron(root / "qwen2", tmp_path / "half", *option))
    succeeded(to_hf(tmp_path / "half", tmp_path / "back"))
    assert_equal(weights(tmp_path / "back"), expected[torch.bfloat16])
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    option = ("--dtype", "fp16", "--verify", "full")
    succeeded(to_hf(root / "qwen2-megatron", tmp_path / "cast", *option))
    assert_equal(weights(tmp_path / "cast"), expected[torch.float16])
    # Again, from a folder that holds these: nothing is rounded.
    succeeded(to_megatron(tmp_path / "back", tmp_path / "again", "--verify", "full"))
    succeeded(to_hf(tmp_path / "again", tmp_path / "same", "--verify", "full"))
    assert_equal(weights(tmp_path / "same"), expected[torch.bfloat16])


# --- what they take ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run with a checkpoint after step 3; its weights are twice the model's."""
    path: Path = tmp_path_factory.mktemp("run")
    config = make_config(root / "qwen2")
    with single_rank():
        groups = initialize(config.parallel)
        policy = Policy.build(config, groups, "cpu")
        policy.load_hf_weights((name, 2 * t) for name, t in read_weights(root / "qwen2"))
        attempt = make_attempt(path)
        checkpoint.save(
            path,
            make_state(3),
            policy=policy,
            config=config,
            attempt=attempt,
        )
        destroy()
    return path


@pytest.mark.parametrize("place", [".", "checkpoints"])
def test_a_training_run_becomes_a_model(root, tmp_path, run_dir, place):
    done = succeeded(to_hf(run_dir / place, tmp_path / "out", "--verify", "full"))
    assert re.search(r"files .*SHA-256.*manifest.json", done.out)
    expected = {name: 2 * tensor for name, tensor in weights(root / "qwen2").items()}
    assert_equal(weights(tmp_path / "out"), expected)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == CHAT_TEMPLATE


def test_the_model_of_a_run_names_what_ended_responses(root, tmp_path, run_dir):
    """Of a base model, whose files name the end of a document and not that of a turn."""
    source = shutil.copytree(run_dir / "checkpoints/step_00000003", tmp_path / "step_00000003")
    sign_document(source, lambda whole: whole["config"]["data"].update(end_tokens=[">"]))
    succeeded(to_hf(source, tmp_path / "out", "--verify", "none"))
    stated = json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"]
    before = json.loads((root / "qwen2/generation_config.json").read_text()).get("eos_token_id")
    turn = AutoTokenizer.from_pretrained(tmp_path / "out").encode(">")
    assert stated == [*([] if before is None else [before]), *turn]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "rng_00000.pt"])
def test_a_flipped_bit_of_a_training_run_is_refused(root, tmp_path, run_dir, name):
    source = shutil.copytree(run_dir / "checkpoints/step_00000003", tmp_path / "step_00000003")
    whole = (source / name).read_bytes()
    content = bytearray(whole)
    content[len(whole) // 2] ^= 4
    (source / name).write_bytes(content)
    assert_refused(to_hf(source, tmp_path / "out", "--verify", "none"), tmp_path / "out", name)
    with pytest.raises((ConfigError, ConversionError), match=mentions(source / name)):
        load_from(source, root)
    (source / name).write_bytes(whole)
    # What the manifest does not list has no digest.
    sign_document(source, lambda document: document["files"].pop(name))
    if name == "rng_00000.pt":  # nobody reads it
        succeeded(to_hf(source, tmp_path / "out", "--verify", "none"))
    else:
        assert_refused(to_hf(source, tmp_path / "out"), tmp_path / "out", name, "manifest.json")


def load_from(megatron_dir: Path, root: Path) -> int:
    """What training does with `model.megatron_dir`; the bytes whose digest it has told of."""
    told: list[int] = []
    config = make_config(root / "qwen2")
    model = config.model.model_copy(update={"megatron_dir": str(megatron_dir)})
    config = config.model_copy(update={"model": model})
    check_megatron_dir(config, read_hf_config(config.model.hf_dir))
    with single_rank():
        policy = Policy.build(config, initialize(config.parallel), "cpu")
        try:
            policy.load_initial_weights(on_bytes=told.append)
        finally:
            destroy()
    return sum(told)


def test_training_says_that_a_folder_has_no_digests(root, tmp_path, run_dir, caplog):
    newest = max((run_dir / "checkpoints").glob("step_*"))
    files = read_manifest(newest).files.values()
    assert load_from(run_dir, root) == sum(entry.num_bytes for entry in files)
    assert "manifest.json" not in caplog.text
    load_from(root / "qwen2-megatron", root)
    assert re.search(mentions(root / "qwen2-megatron/release", "manifest.json"), caplog.text)


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.__name__)
@pytest.mark.parametrize("of", ["run", "tool"])
def test_a_pickle_that_would_run_something_is_refused(root, tmp_path, run_dir, trap, of):
    folder = run_dir / "checkpoints/step_00000003" if of == "run" else root / "qwen2-megatron"
    source = shutil.copytree(folder, tmp_path / "step_00000003")
    where, trace = source if of == "run" else source / "release", tmp_path / "trace"
    name = trap(where, trace)
    if of == "run":
        sign(where)
    hf_config = ("--hf-config", root / "qwen2", "--verify", "none")
    done = to_hf(source, tmp_path / "out", *hf_config)
    if trap is trap_object:  # of no use to a model's weights: never read
        assert done.exit_code == 0, done.err
        load_from(source, root)
    else:
        assert_refused(done, tmp_path / "out", name, "mkdir")
        with pytest.raises(ConfigError, match=mentions(where / name, "mkdir", "megatron_dir")):
            load_from(source, root)
    assert not trace.exists()


def test_a_folder_of_megatron_lm_needs_a_config(root, tmp_path, run_dir):
    (tmp_path / "lm").mkdir()
    (tmp_path / "lm" / "latest_checkpointed_iteration.txt").write_text("100\n")
    iteration = tmp_path / "lm" / "iter_0000100"
    shutil.copytree(root / "qwen2-megatron" / "release", iteration)
    done = to_hf(tmp_path / "lm", tmp_path / "out")
    assert done.exit_code == 2
    assert re.search(mentions(iteration, "config.json", "--hf-config"), done.err)
    options = ("--hf-config", root / "qwen2")
    done = succeeded(to_hf(tmp_path / "lm", tmp_path / "out", *options))
    assert str(iteration / "common.pt") in done.out
    assert_equal(weights(tmp_path / "out"), weights(root / "qwen2"))
    # Nothing that says what it holds.
    common = torch.load(iteration / "common.pt", weights_only=False)
    torch.save({name: common[name] for name in common if name != "args"}, iteration / "common.pt")
    done = succeeded(to_hf(iteration, tmp_path / "out", *options, "--overwrite"))
    assert "common.pt" not in done.out and "config.json unchecked" in done.out


def test_rows_that_the_config_does_not_count_are_left_out_and_said(root, tmp_path):
    shutil.copytree(root / "qwen2-megatron" / "release", tmp_path / "padded")
    shutil.copytree(root / "qwen2", tmp_path / "config", ignore=shutil.ignore_patterns("*token*"))
    set_field(tmp_path / "config" / "config.json", vocab_size=59)
    options = ("--hf-config", tmp_path / "config", "--verify", "full")
    done = succeeded(to_hf(tmp_path / "padded", tmp_path / "out", *options))
    assert "2 rows" in done.out and "59" in done.out
    before, after = weights(root / "qwen2"), weights(tmp_path / "out")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        before[name] = before[name][:59]
    assert_equal(after, before)


# --- what they say of a mistake ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--max-shard-size", "5"), ("--max-shard-size", "'5'", "5GB")),
        (("--dtype", "int8"), ("--dtype", "'int8'")),
        (("--hf-config", "nowhere"), ("--hf-config", "nowhere")),
    ],
)
def test_a_wrong_option_is_named(root, tmp_path, options, said):
    assert_refused(
        to_hf(root / "qwen2-megatron", tmp_path / "out", *options), tmp_path / "out", *said
    )


def test_a_wrong_folder_is_named(root, tmp_path, monkeypatch):
    nowhere, output = tmp_path / "nowhere", tmp_path / "out"
    with monkeypatch.context() as before:  # seconds of imports
        before.setitem(sys.modules, "gapo_tools.conversion.directions", None)
        assert_refused(to_megatron(nowhere, output), output, str(nowhere), "--hf", exit_code=2)
        assert_refused(to_hf(nowhere, output), output, str(nowhere), "--megatron", exit_code=2)
    megatron = shutil.copytree(root / "qwen2-megatron", tmp_path / "megatron")
    for inside in (megatron, megatron / "hf", tmp_path):
        done = to_hf(megatron, inside, "--overwrite")
        assert done.exit_code == 2
        assert re.search(mentions(inside, megatron, "source"), done.err)
    (tmp_path / "file").write_text("")
    done = to_hf(megatron, tmp_path / "file", "--overwrite")
    assert (done.exit_code, done.err.count("\n")) == (2, 1)
    assert f"{tmp_path / 'file'} is a file" in done.err
    done = to_hf(megatron, tmp_path / "file" / "out")
    assert done.exit_code == 2
    assert f"{tmp_path / 'file'}: File exists" in done.err
    assert weights(root / "qwen2") and (megatron / "release" / ".metadata").exists()


def test_what_training_has_saved_into_a_converted_folder_is_not_replaced(root, tmp_path):
    output, again = tmp_path / "out", ("--verify", "none", "--overwrite")
    for _ in range(2):
        succeeded(to_megatron(root / "qwen2", output, *again))
    tracker = output / "latest_checkpointed_iteration.txt"
    shutil.copytree(output / "release", output / "iter_0001000")
    tracker.write_text("1000\n")
    for in_the_way in (output / "iter_0001000", tracker):
        done = to_megatron(root / "qwen2", output, *again)
        assert done.exit_code == 2 and re.search(mentions(output, in_the_way.name), done.err)
        assert (output / "release").exists() and in_the_way.exists()
        in_the_way.rename(tmp_path / in_the_way.name)
    succeeded(to_megatron(root / "qwen2", output, *again))


def test_a_copy_of_an_output_is_not_replaced(root, tmp_path):
    """Its report says what it was made from, and not that it was made there."""
    megatron = shutil.copytree(root / "qwen2-megatron", tmp_path / "megatron")
    succeeded(to_hf(root / "qwen2-megatron", tmp_path / "made", "--verify", "none"))
    hf = shutil.copytree(tmp_path / "made", tmp_path / "hf")
    for convert, source, output in (
        (to_megatron, root / "qwen2", megatron),
        (to_hf, root / "qwen2-megatron", hf),
    ):
        done = convert(source, output, "--verify", "none", "--overwrite")
        assert done.exit_code == 2 and re.search(mentions(output, ".gapo_megatron.json"), done.err)
        assert (output / "conversion.json").exists()


def test_a_config_of_another_model_is_refused(root, tmp_path, run_dir):
    other = tmp_path / "other"
    other.mkdir()
    shutil.copyfile(root / "qwen2" / "config.json", other / "config.json")
    rope = {"rope_theta": 1e6, "rope_type": "default"}
    set_field(other / "config.json", rope_parameters=rope, rms_norm_eps=1e-5)
    done = to_hf(run_dir, tmp_path / "out", "--hf-config", other)
    assert_refused(
        done,
        tmp_path / "out",
        *("manifest.json", "config.json", "rms_norm_eps", "1e-06", "1e-05"),
        *("rope_theta", " 10000.0", " 1000000.0"),
        exit_code=1,
    )
