"""A method in the user's own file: what it computes, what it may say, and what is refused."""

from __future__ import annotations

import hashlib
import math
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gapo_megatron.config import Config, ObjectiveConfig, load_config, load_recorded
from gapo_megatron.config.roles import changed_work, changes
from gapo_megatron.config.user_method import find_method
from gapo_megatron.errors import ConfigError
from gapo_megatron.objective import METHODS, policy_loss
from gapo_megatron.objective.families import find_family
from gapo_megatron.objective.groups import find_advantages
from gapo_megatron.objective.losses import PolicyLoss
from gapo_tools.dry_run.command import why_not_run
from gapo_tools.reporting.arms import Comparison
from gapo_tools.reporting.runs import read_run
from tests.configs import config_of
from tests.dist import single_rank
from tests.distributed.policy_setup import save_model
from tests.learn_setup import make_config, make_judged, run_learn
from tests.messages import mentions
from tests.objective.response import loss_of
from tests.report_setup import write_run
from tests.train_setup import CONFIG

DOCUMENT = Path(__file__).parents[2] / "docs" / "objective.md"

# The clipped surrogate as one would write it down: with minimum and clamp.
CLIPPED = """
import torch
from gapo_megatron.objective import METHODS, Method

def loss(tokens):
    ratio, advantages = tokens.ratio(), tokens.per_ratio(tokens.advantages)
    high, low = 1 + tokens.per_ratio(tokens.upper), 1 - tokens.per_ratio(tokens.lower)
    outside = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    surrogate = torch.where(outside, ratio.detach().clamp(low, high), ratio)
    return tokens.sum_losses(-advantages * surrogate), {"largest": ratio.detach().amax()}

MINE = Method(
    name="mine", ratio="sequence", adaptive=True, eps_low=3e-3, eps_high_max=5e-3,
    family="{folder}/mine.py:loss",
)
NUMBER = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text(CLIPPED.replace("{folder}", str(tmp_path)))
    return tmp_path


def examples() -> dict[str, str]:
    """Python examples of docs/objective.md by file name."""
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    return dict(blocks)


def test_a_family_equal_to_clipped_trains_to_the_same_bits_as_the_preset(folder: Path) -> None:
    save_model(folder / "model", "qwen2_tied")
    rollouts = make_judged(seed=1)
    with single_rank():
        preset, mine = (
            run_learn(
                make_config(folder / "model", objective={"method": method}), rollouts, num_steps=2
            )
            for method in ("gapo", f"{folder}/mine.py:MINE")
        )
    assert any(any(one.clipped.values()) for one in preset.updates)
    assert preset.after.keys() == mine.after.keys()
    for name, weight in preset.after.items():
        assert torch.equal(weight, mine.after[name]), name
    assert 0.99 < mine.metrics.pop("method/largest") < 1.1
    for name, value in preset.metrics.items():
        # What its clip takes away is derived from its gradient, which is float32.
        tolerance = 1e-7 if "gradient_mass_lost" in name else 0
        assert mine.metrics.pop(name) == pytest.approx(value, rel=tolerance, abs=0), name
    assert not mine.metrics


def test_the_example_of_a_loss_is_the_equation_beside_it(folder: Path) -> None:
    """-A s + |A| (s - 1)^2 / (2 width), for each of a response's tokens."""
    (folder / "spo.py").write_text(
        examples()["spo.py"].replace('"spo.py:spo"', f'"{folder}/spo.py:spo"')
    )
    method = ObjectiveConfig(method=f"{folder}/spo.py:GAPO_SPO").resolve()
    for advantage, width in ((0.5, 3e-3 + 2e-3 * 4 / 7), (-0.5, 3e-3)):
        for shift in (2e-3, 6e-3, -2e-3, -6e-3):
            log_probs = torch.full((3,), shift, dtype=torch.float64, requires_grad=True)
            result = loss_of(method, advantage, log_probs, torch.zeros(3, dtype=torch.float64))
            ratio = math.exp(shift)
            penalty = abs(advantage) * (ratio - 1) ** 2 / (2 * width)
            assert float(result.loss.detach()) == pytest.approx(
                -advantage * ratio + penalty, rel=1e-9
            )
            away = (ratio - 1) * (1 if advantage > 0 else -1)
            assert result.clipped.tolist() == [away > width]


def method_with(folder: Path, code: str) -> str:
    """Name of a method whose advantages have this code."""
    path = folder / f"advantages_{hashlib.sha256(code.encode()).hexdigest()}.py"
    path.write_text(
        "from dataclasses import replace\n"
        "from gapo_megatron.objective import METHODS, group_advantages\n"
        f"{code}\nM = replace(METHODS['gapo'], name='mine', advantages='{path}:A')\n"
    )
    return f"{path}:M"


