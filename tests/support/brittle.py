"""A system of two networks whose losses break on marked images, and what runs of it need: images, a recipe.

White images make both losses infinite; black ones multiply them by a thousand. `first` takes the noise out of an image,
`second` takes it out of what `first` made. A command may also kill or stop itself after so many steps.
"""

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from dstrain import rng
from dstrain.data.order import Order
from dstrain.recipe import MAY_CHANGE
from dstrain.systems.base import Batch, Example, Nets, Request, System, SystemConfig, Terms

SIDE, BATCH, SEED = 4, 4, 5
RECIPE = f"""name: brittle
system: tests.support.brittle
steps: 40
seed: {SEED}
data: {{image_size: {SIDE}, channels: 1, flip: false, workers: 0}}
batch: {{global: {BATCH}}}
optimizer: {{lr: 3e-3, eps: 1e-4, warmup: 3}}
ema: {{decays: [0.9]}}
every: {{report: 5, report_page: 0, sample: 0, evaluate: 0, save: 5}}
track: {{wandb: disabled}}
"""


class Config(SystemConfig):
    kill_after: Annotated[int, MAY_CHANGE] = 0
    """Steps of a command before it is killed; 0 is never."""
    stop_after: Annotated[int, MAY_CHANGE] = 0
    """Steps of a command before it gets SIGTERM."""
    draws: Annotated[bool, MAY_CHANGE] = True
    """Whether drawing more than two samples succeeds."""


class Net(nn.Module):
    """(B, 1, SIDE, SIDE) -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(SIDE**2, 24), nn.Tanh(), nn.Linear(24, SIDE**2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.to(self.layers[1].weight.dtype)).float().view(x.shape)


class Brittle(System):
    averaged = ("first", "second")
    watched = ("loss_seen",)

    def __init__(self, config: Config) -> None:
        self.config, self.parts, self.taken = config, {"first": self.clean, "second": self.clean_again}, 0
        self.history = torch.zeros(3)

    def networks(self) -> dict[str, nn.Module]:
        return {"first": Net(), "second": Net()}

    def clean(self, nets: Nets, example: Example) -> Terms:
        for after, number in ((self.config.kill_after, signal.SIGKILL), (self.config.stop_after, signal.SIGTERM)):
            if after and self.taken == after:  # behind the vote of a step's last micro-batch
                os.kill(os.getpid(), number)
        return self.compared(nets["first"](self.noised(example)), example)

    def clean_again(self, nets: Nets, example: Example) -> Terms:
        with torch.no_grad():
            made = nets["first"](self.noised(example))
        return self.compared(nets["second"](made), example) | {"loss_seen": made.square().flatten(1).mean(1)}

    def noised(self, example: Example) -> Tensor:
        x = example["x_start"]
        return x + 0.3 * rng.normal(example["key"], "noise", x.shape[1:])

    def compared(self, image: Tensor, example: Example) -> Terms:
        mean = example["x_start"].mean((1, 2, 3))
        factor = torch.where(mean > 0.99, torch.inf, torch.where(mean < -0.99, 1000.0, 1.0))
        losses = (image - example["x_start"]).square().flatten(1).mean(1) * factor
        return {"loss": losses.mean(), "loss_each": losses.detach()}

    def observe(self, rows: dict[str, Tensor]) -> None:
        self.taken += 1
        self.history = torch.cat((self.history[1:], rows["loss_seen"].mean()[None].cpu()))

    def state_dict(self) -> dict[str, Tensor]:
        return {"history": self.history}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.history = state["history"].clone()

    def sample(self, nets: Nets, request: Request) -> Tensor:
        if not self.config.draws and len(request.seeds) > 2:  # the look before a start draws two
            raise RuntimeError("broken on purpose")
        x = rng.normal(rng.keys_of_seeds(request.seeds), "start", (1, SIDE, SIDE))
        return ((nets["first"](x) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)

    def synthetic(self, batch_size: int) -> Batch:
        key = rng.keys(0, 0, torch.arange(batch_size))
        return {
            "key": key,
            "position": torch.arange(batch_size),
            "image": rng.integers(key, "image", 256, (1, SIDE, SIDE)).to(torch.uint8),
        }


def build(config: Config) -> Brittle:
    return Brittle(config)


def prepare(folder: Path, white: Iterable[int], black: Iterable[int] = (), count: int = 320) -> Path:
    """Writes images, of which one in each of these batches of the data's stream is marked; returns the recipe."""
    order, noise = Order(count, SEED), np.random.default_rng(0)
    marked = {
        int(order.find_sample_index(torch.tensor([batch * BATCH + batch % BATCH]))): value
        for batches, value in ((white, 255), (black, 0))
        for batch in batches
    }
    (folder / "images").mkdir()
    for index in range(count):
        row, column = np.mgrid[:SIDE, :SIDE]
        pixels = 128 + 80 * np.sin(row * (1 + index % 3) + column) + noise.normal(0, 10, (SIDE, SIDE))
        pixels = np.full((SIDE, SIDE), marked[index]) if index in marked else pixels.clip(30, 225)
        Image.fromarray(pixels.astype(np.uint8), "L").save(folder / "images" / f"{index:05d}.png")
    path = folder / "brittle.yaml"
    path.write_text(RECIPE.replace("data: {", f"data: {{path: {folder / 'images'}, "))
    return path
