"""What generate writes and reads: the .npz in pieces, pictures to begin from. Whole commands: tests/launch."""

import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from dstrain import recipe, systems
from dstrain.commands.generate import GenerateOptions, generate_samples
from dstrain.commands.options.command import parse_options
from dstrain.commands.options.plan import PlanOptions
from dstrain.data.decode.pixels import read_pictures
from dstrain.recipe import ConfigError, Run
from dstrain.tracking.pictures import Album
from tests.support import checkpoints
from tests.support.launch import ROOT


@pytest.fixture
def pictures():
    return np.random.default_rng(0).integers(0, 256, (7, 5, 5, 3), dtype=np.uint8)


def test_album(tmp_path, pictures):
    """Oracle: numpy reads what was put in, in pieces; there is no file of that name before the end."""
    album = Album(tmp_path, pictures.shape)
    for piece in (pictures[:3], pictures[3:4], pictures[4:]):
        album.add_pictures(piece)
        assert not list(tmp_path.glob("samples_*"))
    album.close()
    assert [path.name for path in tmp_path.iterdir()] == ["samples_7x5x5x3.npz"]
    assert np.array_equal(np.load(tmp_path / "samples_7x5x5x3.npz")["arr_0"], pictures)


def test_album_with_labels(tmp_path, pictures):
    """Oracle: numpy reads the arrays that were given, in the layout of ADM's evaluator."""
    album = Album(tmp_path, pictures.shape)
    album.add_pictures(pictures)
    album.close(arr_1=np.arange(7), prompts=np.array(["a hat", "\u00e9t\u00e9"]))
    with np.load(tmp_path / "samples_7x5x5x3.npz", allow_pickle=False) as file:
        assert file.files == ["arr_0", "arr_1", "prompts"] and np.array_equal(file["arr_0"], pictures)
        assert file["arr_1"].dtype == np.int64 and file["arr_1"].tolist() == [*range(7)]
        assert file["prompts"].tolist() == ["a hat", "\u00e9t\u00e9"]


def test_pictures_of_an_npz(tmp_path, pictures):
    """Oracle: numpy's own file; grey is Pillow's, and grey becomes three equal channels."""
    np.savez(tmp_path / "a.npz", arr_0=pictures)
    assert np.array_equal(read_pictures(tmp_path / "a.npz", 3).permute(0, 2, 3, 1).numpy(), pictures)
    grey = read_pictures(tmp_path / "a.npz", 1)
    assert grey.shape == (7, 1, 5, 5) and np.array_equal(
        grey[3, 0], np.array(Image.fromarray(pictures[3]).convert("L"))
    )
    np.savez(tmp_path / "b.npz", arr_0=pictures[..., :1])
    three = read_pictures(tmp_path / "b.npz", 3)
    assert three.shape == (7, 3, 5, 5) and torch.equal(three[:, 0], three[:, 2])


def test_pictures_of_a_folder(tmp_path, pictures):
    """Oracle: the pictures that were saved, by name; the folder of an earlier run is read by its
    .npz, without the grid.
    """
    for number in (2, 0, 1):
        Image.fromarray(pictures[number]).save(tmp_path / f"{number:03}.png")
    assert np.array_equal(read_pictures(tmp_path, 3).permute(0, 2, 3, 1).numpy(), pictures[:3])
    Image.new("RGB", (9, 9)).save(tmp_path / "grid.png")
    with pytest.raises(ValueError, match="2 sizes"):
        read_pictures(tmp_path, 3)
    album = Album(tmp_path, pictures.shape)
    album.add_pictures(pictures)
    album.close()
    assert np.array_equal(read_pictures(tmp_path, 3).permute(0, 2, 3, 1).numpy(), pictures)


def test_pictures_of_a_folder_that_cannot_be_read(tmp_path, pictures):
    """Oracle: a ValueError that names the file: of a pipe, at which a command would wait for ever, and of a header with
    more pixels than the cap. A picture that its EXIF data turn has the size of its neighbours.
    """
    Image.new("RGB", (4, 6)).save(tmp_path / "a.jpg")
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (6, 4)).save(tmp_path / "b.jpg", exif=turned)
    assert read_pictures(tmp_path, 3).shape == (2, 3, 4, 4)
    os.mkfifo(tmp_path / "c.png")
    with pytest.raises(ValueError, match=r"a picture cannot be read, c\.png .*FIFO.*remove or replace it"):
        read_pictures(tmp_path, 3)
    (tmp_path / "c.png").unlink()
    Image.new("1", (30000, 30000)).save(tmp_path / "d.png")
    with pytest.raises(ValueError, match=r"a picture cannot be read, d\.png .*cap.*remove or replace it"):
        read_pictures(tmp_path, 3)


