"""What a command writes as one file replaces no file that the command has not written."""

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dstrain.commands.convert import load_converter
from dstrain.commands.evaluating import quality
from dstrain.commands.options.command import parse_options
from dstrain.commands.options.evaluate import EvaluateOptions
from dstrain.metrics import reference
from dstrain.recipe import ConfigError, require_replaceable_file
from dstrain.tracking.report import page


def write_page(out: Path) -> None:
    page.write_report([out.parent / "run"], out)


def write_statistics(out: Path) -> None:
    words = ["--images", str(out.parent), "--metrics", "fd", "--write-reference", str(out)]
    quality.compute_and_write_reference_statistics(parse_options(EvaluateOptions, words))


def write_table(out: Path) -> None:
    (out.parent / "LOC_val_solution.csv").write_text("ImageId,PredictionString\nILSVRC2012_val_00000001,n01440764 1\n")
    (out.parent / "val").mkdir(exist_ok=True)
    (out.parent / "val" / "ILSVRC2012_val_00000001.JPEG").touch()
    load_converter("imagenet").write_table(out.parent / "val", out)


WRITERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "dstrain report": ("run.yaml", write_page),
    "dstrain evaluate --write-reference": ("data.npz", write_statistics),
    "dstrain convert imagenet-kit": ("val.csv", write_table),
}
OTHERS = {
    "a text": b"name: mine\n",
    "bytes": bytes(range(256)),
    "a table": b"path,label\nmine.png,n01440764\n",
    "a compressed file": gzip.compress(b"mine"),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("content", [*OTHERS, "arrays"])
def test_a_file_of_somebody_else_stays(tmp_path, writer, content):
    """Oracle: the file, to the byte; the refusal names it, and comes before the work."""
    name, write = WRITERS[writer]
    out = tmp_path / name
    if content == "arrays":
        with open(out, "wb") as file:
            np.savez(file, arr_0=np.zeros((2, 4, 4, 3), np.uint8))
    else:
        out.write_bytes(OTHERS[content])
    before = out.read_bytes()
    with pytest.raises(ConfigError, match=f"{name} is there, and is no file that this command has written"):
        write(out)
    assert out.read_bytes() == before


def test_a_file_of_the_command_is_replaced(tmp_path):
    """Oracle: what each writer has written before; an empty file; and no device or pipe."""
    table = tmp_path / "val.csv"
    for _ in range(2):
        write_table(table)
    assert table.read_text().splitlines()[0] == "path,label"
    reference.write_reference_statistics(statistics := tmp_path / "a.npz", {})
    assert not reference.is_written_by_dstrain(statistics)  # it holds none
    (tmp_path / "empty").touch()
    require_replaceable_file(tmp_path / "empty", "--out", lambda path: False)
    with pytest.raises(ConfigError, match="/dev/null"):
        require_replaceable_file(Path("/dev/null"), "--out", lambda path: True)
