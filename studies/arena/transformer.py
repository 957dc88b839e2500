"""The arena's second policy and its task: a small transformer per seed, whose features are learned.

A prompt is a sequence of L symbols, a response one of L tokens. A random table gives the right
token from the symbol at the same place and the token just written, so the right response is a chain
of L steps, each of which rests on the one before. What symbols and tokens mean is not in the input:
the transformer learns it, first from demonstrations, then from rewards. A demonstrator takes a
wrong token in some entries of the table often and in others seldom, always the same; so prompts
differ in difficulty.

All V**L responses are enumerated to compute pass rates and KL divergences exactly. The weights of S
transformers, one per seed, are rows of one float32 matrix, and their products batched over seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from studies.arena.task import Responses

NUM_SYMBOLS = 8
NUM_TOKENS = 8
MAX_TOKENS = 3
"""L: length of every prompt and every response."""
NUM_TRAINING = 256
NUM_HELD_OUT = 128

WIDTH, NUM_LAYERS, NUM_HEADS = 32, 2, 2
_PLACES = 2 * MAX_TOKENS - 1
SHAPES = (
    (NUM_SYMBOLS + NUM_TOKENS, WIDTH),  # embeddings of symbols and of tokens
    (_PLACES, WIDTH),  # embeddings of places
    *((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)) * NUM_LAYERS,
    (WIDTH, NUM_TOKENS),
)
"""Shapes of a transformer's weights: embeddings; query, key and value, output, up, down of each
layer; logits."""
NUM_WEIGHTS = sum(rows * columns for rows, columns in SHAPES)

WARM_STEPS, WARM_PROMPTS, WARM_RATE = 150, 64, 3e-3
SHARPEST = 0.9
"""Largest probability that a demonstrator writes the right token."""
_AT_ONCE = 8
"""Prompts whose responses are enumerated at once, so that activations stay in the cache."""
_START = NUM_TOKENS
"""Row of the table for the first token."""


@dataclass(frozen=True)
class Prompts:
    """N prompts for each of S seeds."""

    symbols: Tensor
    """[S, N, L] int64 in 0..NUM_SYMBOLS-1."""
    answers: Tensor
    """[S, N, L] int64: the right response."""

    def __len__(self) -> int:
        """Number N of prompts of each seed."""
        return self.symbols.shape[1]

    def of(self, prompts: slice) -> Prompts:
        """A slice of the N prompts."""
        return Prompts(self.symbols[:, prompts], self.answers[:, prompts])

    def pick(self, index: Tensor) -> Prompts:
        """The prompts at `index` [S, n]."""
        places = index[:, :, None].expand(-1, -1, MAX_TOKENS)
        return Prompts(self.symbols.gather(1, places), self.answers.gather(1, places))


@dataclass(frozen=True)
class Task:
    """Training prompts, held-out prompts and initial weights."""

    training: Prompts
    held_out: Prompts
    weights: Tensor
    """[S, NUM_WEIGHTS] float32, after the warm start."""
    max_tokens: int = MAX_TOKENS


@lru_cache(maxsize=1)
def make_task(seeds: range) -> Task:
    """Make one task per seed; each depends on its seed alone. The last result is kept."""
    made = [_one(seed) for seed in seeds]
    symbols, answers, shown, written, weights = (
        torch.stack(one) for one in zip(*made, strict=True)
    )
    parts = [slice(None, NUM_TRAINING), slice(NUM_TRAINING, None)]
    training, held_out = (Prompts(symbols[:, part], answers[:, part]) for part in parts)
    return Task(training, held_out, _warm_start(weights, shown, written))


def _one(seed: int) -> tuple[Tensor, ...]:
    """Prompts, answers, demonstrated prompts and responses, and random weights of one seed."""
    generator = torch.Generator().manual_seed(seed)

    def integers(limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, generator=generator)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    right, wrong = integers(NUM_TOKENS, 2, NUM_TOKENS + 1, NUM_SYMBOLS)
    skill = SHARPEST * uniform(NUM_TOKENS + 1, NUM_SYMBOLS)
    prompts = torch.cartesian_prod(*[torch.arange(NUM_SYMBOLS)] * MAX_TOKENS)
    order = torch.randperm(len(prompts), generator=generator)
    symbols = prompts[order[: NUM_TRAINING + NUM_HELD_OUT]]
    shown = integers(NUM_SYMBOLS, WARM_STEPS * WARM_PROMPTS, MAX_TOKENS)

    def write(prompts: Tensor, skill: Tensor) -> Tensor:
        state, tokens = torch.full((len(prompts),), _START), []
        for symbol in prompts.unbind(1):
            is_right = uniform(len(prompts)) < skill[state, symbol]
            state = torch.where(is_right, right[state, symbol], wrong[state, symbol])
            tokens.append(state)
        return torch.stack(tokens, dim=1)

    answers, written = write(symbols, torch.ones_like(skill)), write(shown, skill)
    weights = [
        torch.randn(shape, generator=generator).flatten() * (shape[0] ** -0.5 if place > 1 else 1.0)
        for place, shape in enumerate(SHAPES)
    ]
    return symbols, answers, shown, written, torch.cat(weights)


def _warm_start(weights: Tensor, shown: Tensor, written: Tensor) -> Tensor:
    """Train every seed's random weights on its demonstrations, [S, steps * prompts, L]."""
    weights = weights.clone().requires_grad_()
    optimizer = torch.optim.AdamW([weights], lr=WARM_RATE, weight_decay=0.0)
    for step in range(WARM_STEPS):
        part = slice(step * WARM_PROMPTS, (step + 1) * WARM_PROMPTS)
        tokens = written[:, part, None]
        loss = -_of_tokens(_of_responses(weights, shown[:, part], tokens[..., :-1]), tokens)
        (weights.grad,) = torch.autograd.grad(loss.mean(dim=(1, 2, 3)).sum(), weights)
        optimizer.step()
    return weights.detach()


