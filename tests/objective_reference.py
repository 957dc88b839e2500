"""The paper's equations as a loop over sequences and tokens, and the cases it is compared on."""

import dataclasses
import math

import torch
from hypothesis import strategies as st

from gapo_megatron.objective import Method, policy_loss

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
            "keys": torch.arange(len(self.counts)),
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


@dataclasses.dataclass
class Rollout:
    """One sequence, as the equations see it: scalars of float64 with autograd."""

    method: Method
    advantage: float
    c: int
    width: float
    """Upper clip width: eps_high(c) of an adaptive method's correct rollout."""
    new: list[torch.Tensor]
    old: list[torch.Tensor]
    key: int = 0

    @property
    def ratios(self):
        """One for each token, or the one of the whole sequence."""
        logs = [n - o for n, o in zip(self.new, self.old, strict=True)]
        if self.method.ratio == "sequence":
            logs = [sum(logs) / len(logs)]
        if self.method.ratio == "product":
            logs = [sum(logs)]
            # Bounded where it would overflow (docs/objective.md); the gradient passes.
            logs = [log + (log.detach().clamp(-20, 20) - log.detach()) for log in logs]
        return [torch.exp(log) for log in logs]

    def per_token(self, values):
        """The value of a whole sequence, once for each of its tokens."""
        return values * len(self.new) if len(values) == 1 else values

    def carried(self, losses):
        """Losses as tokens carry them: that of a product ratio is there once."""
        return losses if self.method.ratio == "product" else self.per_token(losses)


@dataclasses.dataclass
class Answer:
    """What one rollout should give."""

    losses: list[torch.Tensor]
    """One for each token, before any denominator."""
    ratios: list[float]
    clipped: list[bool]
    """One for each ratio, like the next."""
    margins: list[float]
    """How far a ratio is from where `clipped` changes; inf: from nowhere."""


def clipped(rollout):
    """l = max(-A s, -A clip(s, 1 - eps_low, 1 + eps_high))."""
    low, high = 1 - rollout.method.eps_low, 1 + rollout.width
    advantage = rollout.advantage
    losses = [
        torch.maximum(-advantage * s, -advantage * s.clamp(low, high)) for s in rollout.ratios
    ]
    ratios = [float(s.detach()) for s in rollout.ratios]
    flags = [(advantage > 0 and s > high) or (advantage < 0 and s < low) for s in ratios]
    margins = [min(abs(s - low), abs(s - high)) for s in ratios]
    return Answer(rollout.carried(losses), ratios, flags, margins)


def cispo(rollout):
    """l_t = -A clip(s_t, 1 - eps_low, 1 + eps_high) log_probs_t, the weight a constant."""
    low, high = 1 - rollout.method.eps_low, 1 + rollout.width
    ratios = [float(s.detach()) for s in rollout.ratios]
    flags = [rollout.advantage != 0 and not low <= s <= high for s in ratios]
    weights = rollout.per_token([min(max(s, low), high) for s in ratios])
    losses = [-w * rollout.advantage * n for w, n in zip(weights, rollout.new, strict=True)]
    return Answer(losses, ratios, flags, [min(abs(s - low), abs(s - high)) for s in ratios])


def sapo(rollout):
    """l_t = -A 4 / tau sigmoid(tau (s_t - 1)); clipped: its slope, a sech^2, is below 1/2."""
    tau = 1 / (rollout.width if rollout.advantage > 0 else rollout.method.eps_low)
    losses = [
        -rollout.advantage * (2 / tau) * (1 + torch.tanh(tau / 2 * (s - 1))) for s in rollout.ratios
    ]
    ratios = [float(s.detach()) for s in rollout.ratios]
    reach = 2 / tau * math.acosh(math.sqrt(2))
    flags = [rollout.advantage != 0 and abs(s - 1) > reach for s in ratios]
    return Answer(rollout.carried(losses), ratios, flags, [abs(abs(s - 1) - reach) for s in ratios])


