"""tools/plan.py: what it prints, what it refuses, what it returns."""

import pytest

from gapo_tools import plan as tool
from tests.formats.test_convert_models import CONFIGS
from tests.scaling_setup import write_model

SMALL = CONFIGS["Qwen2.5-1.5B"]
pytestmark = pytest.mark.usefixtures("clone")  # not the models of the checkout
CONFIG = "configs/qwen_math_1_5b/gapo.toml"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("models") / "Qwen2.5-Math-1.5B"
    write_model(folder, SMALL)
    return f"model.hf_dir={folder}"


def test_layouts_memory_and_overrides_are_printed(model, capsys, monkeypatch):
    """Overrides may follow options."""
    monkeypatch.setenv("COLUMNS", "250")
    stages = ["parallel.pipeline_model_parallel_size=4"]
    stages += ["parallel.num_layers_in_last_pipeline_stage=4"]
    assert tool.main([CONFIG, "--nodes", "2", model, *stages]) == 0
    out = capsys.readouterr().out
    shown = ("16 x h200", "yours", "4, unequal", "kv cache", "1,531", "do not run", "Remove num_")
    for words in (*shown, " parallel.tensor_model_parallel_size="):
        assert words in out


def test_nothing_fits(tmp_path, capsys):
    write_model(tmp_path / "big", CONFIGS["Qwen2.5-72B"])
    command = [CONFIG, f"model.hf_dir={tmp_path / 'big'}", "--gpu", "h100", "--gpus-per-node", "1"]
    assert tool.main(command) == 1
    out = capsys.readouterr().out
    assert "more nodes" in out
    assert "out of memory" in out


@pytest.mark.parametrize(
    ("fields", "words"),
    [(None, ("model.hf_dir", "hf download")), ({"hidden_act": "gelu"}, ("hidden_act",))],
)
def test_a_model_that_cannot_be_planned(tmp_path, capsys, fields, words):
    if fields:
        write_model(tmp_path / "model", SMALL | fields)
    assert tool.main([CONFIG, f"model.hf_dir={tmp_path / 'model'}"]) == 1
    captured = capsys.readouterr()
    assert all(word in captured.err for word in words)
    assert "more nodes" not in captured.out


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], "CONFIG"),
        (["run.seed=1"], "CONFIG comes first"),
        ([CONFIG, "--nodes", "-4"], "'-4' must be a whole number of 1 or more"),
        (["measure", "x"], "--gpu"),
        (["measure", "--gpu", "h20"], "RUN"),
        (["measure", "x", "y", "--gpu", "h20"], "--output"),
        (["measure", "x", "--gpu", "h20", "--nodes", "2"], "--nodes"),
    ],
)
def test_wrong_usage(command, words, capsys):
    with pytest.raises(SystemExit) as ended:
        tool.main(command)
    assert ended.value.code == 2
    # The usage, which stands before the error, names all options.
    assert words in capsys.readouterr().err.rpartition("error:")[2]