@pytest.mark.parametrize("content", [b"", b"PK not a zip", b"PK\3\4 cut off", None])
def test_no_pictures(tmp_path, content):
    """Oracle: a ValueError that names the path."""
    path = tmp_path / "x.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match="x.npz is no folder of pictures"):
        read_pictures(path, 3)
    np.savez(path, arr_0=np.zeros((3, 4), np.float32))
    with pytest.raises(ValueError, match="pictures are uint8"):
        read_pictures(path, 3)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no pictures"):
        read_pictures(tmp_path / "empty", 3)


@pytest.mark.parametrize(
    "command, words, meant",
    [
        (GenerateOptions, ["run", "num_samples=a_b"], "--num-samples a_b"),
        (GenerateOptions, ["run", "--step", "7"], "--checkpoint"),
        (PlanOptions, ["--gpus", "8"], "--world"),
    ],
)
def test_names_of_options_elsewhere(command, words, meant):
    """Oracle: by hand: the option that is meant, which no similarity of names finds."""
    with pytest.raises(ConfigError, match=rf"\(did you mean {meant}\?\)"):
        parse_options(command, words)


PHENAKI = {
    "token_shape": [3, 2, 2],
    "codebook_size": 64,
    "dim": 16,
    "depth": 1,
    "heads": 2,
    "dim_head": 8,
    "text_encoder": None,
    "num_words": 40,
}


@pytest.mark.parametrize(
    "system, model, words, message",
    [
        (
            "phenaki",
            {},
            {"text_encoder": "/tmp/none"},
            "RUN: --text-encoder: the model hashes words and reads no encoder; leave it out",
        ),
        (
            "phenaki",
            {"unconditional": True},
            {"text_encoder": "x"},
            "RUN: --text-encoder: the model is unconditional and takes no texts",
        ),
        ("dit", {}, {"tokenizer": "x"}, "RUN: --tokenizer: the model decodes no tokens; leave it out"),
        (
            "phenaki",
            {"tokenizer": None},
            {},
            "RUN trains phenaki, which cannot draw: .*no tokenizer is named .* --tokenizer FOLDER",
        ),
        ("phenaki", {"tokenizer": None}, {"tokenizer": "/tmp/none"}, "RUN holds no whole checkpoint yet"),
        ("phenaki", {"depth": 0}, {}, "RUN: model.depth=0: it should be"),
        ("phenaki", {"train": "critic"}, {}, "RUN: model: train=critic: there is no critic; set critic=token"),
        ("phenakis", {}, {}, "RUN: system: 'phenakis' is unknown"),
    ],
)
def test_runs_that_cannot_draw(tmp_path, system, model, words, message):
    """Oracle: one line that names the word or the key, and the remedy where it is an option's."""
    fields = {} if system == "dit" else {"tokenizer": {"path": "there"}} | PHENAKI | model
    run = Run.model_validate({"name": "x", "system": system, "model": fields, "samples": {"sampler": "confidence"}})
    (tmp_path / "run.yaml").write_text(recipe.dump_run(run))
    with pytest.raises(ConfigError, match=message.replace("RUN", str(tmp_path))) as found:
        generate_samples(GenerateOptions(tmp_path, **words))
    assert len(found.value.problems) == 1 and "\n" not in str(found.value)


@pytest.fixture
def tiny(tmp_path):
    """The folder of a run of random weights."""
    run = recipe.load_recipe(ROOT / "tests/launch/tiny.yaml", ["samples.num_steps=1"])
    run = recipe.complete_model_section(run, systems.find_config_class("dit"))
    networks = systems.build("dit", run.model).networks()
    torch.manual_seed(0)
    for weight in networks["denoiser"].parameters():
        torch.nn.init.normal_(weight, std=0.1)
    return checkpoints.write(tmp_path / "run", run, networks)


