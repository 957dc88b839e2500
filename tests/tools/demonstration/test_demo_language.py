"""The instructions of `make demo-language`, and the model that is made from a package."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gapo_megatron.errors import ConfigError, DataError
from gapo_megatron.rewards.instructions import verify
from gapo_megatron.types import Outcome
from gapo_tools.demonstration import demo_language, smollm2
from gapo_tools.demonstration.demo_language import LEVELS, SUBJECTS
from tests.messages import mentions

ROOT = Path(__file__).parents[3]


def _written(folder: Path, seed: int = 0, num_eval: int = 96) -> dict[str, list[dict[str, str]]]:
    demo_language.write_task(folder, seed=seed, num_eval=num_eval, num_train=1200)
    return {
        split: [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
        for split in ("eval", "train")
    }


FULFILLED = {
    "words": "The sea is wide.",
    "keywords": f"I like {', '.join(demo_language.WORDS)}.",
    "no_comma": "It is wide.",
}
BROKEN = {
    "words": "It is " + "very " * 12 + "wide.",
    "keywords": "It is wide.",
    "no_comma": "It is wide, deep and cold.",
    "end": "It is wide.",
}


def test_answers_check_what_the_prompt_asks_for(tmp_path):
    for rows in _written(tmp_path).values():
        for row in rows:
            (check,) = json.loads(row["answer"])["instructions"]
            arguments = check.get("keywords", [check.get("end_phrase", check.get("num_words", ""))])
            assert all(str(one) in row["prompt"] for one in arguments)
            good = FULFILLED.get(row["level"]) or f"It is wide. {check.get('end_phrase')}"
            assert verify(good, row["answer"]).outcome is Outcome.CORRECT
            assert verify(BROKEN[row["level"]], row["answer"]).outcome is Outcome.WRONG


def test_no_combination_of_subject_and_constraint_is_in_both_splits(tmp_path):
    def combination(row: dict[str, str]) -> tuple[str, str]:
        (subject,) = {one for one in SUBJECTS if re.search(rf"\b{one}\b", row["prompt"])}
        return subject, row["prompt"].split(". ", 1)[-1]

    rows = _written(tmp_path)
    held_out = {combination(row) for row in rows["eval"]}
    assert len(held_out) == len(rows["eval"]) == 96
    assert held_out.isdisjoint(combination(row) for row in rows["train"])
    assert len({row["prompt"] for row in rows["train"]}) == len(rows["train"])
    levels = [row["level"] for row in rows["eval"]]
    assert {level: levels.count(level) for level in LEVELS} == dict.fromkeys(LEVELS, 24)
    assert {row["level"] for row in rows["train"]} == set(LEVELS)


# --- the model -----------------------------------------------------------------------------------


def test_without_the_packages_the_command_that_installs_them_is_named(tmp_path):
    with pytest.raises(ConfigError, match=mentions("Q4_1.gguf", "tools/setup_env.sh language")):
        smollm2.write_model(tmp_path, tmp_path / "model")


def test_another_model_file_is_refused_and_nothing_is_written(tmp_path):
    path = tmp_path / smollm2.GGUF
    path.parent.mkdir()
    path.write_bytes(b"GGUF")
    with pytest.raises(DataError, match=mentions(str(path), "SHA-256", smollm2.SHA256)):
        smollm2.write_model(tmp_path, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.system
@pytest.mark.skipif(
    not (ROOT / smollm2.PACKAGES / smollm2.GGUF).is_file(),
    reason="needs the packages of requirements/language.txt (tools/setup_env.sh language)",
)
def test_the_model_is_made_with_its_shapes_and_its_template(tmp_path):
    from gapo_megatron.data.tokenizer import load_tokenizer
    from gapo_megatron.models.config_json import facts_of, read_facts
    from gapo_megatron.models.published import shipped_fields

    model = tmp_path / "SmolLM2-135M-Instruct"
    smollm2.write_model(ROOT / smollm2.PACKAGES, model)
    assert read_facts(model) == facts_of(shipped_fields(model.name), source="shipped")
    assert "quantization_config" not in json.loads((model / "config.json").read_text())
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    text = load_tokenizer(model).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>assistant\n")
