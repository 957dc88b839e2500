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
    """[S, N, F] float32, each of norm 1."""
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
    """[S, F, V + 1, V + 1] float32: feature, state, next token."""
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
    targets = (hidden @ normal(NUM_HIDDEN, NUM_TOKENS)).argmax(dim=1)
    return features.float(), targets, weights.float()


def log_policy(weights: torch.Tensor, prompts: Prompts) -> torch.Tensor:
    """Log-probs of the next token, [S, N, state, V + 1] in the weights' dtype, with autograd."""
    seeds, features, states, _ = weights.shape
    logits = torch.bmm(prompts.features.to(weights.dtype), weights.reshape(seeds, features, -1))
    return logits.view(seeds, -1, states, states).log_softmax(dim=-1)


def exact(
    policy: torch.Tensor, prompts: Prompts, reference: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact pass rates, and KL divergences of whole responses from `reference` in nats.

    Args:
        policy: result of `log_policy`.
        prompts: its N prompts for each seed.
        reference: result of `log_policy` for the same prompts with other weights.

    Returns:
        Two tensors [S, N] float64, with the precision of `policy`: the probability that a response
        is correct, and KL(policy || reference).
    """
    probs = policy.exp()
    visits = _visits(probs)
    ends = (visits[..., :EOS] * probs[..., :EOS, EOS]).gather(2, prompts.targets[..., None])
    of_states = (probs * (policy - reference)).sum(dim=-1)
    return ends[..., 0].double(), (visits * of_states).sum(dim=-1).double()


def _visits(probs: torch.Tensor) -> torch.Tensor:
    """Expected number of a response's tokens that follow each state, [S, N, V + 1]."""
    onward = probs.flatten(0, 1).clone()
    onward[..., EOS] = 0
    at = onward.new_zeros(len(onward), 1, _STATES)
    at[..., EOS] = 1
    total = at
    for _ in range(MAX_TOKENS - 1):
        at = at @ onward
        total = total + at
    return total.view(probs.shape[:3])


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
    seeds, number, k, length = uniforms.shape
    cumulative = log_policy(weights, prompts).exp().cumsum(dim=-1)
    # A row for each token but EOS: the fast layout, and EOS takes what rounding leaves.
    thresholds = cumulative[..., :EOS].reshape(-1, EOS).T.contiguous()
    first = (torch.arange(seeds * number) * _STATES).repeat_interleave(k)
    draws = uniforms.reshape(-1, length).T.contiguous()
    tokens = torch.empty(draws.shape, dtype=torch.int64)
    states, is_token = torch.empty_like(tokens), torch.empty(draws.shape, dtype=torch.bool)
    state = last = torch.full_like(first, EOS)
    goes_on = torch.ones_like(state, dtype=torch.bool)
    for t in range(length):
        passed = draws[t] >= thresholds.index_select(1, first + state)
        token = passed.view(torch.int8).sum(dim=0, dtype=torch.int8).long()
        tokens[t], states[t], is_token[t] = token, state, goes_on
        last = torch.where(goes_on, state, last)
        goes_on = goes_on & (token != EOS)
        state = torch.where(goes_on, token, state)
    right = ~goes_on & (last == prompts.targets.reshape(-1).repeat_interleave(k))
    shape = (seeds, number, k)
    return Responses(
        tokens=tokens.T.reshape(*shape, -1),
        states=states.T.reshape(*shape, -1),
        is_token=is_token.T.reshape(*shape, -1),
        rewards=right.double().view(shape),
    )


def log_probs(policy: torch.Tensor, responses: Responses) -> torch.Tensor:
    """Log-prob of every token, [S, N, k, L] with autograd; `policy`: result of `log_policy`."""
    places = responses.states * _STATES + responses.tokens
    flat = policy.reshape(*policy.shape[:2], -1)
    return flat.gather(2, places.flatten(2)).view(places.shape)
