"""The arena's task and policy, small enough to compute every pass rate exactly.

A prompt is a vector of features. A response is a sequence of tokens 0..V-1 that ends with EOS. It
is correct if its last token before EOS is the prompt's target, and wrong if there is no EOS within
L tokens. The policy is one softmax layer: the logits of the next token are linear in the prompt's
features, with separate weights for each previous token. Prompts share weights, as in a language
model, so an update on one moves all that are similar. Targets are not linear in the features, so no
weights solve every prompt: pass@1 can rise at the cost of prompts never solved again, and pass@k
shows it.

The pass rate is a sum over all sequences, computed exactly by dynamic programming. S tasks, one per
seed, are batched.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

NUM_TOKENS = 8
"""V. EOS is token V; state V is the start of a response."""
MAX_TOKENS = 12
"""L: longest response, EOS included."""
NUM_FEATURES = 12
NUM_TRAINING = 512
NUM_HELD_OUT = 512
SPREAD = 2.0
"""Standard deviation of the initial logits: how much prompts differ in difficulty."""
NUM_HIDDEN = 16
"""Hidden units of the network that assigns targets."""
BEND = 4.0
"""Scale of its inputs: how nonlinear targets are."""

EOS = NUM_TOKENS
_STATES = NUM_TOKENS + 1


@dataclass(frozen=True)
class Prompts:
    """N prompts for each of S seeds."""

    features: torch.Tensor
    """[S, N, F] float64, each of norm 1."""
    targets: torch.Tensor
    """[S, N] int64 in 0..V-1."""

    def __len__(self) -> int:
        """Number N of prompts of each seed."""
        return self.targets.shape[1]

    def of(self, prompts: slice) -> Prompts:
        """A slice of the N prompts."""
        return Prompts(self.features[:, prompts], self.targets[:, prompts])

    def pick(self, index: torch.Tensor) -> Prompts:
        """The prompts at `index` [S, n]."""
        places = index[:, :, None].expand(-1, -1, self.features.shape[2])
        return Prompts(self.features.gather(1, places), self.targets.gather(1, index))


@dataclass(frozen=True)
class Task:
    """Training prompts, held-out prompts and initial weights."""

    training: Prompts
    held_out: Prompts
    weights: torch.Tensor
    """[S, F, V + 1, V + 1] float64: feature, state, next token."""
    max_tokens: int = MAX_TOKENS


def make_task(seeds: range) -> Task:
    """Make one task per seed; each depends on its seed alone."""
    made = [_one(seed) for seed in seeds]
    features, targets, weights = (torch.stack(column) for column in zip(*made, strict=True))
    parts = [slice(None, NUM_TRAINING), slice(NUM_TRAINING, None)]
    training, held_out = (Prompts(features[:, part], targets[:, part]) for part in parts)
    return Task(training, held_out, weights)


def _one(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    features = normal(NUM_TRAINING + NUM_HELD_OUT, NUM_FEATURES)
    features = features / features.norm(dim=1, keepdim=True)
    hidden = (BEND * features @ normal(NUM_FEATURES, NUM_HIDDEN)).tanh()
    weights = SPREAD * normal(NUM_FEATURES, _STATES, _STATES)
    return features, (hidden @ normal(NUM_HIDDEN, NUM_TOKENS)).argmax(dim=1), weights


def log_policy(weights: torch.Tensor, prompts: Prompts) -> torch.Tensor:
    """Log-probs of the next token, [S, N, state, V + 1] float64 with autograd."""
    seeds, features, states, _ = weights.shape
    logits = torch.bmm(prompts.features, weights.reshape(seeds, features, -1))
    logits = logits.view(seeds, -1, states, states)
    # log_softmax takes four times as long over so few entries.
    return logits - logits.logsumexp(dim=-1, keepdim=True)


def exact(
    policy: torch.Tensor, prompts: Prompts, reference: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact pass rates, and KL divergences of whole responses from `reference` in nats.

    Args:
        policy: result of `log_policy`.
        prompts: its N prompts for each seed.
        reference: result of `log_policy` for the same prompts with other weights.

    Returns:
        Two tensors [S, N] float64: the probability that a response is correct, and
        KL(policy || reference).
    """
    visits, probs = _visits(policy), policy.exp()
    is_target = F.one_hot(prompts.targets, _STATES).double()
    rates = (visits * is_target * probs[..., EOS]).sum(dim=-1)
    of_states = (probs * (policy - reference)).sum(dim=-1)
    return rates, (visits * of_states).sum(dim=-1)


def _visits(policy: torch.Tensor) -> torch.Tensor:
    """Expected number of a response's tokens that follow each state, [S, N, V + 1]."""
    onward = policy.flatten(0, 1).exp()
    onward[..., EOS] = 0
    at = torch.zeros(len(onward), 1, _STATES, dtype=torch.float64)
    at[..., EOS] = 1
    total = at
    for _ in range(MAX_TOKENS - 1):
        at = at @ onward
        total = total + at
    return total.view(policy.shape[:3])


@dataclass(frozen=True)
class Responses:
    """k responses to each of N prompts, for S seeds; tokens after EOS are padding."""

    tokens: torch.Tensor
    """[S, N, k, L] int64."""
    states: torch.Tensor
    """[S, N, k, L] int64: the token before each token; V at the start."""
    is_token: torch.Tensor
    """[S, N, k, L] bool."""
    rewards: torch.Tensor
    """[S, N, k] float64: 1 correct, 0 wrong."""

    def of(self, prompts: slice) -> Responses:
        """The responses to a slice of the N prompts."""
        return Responses(*(getattr(self, field.name)[:, prompts] for field in fields(self)))


def sample(weights: torch.Tensor, prompts: Prompts, uniforms: torch.Tensor) -> Responses:
    """Sample by inverse CDF of `uniforms` [S, N, k, L]; arms that share them are paired."""
    cumulative = log_policy(weights, prompts).exp().cumsum(dim=-1)
    seeds, number, k, length = uniforms.shape
    table = cumulative.view(seeds * number, _STATES, _STATES)
    row = torch.arange(seeds * number)[:, None].expand(-1, k)
    draws = uniforms.view(seeds * number, k, length)
    state = torch.full((seeds * number, k), EOS)
    goes_on = torch.ones_like(state, dtype=torch.bool)
    last = state
    tokens, states, is_token = [], [], []
    for t in range(length):
        # By rounding, the last sum may be below 1.
        token = (draws[:, :, t, None] >= table[row, state]).sum(dim=-1).clamp(max=EOS)
        tokens.append(token)
        states.append(state)
        is_token.append(goes_on)
        last = torch.where(goes_on, state, last)
        goes_on = goes_on & (token != EOS)
        state = torch.where(goes_on, token, state)
    right = ~goes_on & (last == prompts.targets.reshape(-1)[:, None])
    shape = (seeds, number, k)
    return Responses(
        tokens=torch.stack(tokens, -1).view(*shape, -1),
        states=torch.stack(states, -1).view(*shape, -1),
        is_token=torch.stack(is_token, -1).view(*shape, -1),
        rewards=right.double().view(shape),
    )


def log_probs(policy: torch.Tensor, responses: Responses) -> torch.Tensor:
    """Log-prob of every token, [S, N, k, L] with autograd; `policy`: result of `log_policy`."""
    places = responses.states * _STATES + responses.tokens
    flat = policy.reshape(*policy.shape[:2], -1)
    return flat.gather(2, places.flatten(2)).view(places.shape)
