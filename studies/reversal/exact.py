"""Pass rates without sampling: the probability of a problem's answer and the token that ends it.

    python -m studies.reversal.exact MODEL PROBLEMS OUTPUT [CHECKPOINT ...]

Teacher-forced at temperature 1, in float32, by transformers; of MODEL itself, or of MODEL with the
factors of each checkpoint (peft). OUTPUT gets a list of probabilities, in the order of PROBLEMS,
for each: {"0": [...]} of the model, {"40": [...], ...} of checkpoints. It is a lower bound of what
the verifier would count, which also takes another spelling (`Ash`, `ash`).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from gapo_megatron.compat import onednn
from gapo_megatron.io.files import write_atomically
from gapo_tools.conversion.adapter import convert_adapter
from gapo_tools.conversion.directions import Options

BATCH_TOKENS = 2048
"""Largest number of tokens of a forward pass, padding included."""
_torch_linear = functional.linear


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X [..., K] by weight [N, K] as [..., N], by the library that is faster here."""
    product = None if bias is not None else onednn.mm(x, weight.t())
    return _torch_linear(x, weight, bias) if product is None else product


@torch.no_grad()
def answer_probabilities(
    model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[float]:
    """Probability of each answer, all of its tokens, after its prompt.

    Args:
        model: of transformers, in float32.
        prompts: token ids, none empty.
        answers: token ids with the token that ends a response, none empty.
    """
    lengths = [len(one) + len(other) for one, other in zip(prompts, answers, strict=True)]
    found = dict[int, float]()
    rest = sorted(range(len(prompts)), key=lengths.__getitem__)
    while rest:
        longest = rest[-1]
        batch = [rest.pop() for _ in range(min(len(rest), BATCH_TOKENS // lengths[longest] or 1))]
        # Rows end together, so that the last positions are those of the answers.
        tokens = torch.zeros(len(batch), lengths[longest], dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, place in enumerate(batch):
            mask[row, -lengths[place] :] = 1
            tokens[row, -lengths[place] :] = torch.tensor([*prompts[place], *answers[place]])
        most = max(len(answers[place]) for place in batch)
        with patch.object(functional, "linear", _linear):
            logits = model(
                input_ids=tokens,
                attention_mask=mask,
                logits_to_keep=most + 1,
                use_cache=False,
            ).logits
        log_probs = logits[:, :-1].double().log_softmax(dim=-1)
        chosen = log_probs.gather(2, tokens[:, -most:, None])[:, :, 0]
        for row, place in enumerate(batch):
            found[place] = float(chosen[row, -len(answers[place]) :].sum().exp())
    return [found[place] for place in range(len(prompts))]


def evaluate(model_dir: str, problems: Path, checkpoints: Sequence[str]) -> dict[str, list[float]]:
    """Probabilities by step, as the module says; checkpoints are folders `step_N`."""
    from transformers import AutoModelForCausalLM

    tasks = json.loads(problems.read_text())
    prompts, answers = ([one[key] for one in tasks] for key in ("prompt", "answer"))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    if not checkpoints:
        return {"0": answer_probabilities(model, prompts, answers)}
    from peft import PeftModel

    found = {}
    for path in map(Path, checkpoints):
        with tempfile.TemporaryDirectory() as folder:
            adapter = Path(folder) / "adapter"
            convert_adapter(path, adapter, Options(num_threads=1), kind="peft")
            adapted = PeftModel.from_pretrained(model, adapter).eval()
        found[str(int(path.name.removeprefix("step_")))] = answer_probabilities(
            adapted, prompts, answers
        )
        model = adapted.unload()
    return found


def main() -> None:
    """Evaluate what the command line names."""
    model, problems, output, *checkpoints = sys.argv[1:]
    found = evaluate(model, Path(problems), checkpoints)
    write_atomically(Path(output), json.dumps(found))


if __name__ == "__main__":
    main()