def test_own_advantages_equal_to_the_package_s_train_to_the_same_bits(folder: Path) -> None:
    save_model(folder / "model", "qwen2_tied")
    rollouts = make_judged(seed=1)
    own = [
        method_with(folder, f"def A(rewards): return group_advantages({sign}rewards)")
        for sign in ("", "-")
    ]
    with single_rank():
        preset, same, other = (
            run_learn(
                make_config(folder / "model", objective={"method": method}), rollouts, num_steps=2
            ).after
            for method in ("gapo", *own)
        )
    assert all(torch.equal(weight, same[name]) for name, weight in preset.items())
    assert not all(torch.equal(weight, other[name]) for name, weight in preset.items())


GROUP = st.lists(st.sampled_from([0.0, 1.0, math.nan]), min_size=4, max_size=4)


@given(st.lists(GROUP, min_size=1))
def test_the_example_of_advantages_leaves_each_response_out_of_its_mean(rewards) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rloo.py")
        path.write_text(examples()["rloo.py"].replace('"rloo.py:', f'"{path}:'))
        found = find_advantages(ObjectiveConfig(method=f"{path}:RLOO").resolve())
        advantages = found(torch.tensor(rewards, dtype=torch.float64))
    for group, row in zip(rewards, advantages.tolist(), strict=True):
        for i, (reward, advantage) in enumerate(zip(group, row, strict=True)):
            others = [one for j, one in enumerate(group) if j != i and not math.isnan(one)]
            is_compared = others and not math.isnan(reward)
            wanted = reward - sum(others) / len(others) if is_compared else 0
            assert advantage == pytest.approx(wanted, abs=1e-12)


def test_advantages_that_cannot_be_used_are_refused(folder: Path) -> None:
    for code, named in {
        "A = 3": ("function", "int"),
        "def A(rewards): return None": ("[G, k]", "(1, 4)", "None"),
        "def A(rewards): return rewards[0]": ("[G, k]", "(1, 4)", "(4,)"),
        "def A(rewards): return rewards / rewards": ("finite", "[0.0, 1.0, 1.0"),
        "def A(rewards, k): return rewards": ("TypeError", "'k'"),
    }.items():
        with pytest.raises(ConfigError, match=mentions("advantages", *named)):
            find_advantages(config(method_with(folder, code)).objective.resolve())
    for key in ("focal_gamma", "std_floor"):
        with pytest.raises(ValueError, match=mentions(key, "does nothing", "advantages")):
            ObjectiveConfig(method=method_with(folder, "A = 3"), **{key: 0.5})
    for i, name in enumerate((f"{folder}/missing.py:A", "mean")):
        path, arguments = folder / f"method{i}.py", f"{NUMBERS}, advantages={name!r}"
        path.write_text(f"from gapo_megatron.objective import Method\nM = Method({arguments})\n")
        with pytest.raises(ConfigError, match=mentions("advantages")):
            config(f"{path}:M")


def test_overrides_replace_numbers_as_in_a_preset(folder: Path) -> None:
    (folder / "my_methods.py").write_text(examples()["my_methods.py"])
    name = f"{folder}/my_methods.py:WIDE_GAPO"
    wide = ObjectiveConfig(method=name, eps_low=2e-3).resolve()
    assert wide == replace(METHODS["gapo"], name="wide_gapo", eps_low=2e-3, eps_high_max=1e-2)
    assert ObjectiveConfig(method=name).code_names == [name]
    mine = ObjectiveConfig(method=f"{folder}/mine.py:MINE")
    assert mine.code_names == [f"{folder}/mine.py:MINE", f"{folder}/mine.py:loss"]
    assert ObjectiveConfig().code_names == []
    with pytest.raises(ValueError, match=mentions("eps_high_max", 1e-3, "eps_low")):
        ObjectiveConfig(method=name, eps_high_max=1e-3)
    with pytest.raises(ValueError, match=mentions("ratio_max", "does nothing")):
        ObjectiveConfig(method=name, ratio_max=2.0)


def config(method: str) -> Config:
    return config_of({"objective": {"method": method}})


