"""Data of others, converted once into what training reads: `dstrain convert KIND PATH --out OUT`.

Pictures become shards of encoded files, as `dstrain pack` writes them, with train/ and held_out/ where the data have a
test of their own; latents become a cache, as `dstrain encode` writes it. Nothing in a file is executed.
"""

from dstrain.commands.converting.shards import Pictures, write_splits
from dstrain.commands.options.convert import ConvertOptions
from dstrain.data.formats.labels import ClassList, read_class_list
from dstrain.recipe import ConfigError


def run_verb(options: ConvertOptions) -> None:
    """Converts, and says what was written."""
    print(convert(options))


def convert(options: ConvertOptions) -> str:
    """Writes options.out; returns a line that says what there is.

    Raises ConfigError if the data are not of the kind.
    """
    if not options.path.exists():
        raise ConfigError(f"{options.path} does not exist: name the data that are to be converted")
    if options.kind == "latents":
        return _convert_latents(options)
    if options.kind == "imagenet-kit":
        from dstrain.commands.converting.imagenet import write_table

        number = write_table(options.path, options.out)
        return f"{number:,} images in {options.out}, which data.path and data.held_out_path take"
    splits = _read_splits(options, read_class_list(options.class_list))
    counts = write_splits(options.out, splits, options.kind)
    words = f"{sum(counts.values()):,} images in {options.out}"
    if len(counts) > 1:
        words += f" ({counts['train']:,} to train on, {counts['held_out']:,} held out)"
    return f"{words}: give data.path={options.out}"


def _read_splits(options: ConvertOptions, class_list: ClassList) -> dict[str, Pictures]:
    if options.kind == "lsun":
        from dstrain.commands.converting.lsun import read_lsun

        return read_lsun(options.path, class_list)
    if options.kind == "npz":
        from dstrain.commands.converting.npz import read_npz

        splits = read_npz(options.path)
    elif options.kind == "mnist":
        from dstrain.commands.converting.mnist import read_mnist

        splits = read_mnist(options.path)
    else:
        from dstrain.commands.converting.cifar import read_cifar

        splits = read_cifar(options.path, options.kind)
    if class_list.classes:
        for pictures in splits.values():
            pictures.classes = class_list.classes
    return splits


def _convert_latents(options: ConvertOptions) -> str:
    from dstrain.commands.converting.latents import convert_latents

    index = convert_latents(options)
    encoding, bad = index["encoding"], len(index["bad_files"])
    return (
        f"{encoding['number']} samples in {options.out}: latents {encoding['dtype']} {encoding['shape']} x "
        f"{encoding['flips']}, scaling_factor {index['statistics']['scaling_factor']:.5f}"
        + (f", {bad} unreadable files replaced" if bad else "")
    )
