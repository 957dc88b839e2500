"""The arena's task and its policy: small enough to know every pass rate exactly.

A prompt is a vector of features. A response is a walk over the tokens 0..V-1 that ends with EOS.
It is right when its last token before EOS is the prompt's target, whatever way led there, and wrong
when it has no EOS within L tokens. The policy is one softmax layer: the logits of the next token
are linear in the prompt's features, with weights of their own for every token just written. So
prompts share weights, as they do in a language model: an update on one moves all that are like it.
Targets are not linear in the features, so no weights solve every prompt: pass@1 can be won at the
price of prompts that are given up, which is what pass@k shows.

The pass rate is a sum over all walks, exact by dynamic programming. S tasks, one a seed, are
batched.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

NUM_TOKENS = 8
"""V; EOS is token V, and "nothing written yet" is state V."""
MAX_TOKENS = 12
"""L: longest response, EOS included."""
NUM_FEATURES = 12
NUM_TRAINING = 512
NUM_HELD_OUT = 512
SPREAD = 2.0
"""Standard deviation of the initial logits: how unequally hard prompts are."""
NUM_HIDDEN = 16
"""Hidden units of the network that says a prompt's target."""
BEND = 4.0
"""Scale of its inputs: how far targets are from linear."""

EOS = NUM_TOKENS
_STATES = NUM_TOKENS + 1


@dataclass(frozen=True)
class Prompts:
    """N prompts for each of S seeds."""

    features: torch.Tensor
    """[S, N, F] float64, each of norm 1."""
    targets: torch.Tensor
    """[S, N] int64 in 0..V-1."""

    def of(self, prompts: slice) -> Prompts:
        """Some of the N."""
        return Prompts(self.features[:, prompts], self.targets[:, prompts])

    def pick(self, index: torch.Tensor) -> Prompts:
        """Those at `index` [S, n]."""
        places = index[:, :, None].expand(-1, -1, self.features.shape[2])
        return Prompts(self.features.gather(1, places), self.targets.gather(1, index))


@dataclass(frozen=True)
class Task:
    """Prompts to train on, prompts never trained on, and the weights to begin with."""

    training: Prompts
    held_out: Prompts
    weights: torch.Tensor
    """[S, F, V + 1, V + 1] float64: feature, state, next token."""


def make_task(seeds: range) -> Task:
    """The tasks of `seeds`, one after the other: each depends on its own seed alone."""
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
    return logits.view(seeds, -1, states, states).log_softmax(dim=-1)


def pass_rates(weights: torch.Tensor, prompts: Prompts) -> torch.Tensor:
    """Exact probability that a response is right, [S, N] float64."""
    policy = log_policy(weights, prompts).exp()
    at = torch.zeros(policy.shape[:3], dtype=torch.float64)
    at[:, :, EOS] = 1
    is_target = F.one_hot(prompts.targets, _STATES).double()
    ends_right = (is_target * policy[..., EOS]).unsqueeze(-1)
    onward = policy.clone()
    onward[..., EOS] = 0
    total = torch.zeros(policy.shape[:2], dtype=torch.float64)
    for _ in range(MAX_TOKENS):
        total += (at.unsqueeze(-2) @ ends_right).squeeze(-1).squeeze(-1)
        at = (at.unsqueeze(-2) @ onward).squeeze(-2)
    return total


@dataclass(frozen=True)
class Responses:
    """k responses to each of N prompts, for S seeds; what follows EOS is padding."""

    tokens: torch.Tensor
    """[S, N, k, L] int64."""
    states: torch.Tensor
    """[S, N, k, L] int64: what each token was written after."""
    is_token: torch.Tensor
    """[S, N, k, L] bool."""
    rewards: torch.Tensor
    """[S, N, k] float64: 1 right, 0 wrong."""

    def of(self, prompts: slice) -> Responses:
        """Those to some of the N prompts."""
        return Responses(*(getattr(self, field.name)[:, prompts] for field in fields(self)))


def sample(weights: torch.Tensor, prompts: Prompts, uniforms: torch.Tensor) -> Responses:
    """Responses by inverse CDF of `uniforms` [S, N, k, L]: arms that share them are paired."""
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
        # The last sum may miss 1 by a rounding error.
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
    """Log-prob of every token, [S, N, k, L] with autograd; `policy` as of `log_policy`."""
    places = responses.states * _STATES + responses.tokens
    flat = policy.reshape(*policy.shape[:2], -1)
    return flat.gather(2, places.flatten(2)).view(places.shape)