def gmpo(rollout):
    """l = -A (prod_t clip(s_t))^(1/n), clipped above where A > 0 and below where A < 0."""
    low, high, advantage = 1 - rollout.method.eps_low, 1 + rollout.width, rollout.advantage
    ratios = [float(s.detach()) for s in rollout.ratios]
    flags = [(advantage > 0 and s > high) or (advantage < 0 and s < low) for s in ratios]
    product = torch.ones((), dtype=torch.float64)
    for s, is_cut in zip(rollout.ratios, flags, strict=True):
        product = product * ((high if advantage > 0 else low) if is_cut else s)
    losses = [-advantage * product ** (1 / len(ratios))] * len(ratios)
    return Answer(losses, ratios, flags, [min(abs(s - low), abs(s - high)) for s in ratios])


def dppo(rollout):
    """l_t = -A min(r_t, C) log_probs_t, the weight a constant; 0 beyond A's own width of p - q."""
    losses, flags, margins = [], [], []
    for new, old in zip(rollout.new, rollout.old, strict=True):
        p, q, advantage = math.exp(float(new.detach())), math.exp(float(old)), rollout.advantage
        excess = -math.inf
        if advantage:
            excess = p - q - rollout.width if advantage > 0 else q - p - rollout.method.eps_low
        weight = 0 if excess > 0 else advantage * min(p / q, rollout.method.ratio_max)
        losses.append(-weight * new)
        flags.append(excess > 0)
        margins.append(abs(excess))
    return Answer(losses, [float(s.detach()) for s in rollout.ratios], flags, margins)


def fspo(rollout):
    """l = max(-A w, -A exp(clip(S, -c sqrt(L), c' sqrt(L)))), S the sum; by S / L if so asked."""
    length = len(rollout.new)
    low, high = -rollout.method.eps_low * length**0.5, rollout.width * length**0.5
    total = sum(float((n - o).detach()) for n, o in zip(rollout.new, rollout.old, strict=True))
    divisor = length if rollout.method.ratio == "sequence" else 1
    (ratio,), advantage = rollout.ratios, rollout.advantage
    edge = math.exp(min(max(total, low), high) / divisor)
    too_far = (advantage > 0 and total > high) or (advantage < 0 and total < low)
    loss = -advantage * (edge + 0 * ratio if too_far else ratio)
    margin = min(abs(total - low), abs(total - high))
    return Answer(rollout.carried([loss]), [float(ratio.detach())], [too_far], [margin])


def topr(rollout):
    """l_t = -A weight log_probs_t, the weight a constant: 1, or where A < 0 the bounded ratio."""
    low, high = 1 - rollout.method.eps_low, 1 + rollout.width
    ratios = [float(s.detach()) for s in rollout.ratios]
    is_wrong = rollout.advantage < 0
    weights = [min(max(s, low), high) if is_wrong else 1 for s in ratios]
    if rollout.method.ratio == "product":
        weights = weights * len(rollout.new)
    losses = [-w * rollout.advantage * n for w, n in zip(weights, rollout.new, strict=True)]
    flags = [is_wrong and not low <= s <= high for s in ratios]
    return Answer(losses, ratios, flags, [min(abs(s - low), abs(s - high)) for s in ratios])


def dcpo(rollout):
    """l_t = max(-A r, -A clip(r, lo(q), hi(q))), and where A < 0 at most -A ratio_max."""
    losses, flags, margins, advantage = [], [], [], rollout.advantage
    largest = torch.tensor(rollout.method.ratio_max, dtype=torch.float64)
    for ratio, old in zip(rollout.ratios, rollout.old, strict=True):
        q, value = math.exp(float(old)), float(ratio.detach())
        low = 0.5 + 0.5 * math.sqrt(max(1 - 4 * rollout.method.eps_low / q, 0))
        high = min(0.5 + 0.5 * math.sqrt(1 + 4 * rollout.width / q), float(largest))
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(low, high))
        if advantage < 0:
            loss = torch.minimum(loss, -advantage * largest)
        losses.append(loss)
        flags.append(
            value > high if advantage > 0 else advantage < 0 and not low <= value <= float(largest)
        )
        margins.append(min(abs(value - edge) for edge in (low, high, float(largest))))
    ratios = [float(s.detach()) for s in rollout.ratios]
    return Answer(losses, ratios, flags, margins)