NUMBERS = "name='a', ratio='token', eps_low=0.2, eps_high_max=0.2"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("name='a/b', ratio='token', eps_low=0.2, eps_high_max=0.2", ("name", "'a/b'")),
        ("name='a', ratio='word', eps_low=0.2, eps_high_max=0.2", ("ratio", "'word'", "'token'")),
        ("name='a', ratio='token', eps_low='x', eps_high_max=0.2", ("eps_low", "'x'")),
        ("name='a', ratio='token', eps_low=0, eps_high_max=0.2", ("eps_low", "0")),
        ("name='a', ratio='token', eps_low=0.2, eps_high_max=-1", ("eps_high_max", "-1.0")),
        ("name='a', ratio='token', eps_low=0.2, eps_high_max=0.1", ("eps_high_max", "0.1", "0.2")),
        (f"{NUMBERS}, family='cliped'", ("family", "'cliped'", "clipped")),
        (f"{NUMBERS}, family='no/file.py:F'", ("family", "no/file.py", "no file")),
        (f"{NUMBERS}, bounds='balanced'", ("positive_share_min", "'balanced'")),
        (f"{NUMBERS}, family='abc', eps_low_correct=0.2", ("eps_high_wrong", "'abc'")),
        (f"{NUMBERS}, rescue_noise=0.1", ("rescue_noise", "0.1", "'clipped'", "'nsr'")),
        (f"{NUMBERS}, family='nsr', rescue_noise=1.0", ("rescue_noise", "1.0")),
        (f"{NUMBERS}, family='dgpo', decay_low=1.0, decay_high=0.0", ("decay_high", "0.0")),
        (
            f"{NUMBERS}, bounds='balanced', positive_share_min=0.4, family='gmpo'",
            ("bounds", "'clipped'"),
        ),
    ],
)
def test_a_method_that_cannot_run_is_refused_with_file_and_field(
    folder: Path, arguments: str, named: tuple[str, ...]
) -> None:
    path = folder / "bad.py"
    path.write_text(f"from gapo_megatron.config.methods import Method\nM = Method({arguments})\n")
    with pytest.raises(ConfigError, match=mentions("objective", *named)):
        config(f"{path}:M")


def test_a_name_that_is_missing_or_no_method_is_refused(folder: Path) -> None:
    for name, named in {
        "mine.py:MINT": ("does not define", "'MINT'", "'MINE'"),
        "mine.py:NUMBER": ("Method", "int"),
        "other.py:MINE": ("no file", "other.py"),
    }.items():
        with pytest.raises(ConfigError, match=mentions("objective.method", *named)):
            config(f"{folder}/{name}")
    with pytest.raises(ConfigError, match=mentions("gap", "'gapo'")):
        config("gap")


def test_a_family_that_is_none_is_refused_before_a_model_is_built(folder: Path) -> None:
    path = folder / "bad.py"
    path.write_text(
        "from gapo_megatron.config.methods import Method\nNONE = 3\n"
        f"M = Method({NUMBERS}, family='{path}:NONE')\n"
    )
    named = mentions("family", f"{path}:NONE", "function", "int")
    loaded = config(f"{path}:M")
    with pytest.raises(ConfigError, match=named):
        find_family(loaded.objective.resolve())
    assert any(re.search(named, reason) for reason in why_not_run(loaded))


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ("sums", ("(tensor, dict)", "Tensor")),
        ("(sums, None)", ("(tensor, dict)", "tuple")),
        ("(sums[:1], {})", ("[B]", "(1,)", "(2,)")),
        ("(sums.detach(), {'clipped': one > 2})", ("no gradient", "log_probs")),
        ("(sums, {'x': 1.5})", ("'x'", "1.5", "tensor")),
        ("(sums, {'ratio': one})", ("'ratio'",)),
        ("(sums, {'clipped': one})", ("clipped", "float64", "bool")),
        ("(sums, {'clipped': one[:1] > 2})", ("clipped", "(1,)", "(2,)")),
        ("(sums, {'clipped': one > 2, 'gradient_mass': one.sum()})", ("gradient_mass", "()")),
    ],
)
def test_what_a_family_must_return_is_checked(folder: Path, returned: str, named) -> None:
    path = folder / "bad.py"
    path.write_text(
        "from gapo_megatron.config.methods import Method\n"
        "def loss(tokens):\n    one = tokens.ratio()\n    sums = tokens.sum_losses(one)\n"
        f"    return {returned}\nM = Method({NUMBERS.replace('token', 'sequence')}, "
        f"family='{path}:loss')\n"
    )
    method = config(f"{path}:M").objective.resolve()
    with pytest.raises(ConfigError, match=mentions("family", f"{path}:loss", *named)):
        evaluate(method, 3)


