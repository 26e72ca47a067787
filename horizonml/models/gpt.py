"""A small GPT: a language model that predicts the next token from the tokens before it."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

_STD = 0.02  # of initial weights, as in GPT-2


class Attention(nn.Module):
    """Lets every position look at itself and at the positions before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # a bias of the keys would have no effect
        self.out = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Take and return `[batch, positions, width]`."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """A transformer block: attention, and then two linear layers, each added to its normalised input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.activation, self.dropout = nn.GELU(approximate="tanh"), nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Take and return `[batch, positions, width]`."""
        hidden = hidden + self.dropout(self.attention(self.norm1(hidden)))
        added: Tensor = self.dropout(self.down(self.activation(self.up(self.norm2(hidden)))))
        return hidden + added


class Bottleneck(nn.Module):
    """Lets few numbers for each position through, so that little travels where a model is cut within it.

    What enters is projected onto a fixed subspace, which is the same at all bottlenecks of a model; what is known of a
    position without that, its token, is added from a table. Both are the idea of Protocol Models (Ramasinghe et al.,
    arXiv 2506.01260). Projections that are trained learn far more slowly.
    """

    def __init__(self, vocabulary: int, width: int, numbers: int) -> None:
        super().__init__()
        self.narrow = nn.Linear(width, numbers, bias=False).requires_grad_(False)
        self.widen = nn.Linear(numbers, width, bias=False).requires_grad_(False)
        self.tokens = nn.Embedding(vocabulary, width)

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Take and return `[batch, positions, width]`; `tokens` are `[batch, positions]`."""
        widened: Tensor = self.widen(self.narrow(hidden)) + self.tokens(tokens.long())
        return widened


class GPT(nn.Module):
    """Predicts the next token at every position: `[batch, positions]` becomes `[batch, positions, vocabulary]`."""

    def __init__(
        self,
        vocabulary: int,
        context: int,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
        tied: bool = True,
        bottleneck: int = 0,
    ) -> None:
        """Build the model; with `tied`, the output layer uses the weights of the embedding.

        With a `bottleneck`, only so many numbers for each position go from a block to the next (see `Bottleneck`).
        Raises ValueError if the options do not fit together.
        """
        super().__init__()
        if min(layers, heads, width) < 1:
            raise ValueError(f"layers ({layers}), heads ({heads}) and width ({width}) have to be at least 1")
        if not 0 <= bottleneck < width:
            raise ValueError(f"a bottleneck of {bottleneck} is not from 0 (none) to {width - 1}, less than the width")
        if width % heads:
            raise ValueError(f"a width of {width} cannot be divided among {heads} heads; make it a multiple of heads")
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(context, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Block(width, heads, dropout) for _ in range(layers)])
        self.bottlenecks = nn.ModuleList(
            [Bottleneck(vocabulary, width, bottleneck) for _ in range(layers - 1)] if bottleneck else []
        )
        self.small = torch.uint8 if vocabulary <= 256 else torch.int32  # for tokens that travel on
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self._initialise(layers)
        if tied:
            self.head.weight = self.tokens.weight

    def _initialise(self, layers: int) -> None:
        """Set the initial weights; what is added to the residual stream begins smaller the more layers there are."""
        nn.init.normal_(self.positions, std=_STD)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                residual = name.endswith((".attention.out", ".down"))
                nn.init.normal_(module.weight, std=_STD / math.sqrt(2 * layers) if residual else _STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

        basis: Tensor | None = None
        for module in self.bottlenecks:
            assert isinstance(module, Bottleneck)
            basis = nn.init.orthogonal_(module.narrow.weight) if basis is None else basis
            module.narrow.weight.data.copy_(basis)
            module.widen.weight.data.copy_(basis.t())

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token that follows each position; texts may be shorter than the context."""
        hidden = self.blocks[0](self.dropout(self.tokens(tokens) + self.positions[: tokens.shape[1]]))
        known = tokens.to(self.small)
        for block, bottleneck in itertools.zip_longest(self.blocks[1:], self.bottlenecks):
            hidden = block(hidden if bottleneck is None else bottleneck(hidden, known))
        logits: Tensor = self.head(self.norm(hidden))
        return logits