def aspo(rollout):
    """-A times 1 / r (A > 0) or r (A < 0), a constant; the gradient is that of log_probs_t."""
    losses, flags, margins, advantage = [], [], [], rollout.advantage
    low, high = 1 - rollout.method.eps_low, 1 + rollout.width
    ratios = [float(s.detach()) for s in rollout.ratios]
    for ratio, new in zip(ratios, rollout.new, strict=True):
        masked = ratio > high if advantage > 0 else advantage < 0 and ratio < low
        weight = 1 / min(ratio, high) if advantage > 0 else max(ratio, low)
        weight = min(weight, rollout.method.ratio_max)
        slope = 0 if masked else weight
        losses.append(-advantage * (weight + slope * (new - new.detach())))
        flags.append(masked)
        margins.append(min(abs(ratio - low), abs(ratio - high)))
    return Answer(losses, ratios, flags, margins)


def atr(rollout):
    """l_t = -A r_t; beyond r - 1 - ln r = delta, where A pushes to, the ratio at delta instead."""
    losses, flags, margins, advantage = [], [], [], rollout.advantage
    deltas = {1: rollout.width, -1: rollout.method.eps_low}
    for ratio in rollout.ratios:
        value = float(ratio.detach())
        excess = value - 1 - math.log(value) - deltas[1 if advantage > 0 else -1]
        is_pushed = advantage * (value - 1) > 0
        flags.append(is_pushed and excess > 0)
        near, far = 1.0, (1e3 if value > 1 else 1e-3)  # the root of the excess lies between
        for _ in range(200):
            middle = (near + far) / 2
            is_inside = middle - 1 - math.log(middle) < deltas[1 if advantage > 0 else -1]
            near, far = (middle, far) if is_inside else (near, middle)
        losses.append(-advantage * (near + 0 * ratio if flags[-1] else ratio))
        margins.append(abs(excess))
    ratios = [float(s.detach()) for s in rollout.ratios]
    return Answer(rollout.carried(losses), ratios, flags, margins)


def abc(rollout):
    """l_t = -A clip(r_t, 1 - a, 1 + b), a and b by the sign of A."""
    method, advantage = rollout.method, rollout.advantage
    low, high = 1 - method.eps_low, 1 + method.eps_high_wrong
    if advantage > 0:
        low, high = 1 - method.eps_low_correct, 1 + rollout.width
    losses = [-advantage * s.clamp(low, high) for s in rollout.ratios]
    ratios = [float(s.detach()) for s in rollout.ratios]
    flags = [advantage != 0 and not low <= s <= high for s in ratios]
    margins = [min(abs(s - low), abs(s - high)) for s in ratios]
    return Answer(rollout.carried(losses), ratios, flags, margins)


def dgpo(rollout):
    """l_t = -A W p_t, the weight W of its probability a constant; 1 / p_old within PPO's bounds."""
    losses, flags, margins, advantage = [], [], [], rollout.advantage
    n, m = rollout.method.decay_low, rollout.method.decay_high
    edge = 1 + rollout.width if advantage > 0 else 1 - rollout.method.eps_low
    for new, old in zip(rollout.new, rollout.old, strict=True):
        p, q = math.exp(float(new.detach())), math.exp(float(old))
        flags.append((advantage > 0 and p > edge * q) or (advantage < 0 and p < edge * q))
        weight = 1 / q
        if flags[-1]:  # C p^n or C p^(-1/m), which is 1 / p_old at the edge, p = edge p_old
            power = -1 / m if advantage > 0 else n
            weight = p**power * (edge * q) ** -power / q
        losses.append(-advantage * weight * torch.exp(new))
        margins.append(abs(p / q - edge))
    return Answer(losses, [float(s.detach()) for s in rollout.ratios], flags, margins)


