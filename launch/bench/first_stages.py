"""How well first stages of the built-in garments give back what they are shown: a row of a table for each run.

    python launch/bench/first_stages.py RUN ...

Reconstructions of the 500 held-out garments by the averaged weights, of a KL autoencoder by the posterior's mean:

bits        of an image's code: places x log2(codebook); for a KL autoencoder the divergence of its posterior
usage       share of the codebook that some image uses, and the perplexity of that use
PSNR, SSIM  means over images
FD          of the reconstructions to the originals themselves, by the built-in classifier (0: equal)
class       share of reconstructions in which that classifier sees the label

docs/systems/vae.md has such a table and says what to make of it.
"""

import math
import sys
from pathlib import Path

import torch
from torch import Tensor

from dstrain import systems
from dstrain.commands.evaluate import average_system_measurements_over_source
from dstrain.commands.exits import run_main_with_exit_code
from dstrain.data.batches import iterate_held_out
from dstrain.data.sources.images import open_images
from dstrain.metrics import distances
from dstrain.metrics.builtin import Builtin
from dstrain.nn.measures import measure_psnr_and_ssim
from dstrain.nn.pixels import convert_to_uint8
from dstrain.recipe import ConfigError
from dstrain.runs import trained

_BATCH = 50


def main() -> None:
    """Measures the runs of the command line, and prints a table in Markdown."""
    if not sys.argv[1:]:
        raise ConfigError("no RUN is given: name folders of trained autoencoders, such as runs/dvae-small")
    print("| run | bits | usage | perplexity | PSNR | SSIM | FD | class |\n|---|---|---|---|---|---|---|---|")
    for folder in map(Path, sys.argv[1:]):
        print(f"| {folder.name} | {' | '.join(row(folder))} |", flush=True)


@torch.no_grad()
def row(folder: Path) -> list[str]:
    """The figures of a run, in the order of the table."""
    run = trained.read_recipe(folder)
    system = systems.build(run.system, run.model)
    if run.data.path != "builtin:fashion" or not system.encodes:
        raise ConfigError(f"{folder}: not an autoencoder of builtin:fashion, by whose classifier FD is measured")
    checkpoint = trained.find_checkpoint(folder, None, None)
    nets = trained.load_networks(
        system, checkpoint, trained.choose_raw_or_ema_by_part(system, checkpoint, run.samples.ema), torch.float32
    )
    source = open_images("builtin:fashion", run.data.image_size, channels=run.data.channels, split="held_out")
    network, originals, made, right, alike = Builtin(torch.device("cpu")), [], [], [], []
    for samples in iterate_held_out(source, _BATCH, 0, 1, torch.device("cpu"), run.seed):
        valid, labels = samples.pop("valid"), samples["label"]
        example = system.encode(samples)
        picture = system.make_reconstructions(nets, example)[-1]
        features, logits = network(convert_to_uint8(picture))
        originals.append(network(samples["image"])[0][valid])
        made.append(features[valid])
        right.append((logits.argmax(1) == labels)[valid].float())
        alike.append(torch.stack(list(measure_psnr_and_ssim(picture, example["x_start"]).values()), 1)[valid])
    psnr, ssim = torch.cat(alike).mean(0).tolist()
    distance = distances.compute_frechet_distance(*moments(torch.cat(made)), *moments(torch.cat(originals)))
    figures = average_system_measurements_over_source(system, nets, source, batch=_BATCH, seed=run.seed)["figures"]
    if "perplexity" in figures:
        bits = system.side**2 * math.log2(system.codebook_size)
        usage = [f"{1 - figures['dead_tokens']:.1%}", f"{figures['perplexity']:.0f}"]
    else:
        bits, usage = figures["kl"] / math.log(2), ["", ""]
    return [f"{bits:.0f}", *usage, f"{psnr:.2f}", f"{ssim:.3f}", f"{distance:.2f}", f"{torch.cat(right).mean():.1%}"]


def moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance: (N, d) -> (d,), (d, d)."""
    return features.double().mean(0), features.double().T.cov()


if __name__ == "__main__":
    run_main_with_exit_code(main)
