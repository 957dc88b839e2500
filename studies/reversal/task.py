"""The task's files: held-out problems as tokens, and examples of the supervised start.

No problem is in two of training, held-out problems and examples.
"""

from __future__ import annotations

import json
from pathlib import Path

from gapo_megatron.config import Config
from gapo_megatron.data.end_tokens import find_end_tokens
from gapo_megatron.data.messages import bind_template
from gapo_megatron.data.reasoning_gym import generate
from gapo_megatron.data.schema import read_prompts
from gapo_megatron.data.tokenizer import load_tokenizer
from gapo_megatron.io.files import write_atomically
from gapo_megatron.policy.model import read_hf_config
from gapo_megatron.rewards.reasoning_gym import reference_answer


def write_task(config: Config, *, problems: Path) -> None:
    """Write `supervised.train_path` and the held-out problems.

    Args:
        config: of the study, with one generated source; its model is `supervised.initial_hf_dir`,
            and `[supervised]` says how many examples there are, drawn after the training problems.
        problems: file to write: a list of `id`, `prompt` (token ids, as in training) and `answer`
            (token ids, with the one that ends a response).
    """
    assert config.supervised is not None
    model = config.supervised.initial_hf_dir
    num_examples = config.supervised.num_steps * config.supervised.batch_sequences
    tokenizer = load_tokenizer(model, field="supervised.initial_hf_dir")
    bind_template(tokenizer, config.data)
    vocab_size = read_hf_config(model).vocab_size
    end = find_end_tokens(tokenizer, config.data, model, vocab_size=vocab_size).ids[0]

    (source,) = config.data.source
    made = generate([source.model_copy(update={"size": source.size + num_examples})])
    held_out = read_prompts(
        "held out",
        tokenizer=tokenizer,
        data=config.data,
        reward=config.reward,
        source=source.name,
        generated=made.held_out[source.name],
    )
    rows = [
        {
            "id": one.id,
            "prompt": one.token_ids,
            "answer": [*tokenizer.encode(_text(one.answer), add_special_tokens=False), end],
        }
        for one in held_out
    ]
    examples = [
        json.dumps({"prompt": row["prompt"], "response": _text(row["answer"])})
        for row in made.training[source.name][source.size :]
    ]
    write_atomically(Path(config.supervised.train_path), "\n".join(examples))
    write_atomically(problems, json.dumps(rows))


def _text(answer: str) -> str:
    text = reference_answer(answer)
    assert text is not None
    return text