def split_mix(state):
    """SplitMix64's next output, in Python's integers."""
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def nsr(rollout):
    """PPO's loss, or -A r for a clipped ratio that noise of its token brings back."""
    answer, width = clipped(rollout), rollout.method.rescue_noise
    losses, flags, margins = [], [], []
    bound = 1 + rollout.width if rollout.advantage > 0 else 1 - rollout.method.eps_low
    for place, ratio in enumerate(rollout.ratios):
        draw = split_mix(rollout.key + place * 0x9E3779B97F4A7C15) // 2**11 / 2**53
        noise = 1 - width + 2 * width * draw
        is_clipped, value = answer.clipped[place], answer.ratios[place]
        is_back = noise * value <= bound if rollout.advantage > 0 else noise * value >= bound
        loss = -rollout.advantage * ratio
        losses.append(loss if not is_clipped or is_back else -rollout.advantage * bound + 0 * ratio)
        flags.append(is_clipped and not is_back)
        margins.append(min(answer.margins[place], abs(noise * value - bound)))
    return Answer(rollout.carried(losses), answer.ratios, flags, margins)


def masked(rollout, answer):
    """OPSM: nothing is left of a wrong rollout whose tokens are, on average, delta less likely."""
    logs = [float((n - o).detach()) for n, o in zip(rollout.new, rollout.old, strict=True)]
    drop = -sum(logs) / len(logs) - rollout.method.off_policy_mask
    margins = [min(margin, abs(drop)) for margin in answer.margins]
    if rollout.advantage >= 0 or drop <= 0:
        return dataclasses.replace(answer, margins=margins)
    losses = [0 * loss for loss in answer.losses]
    return dataclasses.replace(
        answer, losses=losses, clipped=[True] * len(answer.clipped), margins=margins
    )


REFERENCES = {
    "clipped": clipped,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "dppo": dppo,
    "fspo": fspo,
    "topr": topr,
    "dcpo": dcpo,
    "aspo": aspo,
    "atr": atr,
    "abc": abc,
    "dgpo": dgpo,
    "nsr": nsr,
}
"""The equation of each loss family."""


def reference(case, method, log_probs, old_log_probs):
    """The equations, one token at a time, in scalar float64 with autograd.

    Returns (loss, ratios, clipped, margins): the last three once per sequence or per token.
    """
    total, answers, start = torch.zeros((), dtype=torch.float64), [], 0
    rows = zip(case.num_correct, case.advantages, case.counts, strict=True)
    for key, (c, advantage, count) in enumerate(rows):
        tokens = range(start, start + count)
        start += count
        width = method.eps_high_max
        if method.adaptive:
            width = method.eps_low
            if advantage > 0:
                share = (GROUP_SIZE - c) / (GROUP_SIZE - 1)
                floor = method.eps_low if method.has_floor else 0.0
                width = floor + (method.eps_high_max - floor) * share
        rollout = Rollout(
            method,
            advantage=float(advantage),
            c=c,
            width=width,
            new=[log_probs[t].double() for t in tokens],
            old=[old_log_probs[t].double() for t in tokens],
            key=key,
        )
        answer = REFERENCES[method.family](rollout)
        if method.off_policy_mask is not None:
            answer = masked(rollout, answer)
        divisor = {
            "token_mean": sum(case.counts) + 5,
            "sequence_mean": count * (len(case.counts) + 2),
            "sequence_sum": len(case.counts) + 2,
            "constant": MAX_RESPONSE_TOKENS * (len(case.counts) + 2),
        }[method.aggregation]
        total = total + sum(answer.losses) / divisor
        answers.append(answer)
    ratios = [s for answer in answers for s in answer.ratios]
    flags = [flag for answer in answers for flag in answer.clipped]
    return total, ratios, flags, [margin for answer in answers for margin in answer.margins]
