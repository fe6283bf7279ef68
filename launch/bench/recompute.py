"""Counts what each choice of model.recompute keeps for the backward pass, and what it computes again: a table.

    python launch/bench/recompute.py [RECIPE ...] [--batch N]

Nothing is computed: the networks, in bfloat16, and one batch lie on the meta device. Bytes are a sample's of the first
part, between forward and backward pass, in eager mode and with a GPU's fused attention (a compiled block keeps less).
Per cent are further FLOPs of both passes, by torch's own count. RECIPE is a name in launch/recipes/ or a file.
"""

from pathlib import Path

import torch

from dstrain import recipe, systems
from dstrain.commands.exits import run_main
from dstrain.commands.options.arguments import Parser, parse_positive
from dstrain.engine.blocks import prepare
from dstrain.engine.planning.activations import count_flops, count_kept_bytes

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
CHOICES = ("none", "attention", 2, 4, "all")


def system_of(name: str) -> systems.System:
    """The system of a recipe: a name in launch/recipes/, or a file."""
    path = Path(__file__).resolve().parents[1] / "recipes" / f"{name}.yaml"
    if not path.exists() and not Path(name).exists():
        raise recipe.ConfigError(f"RECIPE {name}: there is no such name or file{recipe.suggest_files(path, '*.yaml')}")
    with recipe.reword_errors(options={"--recipe ": "RECIPE "}):
        run = recipe.load_recipe(path if path.exists() else Path(name), LARGE.get(name, []))
        run = recipe.check_model(run, systems.config_class(run.system))
        return systems.build(run.system, run.model)


def measure(system: systems.System, choice: str | int, batch: int) -> tuple[int, int]:
    """Bytes and FLOPs of a step of the first part of a system, with `batch` samples."""
    part = next(iter(system.parts))

    with torch.device("meta"):
        networks = system.networks()
    for name, network in networks.items():
        network.to(torch.bfloat16).requires_grad_(name == part)
        prepare(network, system.blocks(), choice)
    example = {name: value.to("meta") for name, value in system.encode(system.synthetic(batch)).items()}
    weights = (tensor for network in networks.values() for tensor in (*network.parameters(), *network.buffers()))

    def loss():
        return system.loss(part, networks, dict(example))["loss"]

    return count_kept_bytes(loss, [*example.values(), *weights]), count_flops(loss)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE")
    parser.add_argument("--batch", type=parse_positive, default=1)
    words = parser.parse_words()
    batch, names = words["batch"], words["recipes"] or list(LARGE)
    built = {name: system_of(name) for name in names}  # a wrong name is reported before the table begins
    print("| recipe |", " | ".join(map(str, CHOICES)), "|\n|---|" + "---|" * len(CHOICES))
    for name, system in built.items():
        costs = [measure(system, choice, batch) for choice in CHOICES]
        cells = [f"{size / batch / 1e6:,.0f} MB, +{100 * (work / costs[0][1] - 1):.1f} %" for size, work in costs]
        print(f"| `{Path(name).stem}` |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    run_main(main)
