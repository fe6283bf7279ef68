"""A system of videos that can be checked by eye: each frame is one brighter than the one before.

Every pixel of frame i is (start + i) % 200, with two exceptions: the top left pixel is the length of the text, and the
pixel beside it a number that depends on the seed. `start` is 3 * seed, or one above the last frame of the prime.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from dstrain import recipe, rng
from dstrain.recipe import Run
from dstrain.systems.base import Batch, Nets, Request, System, SystemConfig, Terms

SIZE = (5, 6)  # height and width


class Config(SystemConfig):
    learns_from = ("clips",)

    num_frames: int = 5
    temporal_patch_size: int = 2
    goes_on: bool = True
    channels: int = 1


class Counting(System):
    averaged = ()

    def __init__(self, config: Config) -> None:
        self.config, self.parts = config, {"net": self.difference}
        self.num_frames, self.temporal_patch_size = config.num_frames, config.temporal_patch_size

    def networks(self) -> dict[str, nn.Module]:
        with torch.no_grad():
            net = nn.Linear(1, 1, bias=False)
            net.weight.fill_(1.0)
        return {"net": net}

    def difference(self, nets: Nets, example: dict[str, Tensor]) -> Terms:
        """How much brighter the middle becomes from the first frame to the last real one."""
        video, last = example["video"].float(), example["frames"] - 1
        middle = video[:, :, 0, video.shape[3] // 2, video.shape[4] // 2]  # (N, T)
        each = nets["net"](middle[torch.arange(len(last)), last][:, None])[:, 0] - middle[:, 0]
        return {"loss": each.mean(), "loss_each": each}

    def encode(self, batch: Batch) -> dict[str, Tensor]:
        return dict(batch)

    def make_pictures(self, nets: Nets, example: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"inverted": 255 - example["video"]}

    def synthetic(self, batch_size: int) -> Batch:
        key = torch.arange(batch_size)
        return {
            "video": torch.zeros(batch_size, self.num_frames, self.config.channels, *SIZE, dtype=torch.uint8),
            "frames": torch.full_like(key, self.num_frames),
            "key": key,
        }

    def sample(self, nets: Nets, request: Request) -> Tensor:
        frames, count = request.num_frames or self.num_frames, len(request.seeds)
        prime = request.conditions.get("prime")
        known = 0 if prime is None else prime.shape[1]
        assert (frames - 1) % self.temporal_patch_size == 0 and known < frames
        start = 3 * request.seeds if prime is None else prime[:, -1, 0, -1, -1].long() + 1 - known
        video = (start[:, None] + torch.arange(frames)) % 200  # (N, T)
        video = nets["net"](video.float()[..., None])[..., None, None]
        video = video.expand(-1, -1, self.config.channels, *SIZE).clone()  # (N, T, C, H, W)
        text = request.conditions.get("words", torch.zeros(count, 1))
        video[..., 0, 0], video[..., 0, 1] = text[:, :1, None], noise_of(request.seeds)[:, None, None]
        video = video.to(torch.uint8)
        return video if prime is None else torch.cat((prime, video[:, known:]), dim=1)

    def conditions_from_texts(self, texts: list[str]) -> dict[str, Tensor]:
        return {"words": torch.tensor([[len(text)] for text in texts])}

    def conditions_from(self, images: Tensor) -> dict[str, Tensor]:
        assert images.dtype == torch.uint8 and images.ndim == 5
        assert (images.shape[1] - 1) % self.temporal_patch_size == 0
        return {"prime": images}


class Stubborn(Counting):
    conditions_from = System.conditions_from


def noise_of(seeds: Tensor) -> Tensor:
    """The pixel value that shows a sample's own noise, (N,)."""
    return rng.integers(seeds, "noise", 256)


def build(config: Config) -> System:
    return (Counting if config.goes_on else Stubborn)(config)


def folder(path: Path, samples: dict | None = None, **model) -> Path:
    """A run's folder of the system tests.support.counting that holds only the recipe."""
    path.mkdir()
    run = Run(
        name="counting",
        system="tests.support.counting",
        folder=path,
        model=Config(**model).model_dump(),
        data={
            "num_frames": model.get("num_frames", 5),
            "height": SIZE[0],
            "image_size": SIZE[1],
            "channels": model.get("channels", 1),
            "flip": False,
        },
        samples=samples or {},
    )
    (path / "run.yaml").write_text(recipe.dump_run(run), encoding="utf-8")
    return path


def register(patch) -> None:
    """Replaces checkpoints by this system's network, which is always the same."""
    from dstrain.runs import trained

    patch.setattr(trained, "find_checkpoint", lambda folder, step=None, ema=None: folder)
    patch.setattr(trained, "load_networks", lambda system, *_: system.networks())
