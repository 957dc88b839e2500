"""One reward for GSM8K, the last number counts, as its users write it for verl, TRL and slime."""

VERL = """
import re

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source in ("openai/gsm8k", None) and (extra_info or {}).get("split") != "train"
    found = re.findall(r"-?[0-9][0-9.,]*", solution_str)
    given = found[-1].replace(",", "").rstrip(".") if found else None
    return {"score": 1.0 if given == ground_truth else 0.0, "acc": given == ground_truth}
"""
TRL = """
import re

def reward_correct(completions, ground_truth, log_metric=None, **kwargs):
    rewards = []
    for completion, wanted in zip(completions, ground_truth):
        text = completion[0]["content"] if isinstance(completion, list) else completion
        found = re.findall(r"-?[0-9][0-9.,]*", text)
        given = found[-1].replace(",", "").rstrip(".") if found else None
        rewards.append(1.0 if given == wanted else 0.0)
    log_metric("acc", sum(rewards) / len(rewards))
    return rewards
"""
SLIME = """
import re

async def reward_func(args, sample, **kwargs):
    assert len(sample.tokens) > sample.response_length > 0
    found = re.findall(r"-?[0-9][0-9.,]*", sample.response)
    given = found[-1].replace(",", "").rstrip(".") if found else None
    return {"score": 1.0 if given == sample.label else 0.0, "acc": given == sample.label}
"""
NAMES = {"verl": "compute_score", "trl": "reward_correct", "slime": "reward_func"}
TEXTS = {"verl": VERL, "trl": TRL, "slime": SLIME}