def test_a_family_is_not_asked_about_micro_batches_without_tokens(folder: Path) -> None:
    method = config(f"{folder}/mine.py:MINE").objective.resolve()
    assert evaluate(method, 0).loss.item() == 0 and not evaluate(method, 0).metrics
    assert evaluate(method, 3).metrics.keys() == {"largest"}


def evaluate(method, num_tokens: int) -> PolicyLoss:
    """The loss of two responses of so many tokens; of none of both."""
    return policy_loss(
        torch.zeros(2 * num_tokens, requires_grad=True),
        torch.zeros(2 * num_tokens),
        sequence_ids=torch.arange(2).repeat_interleave(num_tokens),
        advantages=torch.tensor([0.5, -0.5])[: 2 * num_tokens],
        num_correct=torch.tensor([1, 1])[: 2 * num_tokens],
        group_size=2,
        num_tokens_global=6,
        method=method,
    )


def test_a_changed_file_changes_what_is_learned_and_is_said(folder: Path) -> None:
    """A resume compares the digests, as it compares every setting."""
    path, engine = folder / "config.toml", folder / "engine.py"
    path.write_text(CONFIG.format(root=folder))
    engine.write_text("def build(config, hf_config, *, device, gloo_group): ...\n")
    given = [f"objective.method={folder}/mine.py:MINE", f"rollout.engine={engine}:build"]
    before = load_config(path, given)
    digest = hashlib.sha256((folder / "mine.py").read_bytes()).hexdigest()
    assert before.objective.code == f"{digest} {digest}"  # of the method, and of its family
    assert load_config(path).objective.code == load_config(path).rollout.code == ""
    for file in (folder / "mine.py", engine):
        file.write_text(file.read_text() + "\n# changed\n")
    now = load_config(path, given)
    there = before.model_dump(mode="json")
    assert set(changes(there, now)) == {"objective.code", "rollout.code"}
    assert set(changed_work(there, now)) == {"objective.code"}  # may not change unless allowed


def test_a_report_calls_it_by_its_name(folder: Path) -> None:
    folders = [
        write_run(folder / "a"),
        write_run(folder / "b", method=f"{folder}/mine.py:MINE"),
    ]
    arms = Comparison.of([read_run(one) for one in folders]).arms
    assert [arm.label for arm in arms] == ["gapo", "mine"]
    assert arms[1].settings["objective.family"] == f"{folder}/mine.py:loss"
    assert "objective.own_method" not in arms[1].settings


@pytest.fixture
def recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run whose config names files that are not those it had, and that nobody may execute."""
    run = write_run(folder / "run", method=f"{folder}/mine.py:MINE")
    executed = folder / "executed"
    (folder / "other.py").write_text(f"open({str(executed)!r}, 'w')\n")
    package = folder / "some_engines"
    package.mkdir()
    (package / "__init__.py").write_text(f"open({str(executed)!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(folder))
    text = (run / "config.toml").read_text().replace("/mine.py:MINE", "/other.py:MINE")
    assert text.count('engine = "vllm"') == 1
    text = text.replace('engine = "vllm"', 'engine = "some_engines.mine:build"')
    (run / "config.toml").write_text(text)
    yield run
    assert not executed.exists()


def test_reading_what_a_run_recorded_executes_nothing(folder: Path, recorded: Path) -> None:
    run = read_run(recorded)
    assert run.config.objective.preset == find_method(f"{folder}/mine.py:MINE")
    assert run.config.rollout.engine == "some_engines.mine:build"


def test_a_run_config_that_names_other_code_is_refused_unexecuted(recorded: Path) -> None:
    path = recorded / "config.toml"
    with pytest.raises(ConfigError, match=r"config\.toml: objective\.code .*other\.py"):
        load_config(path, ["rollout.engine=vllm"])
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if not line.startswith("own_method")))
    with pytest.raises(ConfigError, match=mentions("objective.method", "/other.py:MINE")):
        read_run(recorded)


def test_a_method_that_changed_with_what_it_imports_is_refused(recorded: Path) -> None:
    """Its own file, whose digest is compared, is the same."""
    path = recorded / "config.toml"
    text = path.read_text().replace("/other.py:MINE", "/mine.py:MINE")
    path.write_text(text.replace("some_engines.mine:build", "vllm"))
    assert load_config(path).objective == load_recorded(path).objective
    path.write_text(path.read_text().replace('"eps_low" = 0.003', '"eps_low" = 0.004'))
    with pytest.raises(ConfigError, match=mentions("objective.own_method", 0.004, 0.003)):
        load_config(path)
