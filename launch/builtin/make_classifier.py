"""Makes dstrain/data/builtin/fashion-classifier.safetensors, the network behind the built-in metrics, in ten minutes.

    python launch/builtin/make_classifier.py [OUTPUT]

Trains dstrain/nn/classifier.py's Classifier on the 60,000 training images of Fashion-MNIST (Debian's package
dataset-fashion-mnist) and measures it on the 10,000 test images. Half of the batches show the items with fewer pixels,
as the built-in clips do. Weights are stored as float16. The seed determines the initial weights and the batches.

Source: https://github.com/zalandoresearch/fashion-mnist (MIT, see LICENSE-fashion-mnist.txt).
"""

import sys
import time
from pathlib import Path

import torch
from make_fashion import BUILTIN, read
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from dstrain.metrics.builtin import convert_to_classifier_input
from dstrain.nn.classifier import FILE, Classifier

EPOCHS, BATCH, LR, WEIGHT_DECAY, SEED = 10, 128, 4e-3, 5e-2, 0
SMALLEST = 12  # pixels of a side of 32 to which an item is shrunk


def main(output: Path) -> None:
    """Trains, measures and writes the weights."""
    torch.manual_seed(SEED)
    images, labels = load("train")
    network = Classifier().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(network.parameters(), LR, weight_decay=WEIGHT_DECAY)
    steps = EPOCHS * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, steps, pct_start=0.2)
    begin = time.perf_counter()
    for epoch in range(EPOCHS):
        network.train()
        order, total = torch.randperm(len(images)), 0.0
        for batch in order[: len(order) // BATCH * BATCH].split(BATCH):
            shown = varied(images[batch])
            loss = F.cross_entropy(network(convert_to_classifier_input(shown))[1], labels[batch], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        print(
            f"epoch {epoch + 1}/{EPOCHS}: loss {total / (len(images) // BATCH):.4f}, "
            f"{time.perf_counter() - begin:.0f} s",
            flush=True,
        )
    save_file(
        {
            name: (weight.half() if weight.is_floating_point() else weight).contiguous()
            for name, weight in network.state_dict().items()
        },
        output,
    )
    print(f"{output}: {output.stat().st_size:,} bytes, {sum(p.numel() for p in network.parameters()):,} weights")
    measure(output)


def load(name: str) -> tuple[Tensor, Tensor]:
    """The images of a split of the original data, uint8 (N, 1, 28, 28), and their labels int64 (N,)."""
    images = torch.from_numpy(read(f"{name}-images-idx3-ubyte.gz", header=16).reshape(-1, 1, 28, 28).copy())
    return images, torch.from_numpy(read(f"{name}-labels-idx1-ubyte.gz", header=8).copy()).long()


def varied(images: Tensor) -> Tensor:
    """A batch uint8 (B, 1, 28, 28) shifted by up to a pixel; half of the batches also shrunk to fewer pixels."""
    down, right = torch.randint(-1, 2, (2,)).tolist()
    images = images.roll((down, right), (2, 3))
    if torch.rand(()) < 0.5:
        return images
    side = int(torch.randint(SMALLEST, 28, ()))
    small = F.interpolate(F.pad(images, (2, 2, 2, 2)).float(), (side, side), mode="bilinear", antialias=True)
    return small.round().clamp(0, 255).byte()


def measure(path: Path) -> None:
    """Prints the accuracy on the test images, as they are and as items of 16 pixels, in all and by class."""
    network = Classifier.load(path)
    images, labels = load("t10k")
    small = F.interpolate(F.pad(images, (2, 2, 2, 2)).float(), (16, 16), mode="bilinear", antialias=True)
    for name, shown in (("28 pixels", images), ("16 pixels", small.round().byte())):
        with torch.no_grad():
            right = (
                torch.cat([network(convert_to_classifier_input(part))[1].argmax(1) for part in shown.split(1000)])
                == labels
            )
        classes = " ".join(f"{right[labels == label].float().mean():.3f}" for label in range(10))
        print(f"{name}: {right.float().mean():.4f} of the test images; by class {classes}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else BUILTIN / FILE)
