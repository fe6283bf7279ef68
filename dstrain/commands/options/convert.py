"""Options of `dstrain convert`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from dstrain.commands.options.arguments import parse_fraction_below_1, parse_positive_integer
from dstrain.commands.options.command import Command, make_argument_field, make_option_field
from dstrain.recipe import ConfigError

KINDS = ("cifar10", "cifar100", "mnist", "lsun", "npz", "imagenet-kit", "latents")
_LATENTS = "for latents"


@dataclass(frozen=True)
class ConvertOptions(Command):
    """Converts data of others once, into what data.path=OUT then trains on. Nothing in a file is executed.

    cifar10, cifar100     PATH is cifar-10-batches-py, cifar-100-python, the binary version, or the folder above
    mnist                 a folder with idx files, also .gz: of MNIST, Fashion-MNIST, KMNIST, EMNIST; torchvision's, too
    lsun                  an LMDB environment, a file of one, or a folder with several *_lmdb/, each a class
    npz                   an .npz with arr_0 uint8 (N, H, W, C), and arr_1 as labels, as ADM keeps images
    imagenet-kit          ImageNet's val/ without class folders: OUT is a table of its images, such as val.csv
    latents               latents that fast-DiT, LightningDiT, EDM2 or REPA have cached
    """

    usage: ClassVar[str] = "dstrain convert KIND PATH --out OUT [options]"
    examples: ClassVar[str] = """
        dstrain convert cifar10 cifar-10-batches-py --out cifar10-shards
        dstrain convert imagenet-kit /data/imagenet/val --out /data/imagenet/val.csv
        dstrain convert latents features --first-stage stabilityai/sd-vae-ft-mse --out latents/imagenet256
    """

    kind: str = make_argument_field(
        "KIND", "what the data are: cifar10, cifar100, mnist, lsun, npz, imagenet-kit or latents"
    )
    path: Path = make_argument_field("PATH", "the data", Path)
    out: Path = make_option_field(
        None,
        "where to write: shards, of which test files are held out (train/ and held_out/)",
        Path,
        metavar="OUT",
    )
    class_list: str | None = make_option_field(
        None, "a class a line: the names of labels that are numbers, or the order of LSUN's", metavar="FILE"
    )
    first_stage: str | None = make_option_field(
        None,
        "what encoded them: a diffusers AutoencoderKL, or name:NAME where it cannot be read here",
        metavar="PATH",
        heading=_LATENTS,
    )
    image_size: int | None = make_option_field(
        None, "pixels, where the first stage cannot be read", parse_positive_integer, metavar="N", heading=_LATENTS
    )
    latent_scale: float | None = make_option_field(
        None,
        "by which they have been multiplied (fast-DiT: 0.18215, others 1); they are divided by it",
        float,
        metavar="X",
        heading=_LATENTS,
    )
    normalize: bool = make_option_field(
        False,
        "by channel, with LightningDiT's latents_stats.pt; then no first stage can decode them",
        heading=_LATENTS,
    )
    flip: bool = make_option_field(True, "without the mirrored ones", name="no-flip", heading=_LATENTS)
    dtype: str = make_option_field(
        "float16", "float16 or float32", metavar="NAME", choices=("float16", "float32"), heading=_LATENTS
    )
    shard_size: int = make_option_field(
        4096, "samples of a file", parse_positive_integer, metavar="N", heading=_LATENTS
    )
    max_bad_fraction: float = make_option_field(
        0.01, "unreadable files that are replaced before it ends", parse_fraction_below_1, metavar="F", heading=_LATENTS
    )

    def check_options(self) -> None:
        """Raises ConfigError if the kind of data, PATH or --out is missing, or if options that only latents use are
        given with another kind.
        """
        if self.kind not in KINDS:
            raise ConfigError(f"name the kind of the data, one of {', '.join(KINDS)}; --help shows how")
        for name, value in (("PATH", self.path), ("--out OUT", self.out)):
            if value is None:
                raise ConfigError(f"name {name}; --help shows how")
        if self.kind == "latents" and self.first_stage is None:
            raise ConfigError("name what encoded the latents: --first-stage PATH, or --first-stage name:NAME")
        for entry in fields(self):
            own = entry.name in ("kind", "path", "out", "class_list")
            if self.kind != "latents" and not own and getattr(self, entry.name) != entry.default:
                raise ConfigError(f"--{entry.name.replace('_', '-')} is for the kind latents: leave it out")
