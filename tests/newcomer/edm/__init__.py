"""EDM (Karras et al. 2022, "Elucidating the Design Space") with a small UNet of its own.

An example of a system by someone who has read only dstrain/systems/base.py. A recipe names it by its Python module:
`system: edm`. Equation numbers and table 1 are the paper's; sigma is the noise level.
"""

import itertools

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from dstrain import rng
from dstrain.systems.base import Batch, Example, Nets, Request, System, SystemConfig, Terms


class Config(SystemConfig):
    image_size: int = Field(32, ge=4)
    """Side of the images in pixels."""
    channels: int = Field(3, ge=1)
    """Channels of the images."""
    width: int = Field(32, ge=8)
    """Channels of the first level; a multiple of 8."""
    num_classes: int = Field(10, ge=1)
    """Number of labels."""
    sigma_data: float = Field(0.5, gt=0)
    """Standard deviation of the data."""

    @classmethod
    def complete_section(cls, model, run):
        return {"image_size": run.data.image_size, "channels": run.data.channels, **model}

    def list_conflicts(self, run):
        return self.list_unequal_fields(run, image_size="image_size", channels="channels")

    @property
    def num_labels(self) -> int:
        return self.num_classes


class Block(nn.Module):
    """A residual block of two convolutions, scaled by the condition: (B, i, H, W), (B, e) -> (B, o, H, W)."""

    def __init__(self, inner: int, outer: int, condition: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.scale = nn.Linear(condition, outer)
        self.norm2, self.conv2 = nn.GroupNorm(8, outer), nn.Conv2d(outer, outer, 3, padding=1)
        self.skip = nn.Conv2d(inner, outer, 1)
        nn.init.zeros_(self.conv2.weight)  # as in the paper's code: a new block is only its skip connection

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) * (1 + self.scale(condition)[:, :, None, None])
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    """Two resolutions: images (B, C, H, W), noise levels (B,) and labels (B,) -> (B, C, H, W) float32."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, condition = config.width, 4 * config.width
        self.level, self.label = nn.Linear(1, condition), nn.Embedding(config.num_classes, condition)
        self.enter = nn.Conv2d(config.channels, width, 3, padding=1)
        self.down, self.middle = Block(width, 2 * width, condition), Block(2 * width, 2 * width, condition)
        self.up, self.leave = Block(3 * width, width, condition), nn.Conv2d(width, config.channels, 3, padding=1)
        nn.init.zeros_(self.leave.weight)

    def forward(self, x: Tensor, level: Tensor, label: Tensor) -> Tensor:
        dtype = self.enter.weight.dtype
        condition = F.silu(self.level(level[:, None].to(dtype)) + self.label(label))
        x = self.enter(x.to(dtype))
        h = self.middle(self.down(F.avg_pool2d(x, 2), condition), condition)
        h = torch.cat((x, F.interpolate(h, scale_factor=2.0)), 1)
        return self.leave(self.up(h, condition)).float()


class EDM(System):
    """One part, `denoiser`."""

    averaged, samplers = ("denoiser",), ("euler", "heun")

    def __init__(self, config: Config) -> None:
        self.config, self.parts = config, {"denoiser": self.learn}
        self.shape = (config.channels, config.image_size, config.image_size)

    def networks(self) -> dict[str, nn.Module]:
        return {"denoiser": UNet(self.config)}

    def denoised(self, nets: Nets, x: Tensor, sigma: Tensor, label: Tensor) -> Tensor:
        """D(x; sigma), equation 7."""
        s, data = sigma.view(-1, 1, 1, 1), self.config.sigma_data
        total = (s.square() + data**2).sqrt()
        out = nets["denoiser"](x / total, sigma.log() / 4, label)
        return data**2 / total.square() * x + s * data / total * out

    def losses(self, nets: Nets, example: Example) -> Tensor:
        """The loss of equation 8 for each sample, (B,); sigma is log-normal."""
        key, x_start = example["key"], example["x_start"]
        sigma = (rng.normal(key, "sigma", (1,))[:, 0] * 1.2 - 1.2).exp()
        x = x_start + rng.normal(key, "noise", self.shape) * sigma.view(-1, 1, 1, 1)
        weight = (sigma.square() + self.config.sigma_data**2) / (sigma * self.config.sigma_data).square()
        return weight * (self.denoised(nets, x, sigma, example["label"]) - x_start).square().flatten(1).mean(1)

    def learn(self, nets: Nets, example: Example) -> Terms:
        losses = self.losses(nets, example)
        return {"loss": losses.mean(), "loss_each": losses.detach()}

    @torch.no_grad()
    def evaluate(self, nets: Nets, example: Example) -> Terms:
        return {"loss": self.losses(nets, example)}

    def make_conditions(self, num: int, labels: tuple[int, ...] | None = None) -> dict[str, Tensor]:
        classes = torch.tensor(labels or tuple(range(self.config.num_classes)))
        return {"label": classes.repeat(-(-num // len(classes)))[:num]}

    @torch.no_grad()
    def sample(self, nets: Nets, request: Request) -> Tensor:
        """Deterministic sampling (algorithm 1; heun or euler), from sigma 80 to 0.002 with rho 7."""
        heun = self.choose_sampler(request.sampler) == "heun"
        count = max(request.num_steps // (1 + heun), 2)  # Heun's method calls the network twice
        ramp = torch.linspace(80 ** (1 / 7), 0.002 ** (1 / 7), count, device=request.seeds.device) ** 7
        sigmas = torch.cat((ramp, torch.zeros_like(ramp[:1])))
        x = rng.normal(rng.keys_of_seeds(request.seeds), "start", self.shape) * sigmas[0]
        label = request.conditions.get("label", request.seeds % self.config.num_classes)

        def slope(x, sigma):
            return (x - self.denoised(nets, x, sigma.expand(len(x)), label)) / sigma

        for now, then in itertools.pairwise(sigmas):
            first = slope(x, now)
            further = x + (then - now) * first
            if heun and then > 0:
                further = x + (then - now) * (first + slope(further, then)) / 2
            x = further
        return ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)

    def list_block_classes(self) -> tuple[type[nn.Module], ...]:
        return (Block,)

    def synthetic(self, batch_size: int) -> Batch:
        positions = torch.arange(batch_size)
        key = rng.keys(0, 0, positions)
        return {
            "key": key,
            "position": positions,
            "label": rng.integers(key, "label", self.config.num_classes),
            "image": rng.integers(key, "image", 256, self.shape).to(torch.uint8),
        }


def build(config: Config) -> EDM:
    return EDM(config)
