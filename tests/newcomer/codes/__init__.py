"""An autoregressive model of the tokens that a discrete VAE makes of images (as DALL-E's, without text).

An entry point registers it. It uses three modules of dstrain: systems/base.py, rng.py and systems/codec.py, which
decodes the tokens that it draws.
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from dstrain import rng
from dstrain.systems.base import Batch, Example, Nets, Request, System, SystemConfig, Terms
from dstrain.systems.codec import Codec


class Config(SystemConfig):
    learns_from = ("image_tokens",)

    grid: tuple[int, int]
    """Rows and columns of an image's tokens, filled in from the cache."""
    num_tokens: int = Field(ge=2)
    """Ids of the tokens, filled in from the cache."""
    first_stage: str | None = None
    """Folder of the exported autoencoder that decodes samples; with None the system cannot draw samples."""
    dim: int = Field(64, ge=8)
    """Width of a token; a multiple of 4, the number of heads."""
    depth: int = Field(2, ge=1)
    """Number of blocks."""

    @classmethod
    def complete_section(cls, model, run):
        codes = run.data.codes
        return {"grid": codes.shape, "num_tokens": codes.codebook_size, **model} if codes else model


class Block(nn.Module):
    """Causal attention and an MLP: (B, N, D) -> (B, N, D)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.project = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # (B, 4, N, D / 4)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Tokens (B, n) -> logits (B, n + 1, ids) float32 for each token, given the tokens before it; at most N places."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        length = config.grid[0] * config.grid[1]
        self.tokens = nn.Embedding(config.num_tokens + 1, config.dim)  # the last id stands for the beginning
        self.places = nn.Embedding(length, config.dim)
        self.blocks = nn.ModuleList(Block(config.dim) for _ in range(config.depth))
        self.head = nn.Linear(config.dim, config.num_tokens)
        self.apply(self.initialize)

    @staticmethod
    def initialize(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = F.pad(tokens, (1, 0), value=self.tokens.num_embeddings - 1)
        tokens = tokens[:, : self.places.num_embeddings]  # the last token predicts nothing
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x).float()


class TokenModel(System):
    """One part, `transformer`."""

    averaged = ("transformer",)

    def __init__(self, config: Config) -> None:
        self.config, self.parts = config, {"transformer": self.learn}
        self.generates = config.first_stage is not None
        self.codec = Codec.load(config.first_stage, "model.first_stage") if self.generates else None

    def networks(self) -> dict[str, nn.Module]:
        return {"transformer": Transformer(self.config)}

    def frozen(self) -> tuple[nn.Module, ...]:
        return (self.codec,) if self.codec else ()

    def encode(self, batch: Batch) -> Example:
        return {"tokens": batch["tokens"].flatten(1), "key": batch["key"]}

    def losses(self, nets: Nets, example: Example) -> Tensor:
        """Mean cross-entropy of the tokens of each sample, (B,)."""
        logits = nets["transformer"](example["tokens"])
        return F.cross_entropy(logits.transpose(1, 2), example["tokens"], reduction="none").mean(1)

    def learn(self, nets: Nets, example: Example) -> Terms:
        losses = self.losses(nets, example)
        return {"loss": losses.mean(), "loss_each": losses.detach()}

    @torch.no_grad()
    def evaluate(self, nets: Nets, example: Example) -> Terms:
        return {"loss": self.losses(nets, example)}

    def find_drawing_problem(self) -> str | None:
        return None if self.codec else "no autoencoder decodes the tokens; set model.first_stage to its exported folder"

    @torch.no_grad()
    def sample(self, nets: Nets, request: Request) -> Tensor:
        """Draws one token after the other from the predicted distribution; ignores num_steps."""
        keys, count = rng.keys_of_seeds(request.seeds), self.config.grid[0] * self.config.grid[1]
        tokens = torch.zeros((len(keys), 0), dtype=torch.int64, device=keys.device)
        for place in range(count):
            shares = nets["transformer"](tokens)[:, -1].softmax(-1).cumsum(-1)  # (N, ids)
            chosen = (shares < rng.uniform(keys, f"token/{place}", (1,))).sum(-1, keepdim=True)
            tokens = torch.cat((tokens, chosen.clamp(max=self.config.num_tokens - 1)), 1)
        pixels = self.codec.decode(tokens.view(len(keys), *self.config.grid))
        return ((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)

    def list_block_classes(self) -> tuple[type[nn.Module], ...]:
        return (Block,)

    def synthetic(self, batch_size: int) -> Batch:
        positions = torch.arange(batch_size)
        key = rng.keys(0, 0, positions)
        return {
            "key": key,
            "position": positions,
            "tokens": rng.integers(key, "tokens", self.config.num_tokens, self.config.grid),
        }


def build(config: Config) -> TokenModel:
    return TokenModel(config)