def test_precision(tiny, tmp_path):
    """Oracle: the same pictures in fp32, up to rounding to 8 bits of mantissa, and the same bytes given twice."""
    drawn = []
    for name, words in (("exact", {}), ("again", {}), ("near", {"precision": "bf16"})):
        out = generate_samples(GenerateOptions(tiny, num=4, num_steps=3, out=tmp_path / name, pngs=False, **words))
        drawn.append(np.load(next(out.glob("*.npz")))["arr_0"].astype(float))
    exact, again, near = drawn
    assert np.array_equal(exact, again) and 0 < np.abs(near - exact).mean() < 2


def test_a_full_disk(tiny, tmp_path):
    """Oracle: a process whose files may not grow beyond 2 kB: what is wrong, in a line."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(ConfigError, match="--out .*/out cannot be written .*File too large.*: make room"):
            generate_samples(GenerateOptions(tiny, num=2, out=tmp_path / "out"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@pytest.mark.parametrize("place", ["samples", "checkpoints/mine", "reconstructed"])
def test_pictures_among_what_a_run_has_written(tiny, tmp_path, place):
    """Oracle: docs/design.md: what a run writes is its own; the remedy, typed, draws."""
    (tmp_path / "link").symlink_to(tiny)
    with pytest.raises(
        ConfigError, match=f"--out .* lies in .*/{place.split('/')[0]}, which belongs to the run"
    ) as error:
        generate_samples(GenerateOptions(tiny, num=1, out=tmp_path / "link" / place))
    remedy = Path(str(error.value).rpartition("such as ")[2])
    generate_samples(GenerateOptions(tiny, num=1, out=remedy))
    assert len(drawn(remedy)) == 1


def drawn(out):
    return np.load(next(out.glob("*.npz")))["arr_0"].astype(float)


def test_invert(tiny, tmp_path, capsys):
    """Oracle: numpy's distance between the pictures given and those that came back; what does not fit is refused."""
    given = generate_samples(GenerateOptions(tiny, num=3, num_steps=4, out=tmp_path / "given", pngs=False))
    capsys.readouterr()
    back = generate_samples(
        GenerateOptions(tiny, num=3, num_steps=8, sampler="ddim", invert=given, out=tmp_path / "back", pngs=False)
    )
    error = np.abs(drawn(back) - drawn(given)).mean()
    assert f"--invert: pictures come back to {error:.3g} of 255 on average" in capsys.readouterr().out
    for words, message in (
        ({"sampler": "dpm++"}, "sampler=dpm.* cannot be inverted"),
        ({"low_res": given}, "--low-res .*takes no pictures"),
        ({"then": (tiny,)}, "leave out --low-res, --then and --size"),
    ):
        with pytest.raises(ConfigError, match=message):
            generate_samples(GenerateOptions(tiny, invert=given, out=tmp_path / "none", **words))


def test_guide(tiny, tmp_path):
    """Oracle: a run that is guided by itself draws as without guidance; another system is refused."""
    words = {"num": 3, "num_steps": 3, "sampler": "dpm++", "pngs": False}
    plain = generate_samples(GenerateOptions(tiny, guidance_scale=1.0, out=tmp_path / "plain", **words))
    guided = generate_samples(
        GenerateOptions(tiny, guidance_scale=3.0, guide=(tiny, 0.9, None), out=tmp_path / "guided", **words)
    )
    assert np.abs(drawn(plain) - drawn(guided)).max() <= 1
    run = recipe.load_recipe(tiny / "run.yaml")
    other = tmp_path / "other"
    other.mkdir()
    (other / "run.yaml").write_text(
        recipe.dump_run(run.model_copy(update={"model": run.model | {"objective": "flow"}}))
    )
    with pytest.raises(ConfigError, match="--guide .*other: model.diffusion differs"):
        generate_samples(GenerateOptions(tiny, guide=(other, None, None), **words))
    with pytest.raises(ConfigError, match="--guide .*scale 1 is none"):
        generate_samples(GenerateOptions(tiny, guide=(tiny, None, None), guidance_scale=1.0, **words))
    assert run.samples.guidance_scale != 1
    given = tmp_path / "given.npz"
    np.savez(given, np.zeros((1, 32, 32, 1), np.uint8))
    with pytest.raises(ConfigError, match="--guide .*scale 1 is none"):  # which --invert takes unless told
        generate_samples(GenerateOptions(tiny, guide=(tiny, None, None), invert=given, **words | {"sampler": "ddim"}))