@dataclass(frozen=True)
class Tree:
    """Continuations of a prompt, as a tree of m nodes, one for each token written."""

    depths: Tensor
    """[m] int64: number of tokens before each in its response."""
    is_before: Tensor
    """[m, m] bool: whether the second node is the first or comes before it in its response."""


def chains(k: int, length: int) -> Tree:
    """A tree of k separate responses of `length` tokens."""
    response = torch.arange(k).repeat_interleave(length)
    depths = torch.arange(length).repeat(k)
    return Tree(depths, (response[:, None] == response) & (depths <= depths[:, None]))


def all_beginnings() -> tuple[Tree, Tensor]:
    """All responses of 1 to L - 1 tokens, by length, then in order; the last token of each [m]."""
    paths = [
        torch.cartesian_prod(*[torch.arange(NUM_TOKENS)] * length).view(-1, length)
        for length in range(1, MAX_TOKENS)
    ]
    padded = torch.cat(
        [F.pad(path, (0, MAX_TOKENS - 1 - path.shape[1]), value=-1) for path in paths]
    )
    is_before = ((padded[:, None] == padded) | (padded == -1)).all(dim=-1)
    depths = torch.cat([torch.full((len(path),), path.shape[1] - 1) for path in paths])
    return Tree(depths, is_before), torch.cat([path[:, -1] for path in paths])


def forward(weights: Tensor, symbols: Tensor, written: Tensor, tree: Tree) -> Tensor:
    """Log-probs of the next token, before any is written and after each node of a tree.

    A prompt and its continuations are one sequence, so that the prompt is computed once. A token
    attends to the prompt, to the tokens before it in its own response, and to itself.

    Args:
        weights: [S, NUM_WEIGHTS].
        symbols: [S, N, L] int64.
        written: [S, N, m] int64, the tokens of the nodes.
        tree: the m nodes.

    Returns:
        [S, N, 1 + m, NUM_TOKENS] with autograd, of the weights' dtype.
    """
    seeds, number, _ = written.shape
    sizes = [rows * columns for rows, columns in SHAPES]
    of_ids, of_places, *layers, to_logits = (
        part.view(seeds, *shape)
        for part, shape in zip(weights.split(sizes, dim=1), SHAPES, strict=True)
    )
    ids = torch.cat([symbols, NUM_SYMBOLS + written], dim=2)
    places = torch.cat([torch.arange(MAX_TOKENS), MAX_TOKENS + tree.depths])
    mask = torch.ones(len(places), len(places), dtype=torch.bool).tril()
    mask[MAX_TOKENS:, MAX_TOKENS:] = tree.is_before
    stream = _rows(of_ids, ids.flatten(1)).view(seeds, number, -1, WIDTH)
    stream = (stream + of_places[:, None, places]).flatten(1, 2)
    for layer in range(NUM_LAYERS):
        inward, outward, up, down = layers[4 * layer : 4 * layer + 4]
        stream = stream + _attend(_norm(stream) @ inward, number, mask) @ outward
        stream = stream + (_norm(stream) @ up).relu() @ down
    last = _norm(stream.view(seeds, number, -1, WIDTH)[:, :, MAX_TOKENS - 1 :]).flatten(1, 2)
    logits = (last @ to_logits).view(seeds, number, -1, NUM_TOKENS)
    return logits - logits.logsumexp(dim=-1, keepdim=True)


