"""tools/plan.py: what it prints, what it refuses, what it returns."""

import json
from collections import Counter
from typing import Any

import pytest

from gapo_megatron.ops.plan import planner
from tests.hf.test_convert_models import CONFIGS
from tests.scaling_setup import write_model
from tools import plan as tool

SMALL = CONFIGS["Qwen2.5-1.5B"]
pytestmark = pytest.mark.usefixtures("clone")  # not the models of the checkout
CONFIG = "configs/qwen_math_1_5b/gapo.toml"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("models") / "Qwen2.5-Math-1.5B"
    write_model(folder, SMALL)
    return f"model.hf_dir={folder}"


def test_tables(model, capsys):
    """Overrides may follow options."""
    assert tool.main([CONFIG, "--nodes", "2", model, "--top", "3"]) == 0
    out = capsys.readouterr().out
    for shown in ("16 x h200", "yours", " parallel.tensor_model_parallel_size=", "1,531"):
        assert shown in out


@pytest.fixture(autouse=True)
def no_width_of_the_shell(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


def cells_of(text: str) -> Counter[str]:
    """How often each cell is in the tables that were printed."""
    rows = [line.strip("│").split("│") for line in text.splitlines() if line.startswith("│")]
    return Counter(cell.strip() for row in rows for cell in row)


def test_no_figure_is_cut_at_any_width(capsys, monkeypatch):
    config = "configs/qwen3_30b_a3b/h100_8k.toml"
    options = ["--nodes", "4", "--max-staleness", "1"]

    def printed() -> tuple[str, str]:
        assert tool.main([config, *options, "--gpu", "h100", "--top", "2"]) in (0, 1)
        out = capsys.readouterr().out
        return out, out.split("\nLayouts that do not run")[0]  # the rest is text, which folds

    real, results = planner.plan, []

    def plan_once(*arguments: Any, **settings: Any) -> planner.Plan:
        if not results:  # seconds, and the same at every width
            results.append(real(*arguments, **settings))
        return results[0]

    monkeypatch.setattr(planner, "plan", plan_once)
    expected = cells_of(printed()[1])
    assert sum(expected.values()) > 70
    rows = {"", "1", "2", "s1", "s2", "yours", "yours *"}  # of a row's name, a copy in each block
    for columns in (40, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        narrow, tables = printed()
        assert "…" not in narrow
        assert max(map(len, tables.splitlines()[1:])) <= columns
        cells = cells_of(tables)
        for cell, number in expected.items():
            assert cells[cell] >= number if cell in rows else cells[cell] == number, cell


def test_a_configs_own_virtual_stages(model, capsys):
    cut = ["pipeline_model_parallel_size=4", "virtual_pipeline_model_parallel_size=2"]
    cut += ["num_layers_in_last_pipeline_stage=4"]
    overrides = [f"parallel.{setting}" for setting in cut]
    assert tool.main([CONFIG, model, *overrides, "--top", "1"]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if "4 x 2, unequal" in line]
    assert "yours" in line
    assert " parallel.num_layers_in_last_pipeline_stage " in out.splitlines()[-1]
    assert " parallel.virtual_pipeline_model_parallel_size=1 " in out


def test_json_is_all_that_is_printed(model, capsys):
    command = [CONFIG, model, "--json", "--gpu", "h100", "--mean-response-tokens", "500"]
    assert tool.main(command) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["gpu"]["name"], values["num_gpus"]) == ("h100", 8)
    assert values["workload"]["mean_response_tokens"] == 500
    assert len(values["layouts"]) == 5


def test_nothing_fits(tmp_path, capsys):
    write_model(tmp_path / "big", CONFIGS["Qwen2.5-72B"])
    command = [CONFIG, f"model.hf_dir={tmp_path / 'big'}", "--gpu", "h100", "--gpus-per-node", "1"]
    assert tool.main(command) == 1
    out = capsys.readouterr().out
    assert "more nodes" in out
    assert "out of memory" in out


def test_without_the_model_it_says_how_to_get_its_config(capsys):
    assert tool.main([CONFIG, "model.hf_dir=models/another"]) == 1
    err = capsys.readouterr().err
    assert "model.hf_dir (models/another)" in err
    assert "hf download" in err


def test_a_model_that_nothing_computes_is_not_a_question_of_nodes(tmp_path, capsys):
    write_model(tmp_path / "model", SMALL | {"hidden_act": "gelu"})
    assert tool.main([CONFIG, f"model.hf_dir={tmp_path / 'model'}"]) == 1
    captured = capsys.readouterr()
    assert "hidden_act" in captured.err
    assert "more nodes" not in captured.out


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], "CONFIG"),
        (["run.seed=1"], "CONFIG comes first"),
        ([CONFIG, "--gpus-per-node", "0"], "0 must be a whole number of 1 or more"),
        ([CONFIG, "--nodes", "-4"], "-4 must be a whole number of 1 or more"),
        ([CONFIG, "--top", "-1"], "-1 must be a whole number of 1 or more"),
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
