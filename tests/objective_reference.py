"""The paper's equations as a loop over sequences and tokens, and the cases it is compared on."""

import dataclasses

import torch
from hypothesis import strategies as st

from gapo_megatron.objective import policy_loss

GROUP_SIZE = 8
MAX_RESPONSE_TOKENS = 40
# A handful of float64 roundings of numbers of order one, over at most a few hundred terms.
ROUNDING = 1e-12


@dataclasses.dataclass
class Case:
    """A mini-batch: per sequence its c, whether it is correct, and its tokens' log-ratios."""

    num_correct: list[int]
    correct: list[bool]
    differences: list[list[float]]

    @property
    def advantages(self):
        return torch.tensor(
            [
                (r - c / GROUP_SIZE)
                for c, r in zip(self.num_correct, map(float, self.correct), strict=True)
            ],
            dtype=torch.float64,
        )

    @property
    def counts(self):
        return [len(row) for row in self.differences]

    def tensors(self, dtype=torch.float64):
        """(log_probs, old_log_probs, sequence_ids), packed."""
        ids = [i for i, row in enumerate(self.differences) for _ in row]
        old = torch.linspace(-3, -0.1, len(ids), dtype=torch.float64)
        difference = torch.tensor([d for row in self.differences for d in row]).double()
        new = (old + difference).to(dtype).requires_grad_()
        return new, old.to(dtype), torch.tensor(ids, dtype=torch.int64)

    def loss(self, method, log_probs, old_log_probs, sequence_ids, **changes):
        arguments = {
            "advantages": self.advantages,
            "num_correct": torch.tensor(self.num_correct),
            "group_size": GROUP_SIZE,
            "num_tokens_global": sum(self.counts) + 5,  # as if 5 tokens were not computed
            "num_sequences_global": len(self.counts) + 2,
            "max_response_tokens": MAX_RESPONSE_TOKENS,
            "method": method,
        }
        return policy_loss(
            log_probs, old_log_probs, sequence_ids=sequence_ids, **(arguments | changes)
        )


def cases(max_sequences=6, max_tokens=12):
    """Log-ratios of every scale in which some method clips, exact zeros among them."""

    @st.composite
    def build(draw):
        size = draw(st.integers(1, max_sequences))
        scale = draw(st.sampled_from([0.0, 1e-4, 3e-3, 1e-2, 0.3, 2.0]))
        row = st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=max_tokens)
        rows = draw(st.lists(row, min_size=size, max_size=size))
        c = draw(st.lists(st.integers(0, GROUP_SIZE), min_size=size, max_size=size))
        # c = 0 has no correct rollout, and c = k no wrong one.
        flips = draw(st.lists(st.booleans(), min_size=size, max_size=size))
        correct = [n == GROUP_SIZE or (n > 0 and flip) for n, flip in zip(c, flips, strict=True)]
        return Case(c, correct, [[scale * d for d in r] for r in rows])

    return build()


def reference(case, method, log_probs, old_log_probs):
    """The equations, one token at a time, in scalar float64 with autograd.

    Returns (loss, ratios, clipped): one ratio and one flag per sequence or per token.
    """
    total, ratios, flags, start = torch.zeros((), dtype=torch.float64), [], [], 0
    for c, advantage, count in zip(case.num_correct, case.advantages, case.counts, strict=True):
        new = [log_probs[start + t].double() for t in range(count)]
        old = [old_log_probs[start + t].double() for t in range(count)]
        start += count
        width = method.eps_high_max
        if method.adaptive:
            width = method.eps_low
            if advantage > 0:
                share = (GROUP_SIZE - c) / (GROUP_SIZE - 1)
                width += (method.eps_high_max - method.eps_low) * share
        logs = [n - o for n, o in zip(new, old, strict=True)]
        if method.ratio == "sequence":
            logs = [sum(logs) / count]
        ratio = [torch.exp(log) for log in logs]
        low, high = 1 - method.eps_low, 1 + width
        flag = [bool((advantage > 0 and s > high) or (advantage < 0 and s < low)) for s in ratio]
        if method.stop_gradient_ratio:
            flag = [bool(advantage != 0 and not low <= s <= high) for s in ratio]
            kept = [float(s.detach().clamp(low, high)) for s in ratio]
            kept = kept * count if len(kept) == 1 else kept
            losses = [-w * advantage * n for w, n in zip(kept, new, strict=True)]
        else:
            losses = [torch.maximum(-advantage * s, -advantage * s.clamp(low, high)) for s in ratio]
            losses = losses * count if len(losses) == 1 else losses
        divisor = {
            "token_mean": sum(case.counts) + 5,
            "sequence_mean": count * (len(case.counts) + 2),
            "constant": MAX_RESPONSE_TOKENS * (len(case.counts) + 2),
        }[method.aggregation]
        total = total + sum(losses) / divisor
        ratios += [float(s.detach()) for s in ratio]
        flags += flag
    return total, ratios, flags