def _of_responses(weights: Tensor, symbols: Tensor, written: Tensor) -> Tensor:
    """Log-probs of the next token before and after each one `written` [S, N, k, t].

    [S, N, k, t + 1, NUM_TOKENS] with autograd.
    """
    _, _, k, length = written.shape
    found = forward(weights, symbols, written.flatten(2), chains(k, length))
    before = found[:, :, None, :1].expand(-1, -1, k, -1, -1)
    after = found[:, :, 1:].view(*written.shape, NUM_TOKENS)
    return torch.cat([before, after], dim=3)


def _norm(stream: Tensor) -> Tensor:
    return F.rms_norm(stream, (WIDTH,))


def _rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows of each seed's table [S, n, d] at `index` [S, m]."""
    seeds, number, _ = table.shape
    shifted = index + number * torch.arange(seeds)[:, None]
    return F.embedding(shifted, table.flatten(0, 1))


def _attend(inward: Tensor, number: int, mask: Tensor) -> Tensor:
    """Self-attention within each of `number` sequences, [S, number * places, WIDTH]."""
    seeds, places = len(inward), len(mask)
    heads = inward.view(seeds * number, places, 3, NUM_HEADS, -1)
    query, key, value = heads.permute(2, 0, 3, 1, 4)
    found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return found.transpose(1, 2).reshape(seeds, -1, WIDTH)


def _of_tokens(policy: Tensor, tokens: Tensor) -> Tensor:
    return policy.gather(-1, tokens[..., None])[..., 0]


@dataclass(frozen=True)
class Policy:
    """The policy on N prompts of each seed; what is asked of it is computed then."""

    weights: Tensor
    """[S, NUM_WEIGHTS], not to be changed in place afterwards."""
    prompts: Prompts

    @cached_property
    def levels(self) -> list[Tensor]:
        """Log-probs of the next token after all t tokens, [S, N, V**t, V] for t = 0..L-1."""
        tree, last = all_beginnings()
        symbols = self.prompts.symbols.split(_AT_ONCE, dim=1)
        with torch.no_grad():
            parts = [
                forward(self.weights, part, last.expand(*part.shape[:2], -1), tree)
                for part in symbols
            ]
        sizes = [NUM_TOKENS**length for length in range(MAX_TOKENS)]
        return list(torch.cat(parts, dim=1).split(sizes, dim=2))


# As in task.py, but lazy: a table of all log-probs would cost more than those that are asked for.
log_policy = Policy


def log_probs(policy: Policy, responses: Responses) -> Tensor:
    """Log-prob of every token, [S, N, k, L] with autograd."""
    tokens = responses.tokens
    before = tokens[..., :-1]
    return _of_tokens(_of_responses(policy.weights, policy.prompts.symbols, before), tokens)


@torch.no_grad()
def sample(weights: Tensor, prompts: Prompts, uniforms: Tensor) -> Responses:
    """Sample by inverse CDF of `uniforms` [S, N, k, L]; arms that share them are paired."""
    tokens = torch.zeros((*uniforms.shape[:3], 0), dtype=torch.long)
    for t in range(MAX_TOKENS):
        policy = _of_responses(weights, prompts.symbols, tokens)[:, :, :, -1]
        cumulative = policy.exp().cumsum(dim=-1)
        token = (uniforms[..., t, None] >= cumulative).sum(dim=-1, keepdim=True)
        # By rounding, the last sum may be below 1.
        tokens = torch.cat([tokens, token.clamp(max=NUM_TOKENS - 1)], dim=-1)
    right = (tokens == prompts.answers[:, :, None]).all(dim=-1)
    start = torch.full_like(tokens[..., :1], NUM_TOKENS)
    return Responses(
        tokens=tokens,
        states=torch.cat([start, tokens[..., :-1]], dim=-1),
        is_token=torch.ones_like(tokens, dtype=torch.bool),
        rewards=right.double(),
    )


@torch.no_grad()
def exact(policy: Policy, prompts: Prompts, reference: Policy) -> tuple[Tensor, Tensor]:
    """Exact pass rates, and KL divergences of whole responses from `reference` in nats.

    Args:
        policy: the policy on these prompts.
        prompts: N prompts for each of S seeds.
        reference: the policy with other weights on the same prompts.

    Returns:
        Two tensors [S, N] float64: the probability of the right response, and
        KL(policy || reference).
    """
    written = torch.zeros_like(policy.levels[0][..., 0])
    divergence, row = torch.zeros_like(written[..., 0]), torch.zeros_like(prompts.answers[..., :1])
    for mine, other, token in zip(
        policy.levels, reference.levels, prompts.answers.split(1, dim=-1), strict=True
    ):
        divergence += (written.exp() * (mine.exp() * (mine - other)).sum(dim=-1)).sum(dim=-1)
        written = (written[..., None] + mine).flatten(2)
        row = row * NUM_TOKENS + token
    return written.gather(2, row)[..., 0].double().exp(), divergence.double()
