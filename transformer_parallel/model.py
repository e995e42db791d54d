"""The model of this folder: a decoder-only transformer in plain PyTorch, without parallelism.

    tokens (B, T) -> embedding + positions -> 4 x Block -> norm -> head -> logits (B, T, vocabulary)

    Block:   x + attention(norm1(x)), then x + mlp(norm2(x))

B is the number of rows of a batch, T the number of tokens of a row, N the number of ranks.

With 144 units and 4 blocks, the model has 1,030,752 parameters, 97% of them in the blocks. The
programs of this folder change where its weights, activations and layers are; no program changes
what the model computes.

Sources: "Attention Is All You Need" (https://arxiv.org/abs/1706.03762) for attention and positions;
GPT-2 for norms in front of the layers.
"""

import math
import re
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class Shape(NamedTuple):
    """The sizes of the model. 144 units and 12 heads divide by 2, 3 and 4 ranks."""

    vocabulary: int = 96
    units: int = 144
    heads: int = 12
    blocks: int = 4


class Attention(nn.Module):
    """Causal self-attention: each token reads itself and earlier ones; keeps (B, T, units)."""

    def __init__(self, units: int, heads: int) -> None:
        super().__init__()
        self.head_units = units // heads
        # Three layers and not one of three times the width: each layer can be split by heads.
        self.query, self.key, self.value = (nn.Linear(units, units) for _ in range(3))
        self.out = nn.Linear(units, units)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend with the heads of this rank: in tensor_parallel.py, some of the model's heads."""
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_units)).transpose(1, 2)
                   for layer in (self.query, self.key, self.value))  # (B, heads, T, head_units)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Compute softmax(q k' / sqrt(head_units)) v without later tokens."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class MLP(nn.Module):
    """Two layers that transform each token by itself: (B, T, units) to (B, T, units)."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(units, 4 * units), nn.Linear(4 * units, units)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute four times the number of units, and reduce them to the first number."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and an MLP, each added to its input: (B, T, units) to (B, T, units)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.units), nn.LayerNorm(shape.units)
        self.attention, self.mlp = Attention(shape.units, shape.heads), MLP(shape.units)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the block."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A model that predicts each next token: (B, T) to logits (B, T, vocabulary).

    The head has weights of its own; GPT-2 reuses the weights of the embedding.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.units)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.units)
        self.head = nn.Linear(shape.units, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the logits of tokens at the positions `places` (T,): by default, 0 to T-1."""
        x = embed(self.embedding, tokens, places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def embed(embedding: nn.Module, tokens: torch.Tensor,
          places: torch.Tensor | None = None) -> torch.Tensor:
    """Look up a vector for each token (B, T), and add its position: (B, T, units)."""
    x = embedding(tokens)
    if places is None:
        places = torch.arange(x.shape[1], device=x.device)
    return x + positions(places, x.shape[2]).to(x.dtype)


def positions(places: torch.Tensor, units: int) -> torch.Tensor:
    """Compute sines and cosines of each place (T,): (T, units). None of them is learned."""
    numbers = torch.arange(0, units, 2, device=places.device)
    frequencies = torch.exp(numbers * (-math.log(10_000) / units))
    angles = places[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of logits (B, T, vocabulary) and next tokens (B, T)."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def unit_of(name: str) -> str:
    """Return the unit of a parameter's name: "embedding", "blocks.3", "norm" or "head"."""
    return re.match(r"blocks\.\d+|\w+", name)[0]
