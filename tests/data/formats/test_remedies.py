"""Remedies that refusals of data name: each is followed as it is written, and works."""

import re
import shlex
import tarfile
import zipfile

import pytest
from safetensors.torch import save_file

from dstrain import systems
from dstrain.commands.index import format_report, index_and_summarize_data
from dstrain.commands.job import complete_and_check_recipe
from dstrain.data.cached.latents import Latents
from dstrain.data.open import open_sources
from dstrain.recipe import ConfigError, Data, load_recipe
from tests.commands.converting.test_latents import LABELS, edm2, edm2_zip, fast_dit, lightning
from tests.data.formats.test_labels import lines
from tests.support import first_stage
from tests.support.launch import ROOT, here
from tests.support.pictures import folder, picture


def refusal(**entries) -> str:
    with pytest.raises(ConfigError) as caught:
        open_sources(Data(image_size=16, **entries))[0].read_first_readable()
    return str(caught.value)


@pytest.mark.parametrize(
    "write, place",
    [
        (fast_dit, ""),
        (fast_dit, "imagenet256_features"),
        (lightning, ""),
        (lightning, ".."),
        (edm2, ""),
        (edm2, "vae-sd/00000"),
        (edm2_zip, ""),
    ],
)
def test_latents_of_others(tmp_path, monkeypatch, capsys, write, place):
    """Oracle: the labels that were written, out of what the command of the message has made; it finds the folder that
    is meant from within and from outside.
    """
    root = tmp_path / "of others" / ("theirs.zip" if write is edm2_zip else "theirs")
    root.parent.mkdir()
    write(root)
    text = refusal(path=str((root / place).resolve()))
    command = re.search(r"`dstrain (convert latents .* --out DIR)`", text).group(1)
    values = {"PATH": str(first_stage.save(tmp_path / "vae")), "DIR": str(tmp_path / "out")}
    code, _, error = here(
        "convert.py", [values.get(word, word) for word in shlex.split(command)[1:]], monkeypatch, capsys
    )
    assert code == 0, error
    source = Latents(tmp_path / "out")
    assert sorted(source[index]["label"] for index in range(len(source))) == sorted(LABELS)


def test_files_that_are_no_latents(tmp_path):
    """Oracle: the contract: no command that would be refused, but where the known ones are told."""
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "x.npy").write_bytes(b"no array")
    text = refusal(path=str(tmp_path / "a b"))
    assert "docs/guides/encode.md names the latents of others" in text and "--first-stage" not in text
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "dataset.json").write_text("{}")
    (tmp_path / "packed" / "x.zip").write_bytes(b"")
    assert "convert latents" not in refusal(path=str(tmp_path / "packed"))


def test_archives_within_archives_and_patterns(tmp_path):
    """Oracle: the files that are there: no remedy names another path; a shortened pattern is taken."""
    for name in ("x.zip", "inner.tar"):
        with zipfile.ZipFile(tmp_path / f"of {name}.zip", "w") as file:
            file.writestr(f"a/{name}", b"content")
        text = refusal(path=str(tmp_path / f"of {name}.zip"))
        assert f"holds of {name}.zip/a/{name}: unpack of {name}.zip first" in text and f"zip/of {name}" not in text
    for number in (0, 1):
        with zipfile.ZipFile(tmp_path / "s.zip", "w") as file, tarfile.open(tmp_path / f"s-{number}.tar", "w") as tar:
            picture(number).save(tmp_path / f"{number}.png")
            tar.add(tmp_path / f"{number}.png", f"{number}.png")
            file.write(tmp_path / f"{number}.png", f"{number}.png")
            file.write(tmp_path / f"{number}.png", f"../{number}.png")
    for suffix in ("tar", "parquet"):
        text = refusal(path=f"{tmp_path}/t-{{0..4}}.{suffix}")
        assert f"names 5 files, and t-0.{suffix} is not there: shorten the pattern" in text
    assert "names 4 files, and s-2.tar is not there" in refusal(path=f"{tmp_path}/s-{{0..3}}.tar")
    assert len(open_sources(Data(path=f"{tmp_path}/s-{{0..1}}.tar", image_size=16))[0]) == 2
    zipped = open_sources(Data(path=str(tmp_path / "s.zip"), image_size=16))[0]
    assert len(zipped) == 1 and zipped.describe_samples().endswith("; 1 whose names lead outside are left out")
    told = format_report(index_and_summarize_data(Data(path=str(tmp_path / "s.zip"), index=str(tmp_path / "index"))))
    assert "note: 1 whose names lead outside are left out" in told


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"labels": "prefix"},
        {"num_frames": 5},
        {"num_frames": 5, "captions": "captions.tsv", "buckets": [1, 5]},
        {"columns": {"path": "picture", "label": "kind"}},
    ],
)
def test_the_check_of_unreadable_samples(tmp_path, monkeypatch, capsys, entries):
    """Oracle: the names of the broken files: the command of the message lists them all."""
    root, suffix = tmp_path / "all broken", ".mp4" if "num_frames" in entries else ".png"
    root.mkdir()
    names = [f"{'ab'[number % 2]}_{number}{suffix}" for number in range(3)]
    for name in names:
        (root / name).write_bytes(b"broken")
    if "captions" in entries:
        entries = entries | {"captions": str(tmp_path / "captions.tsv")}
        (tmp_path / "captions.tsv").write_text("".join(f"{name}\ta text\n" for name in names))
    path = root
    if "columns" in entries:
        path = tmp_path / "all of them.csv"
        path.write_text("picture,kind\n" + "".join(f"{root / name},k\n" for name in names))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = refusal(path=str(path), **entries)
    command = shlex.split(re.search(r"`(.*)` lists what cannot be read", text).group(1))
    assert command[:2] == ["dstrain", "index"]
    code, out, error = here("index.py", command[2:], monkeypatch, capsys)
    assert code == 0 and "unreadable: 3 (read whole)" in out, out + error
    assert all(f"{name}: " in out for name in names)


@pytest.mark.parametrize("recipe", ["dit-small", "iddpm-small"])
def test_another_number_of_classes(tmp_path, recipe):
    """Oracle: the folders: the entry of the message is taken, also with weights of ten classes, whose table is drawn
    anew as the message says.
    """
    run, _ = complete_and_check_recipe(load_recipe(ROOT / "launch" / "recipes" / f"{recipe}.yaml"))
    system = systems.build(run.system, run.model)
    (part,) = system.parts
    save_file(
        {name: value.clone() for name, value in system.networks()[part].state_dict().items()},
        tmp_path / "ten.safetensors",
    )
    words = [
        f"folder={tmp_path / 'run'}",
        f"data.path={folder(tmp_path / 'two')}",
        f"init_from={tmp_path / 'ten.safetensors'}",
    ]
    (text,) = lines(recipe, *words)
    entry = re.search(r"write (model\.num_classes=\d+) \(weights of init_from then lose", text).group(1)
    found = lines(recipe, *words, entry)
    assert found[0].endswith("20 images, 2 classes of 10, no captions")
    assert any("rows in the file, " in line and "replaced by fresh rows" in line for line in found), found
