"""Schedules of the learning rate: the settings, the values, and a run that is made longer."""

import math
from pathlib import Path

import pytest
from transformers import Qwen2Config

from gapo_megatron.checkpoint import check_resume
from gapo_megatron.checkpoint.save import model_identity
from gapo_megatron.config import Config, OptimizerConfig
from gapo_megatron.config.roles import changed_work
from gapo_megatron.errors import ConfigError
from gapo_megatron.formats.manifest import Manifest, publish, step_dir, write_manifest
from gapo_megatron.io.run_folder import checkpoints_dir
from gapo_megatron.io.toml_tree import to_toml
from gapo_megatron.policy.optimizer import learning_rate
from tests.configs import config_of
from tests.messages import mentions

PEAK, FLOOR = 1e-3, 1e-4


def config(num_steps: int = 10, **optimizer: object) -> Config:
    """Two mini-batches a step."""
    return config_of(
        {
            "run": {"num_steps": num_steps},
            "batch": {"rollout_prompts": 4, "minibatch_prompts": 2},
            "optimizer": {"learning_rate": PEAK, **optimizer},
        }
    )


def rates(settings: OptimizerConfig, num_updates: int) -> list[float]:
    return [learning_rate(settings, update) for update in range(num_updates)]


def test_linear_falls_from_the_end_of_the_warmup_to_the_floor_of_the_run() -> None:
    settings = config(schedule="linear", min_learning_rate=FLOOR, warmup_steps=4).optimizer
    found = rates(settings, 24)
    assert found[:5] == [PEAK / 4, PEAK / 2, PEAK * 3 / 4, PEAK, PEAK]
    falls = [PEAK - (PEAK - FLOOR) * i / 16 for i in range(16)]
    assert found[4:20] == pytest.approx(falls, rel=1e-12)
    assert found[20:] == [FLOOR] * 4


def test_cosine_is_half_way_in_the_middle_and_flat_at_both_ends() -> None:
    settings = config(schedule="cosine", min_learning_rate=FLOOR).optimizer
    found = rates(settings, 22)
    assert found[0] == PEAK and found[20:] == [FLOOR, FLOOR]
    assert found[10] == pytest.approx((PEAK + FLOOR) / 2, rel=1e-12)
    assert found[5] == pytest.approx(FLOOR + (PEAK - FLOOR) * (1 + math.sqrt(0.5)) / 2, rel=1e-12)
    assert found == sorted(found, reverse=True)
    assert PEAK - found[1] < (PEAK - FLOOR) / 20 < found[10] - found[11]


def test_constant_is_the_rate_itself() -> None:
    settings = config(warmup_steps=3).optimizer
    assert settings.decay_steps is None
    assert rates(settings, 5) == [PEAK * 1 / 3, PEAK * 2 / 3, PEAK, PEAK, PEAK]


def test_the_updates_of_the_run_are_written_where_none_are_given() -> None:
    assert config(schedule="linear").optimizer.decay_steps == 20
    assert "decay_steps = 20\n" in to_toml(config(schedule="linear"))
    assert config(schedule="linear", decay_steps=7).optimizer.decay_steps == 7
    assert "decay_steps" not in to_toml(config())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"schedule": "cosin"}, ("optimizer.schedule", "'cosine'")),
        ({"min_learning_rate": 1e-5}, ("min_learning_rate", "1e-05", "'constant'")),
        ({"decay_steps": 5}, ("decay_steps", "5", "'constant'")),
        ({"schedule": "linear", "min_learning_rate": 0.01}, ("0.01", "learning_rate", "0.001")),
        (
            {"schedule": "linear", "warmup_steps": 5, "decay_steps": 5},
            ("decay_steps", "5", "warmup_steps"),
        ),
        ({"schedule": "linear", "warmup_steps": 20}, ("warmup_steps", "20", "run.num_steps")),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused(settings, named) -> None:
    with pytest.raises(ConfigError, match=mentions("optimizer", *named)):
        config(**settings)


def test_a_longer_run_is_asked_which_schedule_it_means(tmp_path: Path) -> None:
    ours, before = Qwen2Config(hidden_size=64), config(10, schedule="linear")
    folder = checkpoints_dir(tmp_path) / ".tmp"
    folder.mkdir(parents=True)
    write_manifest(
        folder,
        Manifest(
            step=10,
            model=model_identity(ours),
            config=before.model_dump(mode="json"),
            layout={"data_parallel_size": 1},
            megatron_version="0.19.2",
            files={},
        ),
    )
    publish(folder, step_dir(checkpoints_dir(tmp_path), 10))
    longer = config(20, schedule="linear")
    with pytest.raises(ConfigError, match=mentions("optimizer.decay_steps", 20, 40)):
        check_resume(tmp_path, ours, longer)
    assert "optimizer.decay_steps" in changed_work(before.model_dump(mode="json"), longer)
    check_resume(tmp_path, ours, config(20, schedule="linear", decay_steps=20))
    check_resume(tmp_path, ours, before)
