"""Counts what each choice of model.recompute keeps for the backward pass, and what it computes again: a table.

    python launch/bench/recompute.py [RECIPE ...] [--batch N]

Nothing is computed: the networks, in bfloat16, and one batch lie on the meta device. Bytes are a sample's of the first
part, between forward and backward pass, in eager mode and with a GPU's fused attention (a compiled block keeps less).
Per cent are further FLOPs of both passes, by torch's own count. What `offload` sends to the host is no longer kept, and
stands behind. RECIPE is a name in launch/recipes/ or a file.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dstrain import recipe, systems
from dstrain.commands.exits import run_main_with_exit_code
from dstrain.commands.options.arguments import Parser, parse_positive_integer
from dstrain.engine.blocks import HostMemory, wrap_block_forwards
from dstrain.engine.planning.activations import count_activation_bytes, count_flops

_LATENTS = ["model.first_stage=null", "model.in_channels=4"]
_PICTURES = ["perceptual=null", "discriminator=null"]
# Recipes, and entries without networks that are files: a first stage, an encoder of texts, an adversary's judge.
LARGE = {
    "dit-xl2-imagenet256": [*_LATENTS, "model.image_size=32"],
    "dit-xl2-imagenet512": [*_LATENTS, "model.image_size=64"],
    "iddpm-imagenet64-hybrid": [],
    "iddpm-lsun256": [],
    "vae-kl-f8": [f"model.kl.{entry}" for entry in _PICTURES],
    "phenaki-tokenizer": [f"model.{entry}" for entry in _PICTURES],
    "prior-1b": ["model.text_encoder=null"],
}
CHOICES = ("none", "attention", 2, 4, "all", "offload")


class Cost(NamedTuple):
    """What a choice costs in a step: bytes kept on the GPU, bytes that wait on the host, and FLOPs."""

    kept: int
    sent: int
    work: int


class CountingHost(HostMemory):
    """Takes the inputs of blocks as the host's memory does, and keeps only their shapes and how many bytes they are."""

    def __init__(self) -> None:
        self.nbytes = 0

    def send_to_host(self, tensor: Tensor) -> Any:
        self.nbytes += tensor.nbytes
        return tensor.shape, tensor.stride(), tensor.dtype

    def fetch_from_host(self, sent: Any) -> Tensor:
        shape, stride, dtype = sent
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def system_of(name: str) -> systems.System:
    """The system of a recipe: a name in launch/recipes/, or a file."""
    path = Path(__file__).resolve().parents[1] / "recipes" / f"{name}.yaml"
    if not path.exists() and not Path(name).exists():
        raise recipe.ConfigError(f"RECIPE {name}: there is no such name or file{recipe.suggest_files(path, '*.yaml')}")
    with recipe.reword_errors(options={"--recipe ": "RECIPE "}):
        run = recipe.load_recipe(path if path.exists() else Path(name), LARGE.get(name, []))
        run = recipe.complete_model_section(run, systems.find_config_class(run.system))
        return systems.build(run.system, run.model)


def measure(system: systems.System, choice: str | int, batch: int) -> Cost:
    """Counts a step of the first part of a system, with `batch` samples."""
    part, host = next(iter(system.parts)), CountingHost()

    with torch.device("meta"):
        networks = system.networks()
    for name, network in networks.items():
        network.to(torch.bfloat16).requires_grad_(name == part)
        wrap_block_forwards(network, system.list_block_classes(), choice, host=host)
    example = {name: value.to("meta") for name, value in system.encode(system.synthetic(batch)).items()}
    weights = (tensor for network in networks.values() for tensor in (*network.parameters(), *network.buffers()))

    def loss():
        return system.loss(part, networks, dict(example))["loss"]

    kept = count_activation_bytes(loss, [*example.values(), *weights])
    return Cost(kept, host.nbytes, count_flops(loss))


def render_cost(cost: Cost, plain: Cost, batch: int) -> str:
    """Returns a cell of the table: a sample's bytes, and the work beside that of recompute=none."""
    cell = f"{cost.kept / batch / 1e6:,.0f} MB, +{100 * (cost.work / plain.work - 1):.1f} %"
    if cost.sent:
        cell += f", {cost.sent / batch / 1e6:,.0f} MB on the host"
    return cell


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE")
    parser.add_argument("--batch", type=parse_positive_integer, default=1)
    words = parser.parse_words()
    batch, names = words["batch"], words["recipes"] or list(LARGE)
    built = {name: system_of(name) for name in names}  # a wrong name is reported before the table begins
    print("| recipe |", " | ".join(map(str, CHOICES)), "|\n|---|" + "---|" * len(CHOICES))
    for name, system in built.items():
        costs = [measure(system, choice, batch) for choice in CHOICES]
        cells = (render_cost(cost, costs[0], batch) for cost in costs)
        print(f"| `{Path(name).stem}` |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    run_main_with_exit_code(main)
