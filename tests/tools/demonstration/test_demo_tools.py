"""The demo that learns to call a tool: its task and tokenizer, and two steps of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from gapo_megatron.data.schema import read_jsonl
from gapo_megatron.data.tokenizer import load_tokenizer
from gapo_megatron.rewards import exact
from gapo_megatron.rollout.environments.tools import Tools
from gapo_megatron.rollout.turns import Turns
from gapo_megatron.types import Episode, Outcome, Prompt
from gapo_tools.demonstration import demo_task, demo_tools
from gapo_tools.demonstration.demo_tools import Product

ROOT = Path(__file__).parents[3]
PRODUCT = Product((47, 86))
ROWS = PRODUCT.called + PRODUCT.direct


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """Loaded as training loads it, from the folder that the demo writes."""
    folder = tmp_path_factory.mktemp("initial")
    rows = [row for n in range(12, 98) for row in Product((n, n)).called]
    made = demo_tools.write_tokenizer(demo_tools.training_texts(rows), folder)
    demo_task.write_initial_model(made, folder, seed=0)
    return load_tokenizer(folder)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def episode_of(
    tokenizer: PreTrainedTokenizerBase, turn: str, *later: tuple[list[int], str]
) -> Episode:
    """An episode of `turn`, and tokens of the environment with the model's next turn, by pairs."""
    tokens = encode(tokenizer, turn)
    mask = [True] * len(tokens)
    for answer, text in later:
        said = [*encode(tokenizer, text), tokenizer.eos_token_id]
        tokens += [*answer, *said]
        mask += [False] * len(answer) + [True] * len(said)
    prompt = Prompt("0", tuple(encode(tokenizer, PRODUCT.prompt)), answer=PRODUCT.answer)
    return Episode(
        prompt, 0, np.array(tokens, np.int32), np.zeros(len(tokens), np.float32),
        response_mask=np.array(mask) if later else None,
    )  # fmt: skip


def test_the_warm_start_teaches_what_the_environment_reads(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """The turn ends, the tool answers, and the model sees the very tokens it was trained on."""
    tools = Tools(tokenizer, max_calls=1)
    turns = Turns(tokenizer, ["</tool_call>"], eos_token_ids=[tokenizer.eos_token_id])
    call, answer, direct = ROWS
    asked = episode_of(tokenizer, call["response"])
    assert turns.is_over(asked) and int(asked.token_ids[-1]) in turns.stop_ids
    result = tools.respond(asked)
    assert result is not None and tokenizer.decode(result) == "<tool_response>4042</tool_response>"
    tokens = [*asked.prompt.token_ids, *asked.token_ids.tolist(), *result]
    assert tokens == encode(tokenizer, answer["prompt"])

    done = episode_of(tokenizer, call["response"], (list(result), answer["response"]))
    assert turns.is_over(done) and tools.respond(done) is None
    assert tools.judge(done) == ("4042", PRODUCT.answer)
    at_once = episode_of(tokenizer, direct["response"])
    assert tools.respond(at_once) is None and tools.judge(at_once) == ("4042", PRODUCT.answer)
    # A call is no answer, whatever is in it.
    assert exact.verify(*tools.judge(asked)).outcome is Outcome.WRONG


def test_the_task_is_reproducible_and_holds_problems_out(tmp_path: Path) -> None:
    rows: dict[str, list[Any]] = {}
    for folder in ("one", "other"):
        demo_tools.write_task(
            tmp_path / folder, seed=0, num_eval=400, num_train=800, num_supervised=4000
        )
    for name in ("eval", "train", "supervised"):
        paths = [tmp_path / folder / f"{name}.jsonl" for folder in ("one", "other")]
        assert paths[0].read_bytes() == paths[1].read_bytes()
        rows[name] = [row for _, row in read_jsonl(paths[0], keys=("prompt",))]
    prompts = {name: [row["prompt"].split("=")[0] for row in part] for name, part in rows.items()}
    assert [len(part) for part in prompts.values()] == [400, 800, 4000]
    assert len({*prompts["eval"]}) == 400 and len({*prompts["train"]}) == 800
    assert not {*prompts["eval"]} & {*prompts["train"], *prompts["supervised"]}
    levels = [row["level"] for row in rows["eval"]]
    assert {level: levels.count(level) for level in levels} == {
        f"digits_{digits}": 100 for digits in demo_tools.DIGITS
    }
    for row in rows["eval"]:
        one, other = row["prompt"].removesuffix("=").split("*")
        assert int(row["answer"]) == int(one) * int(other)
        assert row["level"] == f"digits_{len(one)}" == f"digits_{len(other)}"


_RESULT = re.compile("(?<=</tool_call>)<tool_response>.*?</tool_response>")
"""Of the tool. A model hardly trained may write such tokens, too, but not where its turn ends."""

CUT = (
    *("supervised.num_steps=60", "batch.rollout_prompts=8", "batch.minibatch_prompts=4"),
    *("run.num_steps=2", "evaluation.every_steps=2", "evaluation.samples_per_prompt=1"),
    "metrics.samples_per_step=64",
)
"""All of it, smaller; `samples.jsonl` then has every response of a step."""


@pytest.mark.system
def test_the_demo_runs_calls_the_tool_and_learns_nothing_from_its_results(tmp_path: Path) -> None:
    command = [ROOT / "tools/demo.py", "--config", ROOT / "configs/demo_tools.toml", *CUT]
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "digits_5" in done.stdout  # the table
    (folder,) = (path.parents[1] for path in (tmp_path / "runs").glob("*/report/report.html"))
    assert (folder / "hf/model.safetensors").exists()
    tokenizer = load_tokenizer(folder / "hf")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for line in (one for one in lines if "loss/policy" in one):
        texts = [one["response"] for one in samples if one["step"] == line["step"]]
        assert len(texts) == 64
        num_results = sum(_RESULT.search(text) is not None for text in texts)
        assert num_results > 0 and line["environment/turns"] == 1 + num_results / 64
        # Lengths are those of what the model has sampled; so are the tokens of the loss, and the
        # engine's log-probs there are the trainer's (fp32 on both sides).
        lengths = [len(encode(tokenizer, _RESULT.sub("", text))) for text in texts]
        assert line["rollout/response_length/mean"] == pytest.approx(np.mean(lengths))
        assert line["mismatch/mean_abs_log_prob_diff"] < 1e-5
