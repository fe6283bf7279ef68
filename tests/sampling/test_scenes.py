"""Videos: files, names, scenes and given frames, by a system whose frames count up (tests/support/counting.py)."""

import json
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from dstrain import recipe, rng
from dstrain.commands.generate import GenerateOptions, generate_samples
from dstrain.commands.options.command import parse_options
from dstrain.data.decode.clips import Cut
from dstrain.data.sources.videos import open_videos
from dstrain.recipe import ConfigError, Run
from dstrain.sampling.files import About, Pictures, choose_samples_folder
from dstrain.tracking.pictures import Album, composite_on_white, save_png
from tests.support import counting, gloo

PROMPTS = ("a sneaker moving left", "ein Ru\u0308ckl\u00e4ufer/../../etc", "")


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    counting.register(monkeypatch)
    return counting.folder(tmp_path / "run")


def arrays(out: Path) -> np.ndarray:
    (path,) = out.glob("samples_*.npz")
    with np.load(path) as file:
        return file["arr_0"]


def frames_of(path: Path) -> np.ndarray:
    """uint8 (T, H, W, 3) of a file, by Pillow or FFmpeg."""
    if path.suffix == ".gif":
        with Image.open(path) as image:
            return np.stack([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)])
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def brightness(clips: np.ndarray) -> np.ndarray:
    """Of each frame's bottom right pixel, int (N, T)."""
    return clips[:, :, -1, -1, 0].astype(int)


# --------------------------------------------------------------------------------------------------------------- files


def test_files_of_videos(run):
    """Oracle: the frames that the system draws, by hand, in the .npz and, read by Pillow and FFmpeg, in every file."""
    out = generate_samples(GenerateOptions(run, num=4, prompts=PROMPTS, seed=7, batch=3))
    clips = arrays(out)
    assert clips.shape == (4, 5, *counting.SIZE, 3) and clips.dtype == np.uint8
    assert brightness(clips).tolist() == [[3 * seed + i for i in range(5)] for seed in range(7, 11)]
    assert clips[:, 0, 0, 0, 0].tolist() == [len(PROMPTS[i % 3]) for i in range(4)]
    stems = ["000007-a-sneaker-moving-left", "000008-ein-rucklaufer-etc", "000009", "000010-a-sneaker-moving-left"]
    beside = {"captions.jsonl", "prompts.txt", "grid.gif", "grid.png", "samples_4x5x5x6x3.npz"}
    films = {f"{stem}.{kind}" for stem in stems for kind in ("gif", "mp4")}
    assert {path.name for path in out.iterdir()} == beside | {"samples"}
    assert {path.name for path in (out / "samples").iterdir()} == films
    for stem, clip in zip(stems, clips):
        assert np.array_equal(frames_of(out / "samples" / f"{stem}.gif"), clip)  # grey is kept exactly
        film = frames_of(out / "samples" / f"{stem}.mp4")
        assert film.shape == (5, 6, 6, 3) and abs(film[:, 3, 3].astype(int) - clip[:, 3, 3]).max() <= 8
    lines = [json.loads(line) for line in (out / "captions.jsonl").read_text().splitlines()]
    texts = [PROMPTS[i % 3] for i in range(4)]
    assert lines == [
        {"file": f"{stem}.gif", "caption": text, "seed": 7 + i} for i, (stem, text) in enumerate(zip(stems, texts))
    ]
    assert (out / "prompts.txt").read_text(encoding="utf-8").splitlines() == texts
    with np.load(out / "samples_4x5x5x6x3.npz") as file:
        assert file["prompts"].tolist() == texts and "arr_1" not in file


def test_a_generated_folder_is_data(run, tmp_path):
    """Oracle: what was drawn, read again by the trainer's own source of videos with its captions file."""
    out = generate_samples(
        GenerateOptions(run, num=3, prompts=("left", "right"), formats=("gif",), out=tmp_path / "clips")
    )
    clips = arrays(out)
    with pytest.raises(ConfigError, match=f"write data.path={out / 'samples'}"):
        open_videos(str(out), Cut(5, *counting.SIZE, channels=1), split="train")
    source = open_videos(
        str(out / "samples"), Cut(5, *counting.SIZE, channels=1), split="train", captions=str(out / "captions.jsonl")
    )
    assert len(source) == 3
    for index in range(3):
        item = source[index]
        number = int(source.name_sample(index)[:6])
        assert np.array_equal(item["video"][:, 0].numpy(), clips[number, ..., 0])
        assert bytes(item["caption"]).rstrip(b"\0").decode() == ("left", "right")[number % 2]


def test_formats_and_one_frame(run):
    """Oracle: the files asked for; a clip of one frame is a picture with its caption in its name."""
    out = generate_samples(GenerateOptions(run, num=2, formats=("mp4",), fps=25))
    assert {path.suffix for path in (out / "samples").iterdir()} == {".mp4"} and not (out / "captions.jsonl").exists()
    with av.open(str(out / "samples" / "000001.mp4")) as container:
        assert container.streams.video[0].average_rate == 25
    out = generate_samples(GenerateOptions(run, num=2, num_frames=1, prompts=("a hat",)))
    assert out.name == "generated_2" and sorted(path.name for path in out.iterdir()) == [
        "captions.jsonl",
        "grid.png",
        "prompts.txt",
        "samples",
        "samples_2x5x6x3.npz",
    ]
    assert sorted(path.name for path in (out / "samples").iterdir()) == ["000000-a-hat.png", "000001-a-hat.png"]
    out = generate_samples(GenerateOptions(run, num=2, pngs=False, prompts=("a hat",)))
    first = json.loads((out / "captions.jsonl").read_text().splitlines()[0])
    assert not (out / "samples").exists() and first["file"] is None


def test_the_recipes_own_prompts(tmp_path, monkeypatch):
    """Oracle: the lengths of the recipe's texts and its number of frames, until a command says otherwise."""
    counting.register(monkeypatch)
    run = counting.folder(tmp_path / "run", {"prompts": ["ab", "abc"], "num_frames": 3})
    assert arrays(generate_samples(GenerateOptions(run, num=3)))[..., 0, 0, 0].tolist() == [[2] * 3, [3] * 3, [2] * 3]
    assert arrays(generate_samples(GenerateOptions(run, num=1, prompts=("x",), num_frames=5)))[
        ..., 0, 0, 0
    ].tolist() == [[1] * 5]


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_files_of_pictures(tmp_path, channels):
    """Oracle: the pictures given, in the .npz three channels on white beside their labels, in each file as they are."""
    pictures = torch.randint(0, 256, (5, channels, 7, 6), dtype=torch.uint8)
    keep = Pictures(tmp_path, About(5, seed=2, labels=torch.tensor([3, 1, 3, 1, 3])))
    keep.add_samples(torch.arange(3), pictures[:3])
    keep.add_samples(torch.arange(3, 5), pictures[3:])
    keep.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["grid.png", "samples", "samples_5x7x6x3.npz"]
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [
        f"{number:06d}.png" for number in range(2, 7)
    ]
    for number, picture in enumerate(pictures, 2):
        found = np.asarray(Image.open(tmp_path / "samples" / f"{number:06d}.png")).reshape(7, 6, channels)
        assert np.array_equal(found, picture.permute(1, 2, 0).numpy())
    with np.load(tmp_path / "samples_5x7x6x3.npz") as file:
        assert file["arr_1"].tolist() == [3, 1, 3, 1, 3] and file["arr_1"].dtype == np.int64
        white = composite_on_white(pictures).permute(0, 2, 3, 1).expand(-1, -1, -1, 3).numpy()
        assert np.array_equal(file["arr_0"], white)


def test_pictures_of_a_stopped_command(tmp_path):
    """Oracle: the law that samples/ holds one command's samples: pictures without their .npz are not drawn beside."""
    save_png(tmp_path / "generated" / "samples" / "000099.png", np.zeros((4, 4, 1), np.uint8))
    assert choose_samples_folder(None, tmp_path) == tmp_path / "generated_2"
    with pytest.raises(ConfigError, match="generated holds samples already: name another folder, or empty it"):
        choose_samples_folder(tmp_path / "generated", tmp_path)


# -------------------------------------------------------------------------------------------------------------- scenes


@pytest.mark.parametrize("kept, expected", [(None, [5, 9, 13]), (3, [5, 7, 9])])
def test_scenes_go_on(run, kept, expected):
    """Oracle: frames that count on without a step or a repetition, though each scene knows the given frames alone; each
    scene's frames show the length of its text and noise of their own.
    """
    texts = ("one", "then two", "and at last three")
    out = generate_samples(GenerateOptions(run, num=3, scenes=texts, prime_frames=kept, batch=2, seed=4))
    clips = arrays(out)
    assert clips.shape[1] == expected[-1]
    assert brightness(clips).tolist() == [[3 * seed + i for i in range(expected[-1])] for seed in (4, 5, 6)]
    seeds, begin = torch.tensor([4, 5, 6]), 0
    for text, end in zip(texts, expected):
        assert (clips[:, begin:end, 0, 0] == len(text)).all()
        assert (clips[:, begin:end, 0, 1, 0] == counting.noise_of(seeds).numpy()[:, None]).all()
        seeds, begin = rng.keys_of_seeds(seeds), end
    stem = "000004-one-then-two-and-at-last-three"
    assert np.array_equal(frames_of(out / "samples" / f"{stem}.gif"), clips[0])
    line = json.loads((out / "captions.jsonl").read_text().splitlines()[0])
    assert line == {
        "file": f"{stem}.gif",
        "caption": "one; then two; and at last three",
        "seed": 4,
        "scenes": [
            {"caption": text, "first": begin, "frames": end - begin}
            for text, begin, end in zip(texts, [0, *expected], expected)
        ],
    }
    assert (out / "prompts.txt").read_text().splitlines() == list(texts)


def on_a_rank(rank: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        counting.register(patch)
        generate_samples(GenerateOptions(folder, num=5, scenes=("a", "bc"), batch=2, out=folder.parent / "two"))


def test_two_ranks_write_the_same(run, tmp_path):
    """Oracle: one process's folder, file by file, byte by byte but for the .npz, which holds the same arrays."""
    one = generate_samples(GenerateOptions(run, num=5, scenes=("a", "bc"), batch=3, out=tmp_path / "one"))
    gloo.run(tmp_path, on_a_rank, run)
    files = sorted(str(path.relative_to(one)) for path in one.rglob("*.*"))
    assert files == sorted(str(path.relative_to(tmp_path / "two")) for path in (tmp_path / "two").rglob("*.*"))
    assert len(files) == 5 + 2 * 5
    for name in files:
        if not name.endswith(".npz"):
            assert (one / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    assert np.array_equal(arrays(one), arrays(tmp_path / "two"))


# -------------------------------------------------------------------------------------------------------- given frames


def written(folder: Path, values: list[int], name: str = "a.gif") -> Path:
    """A clip of frames of one grey each."""
    folder.mkdir(exist_ok=True)
    frames = [Image.new("L", counting.SIZE[::-1], value) for value in values]
    frames[0].save(folder / name, save_all=True, append_images=frames[1:], duration=100)
    return folder / name


@pytest.mark.parametrize(
    "values, asked, given",
    [([10, 20, 30, 40], None, [20, 30, 40]), ([10, 20], None, [20]), ([10, 20, 30, 40], 1, [40]), ([77], None, [77])],
)
def test_given_frames_are_kept(run, tmp_path, values, asked, given):
    """Oracle: the last frames of the file, exactly, and those that count on from them."""
    path = written(tmp_path / "clips", values)
    clips = arrays(generate_samples(GenerateOptions(run, num=2, prime=path, prime_frames=asked)))
    wanted = given + [given[-1] + 1 + i for i in range(5 - len(given))]
    assert brightness(clips).tolist() == [wanted, wanted]
    assert (clips[:, : len(given)] == np.array(given)[None, :, None, None, None]).all()
    assert (clips[0, len(given) :, 0, 1] != clips[1, len(given) :, 0, 1]).any()  # two seeds


def test_given_frames_of_a_folder(run, tmp_path):
    """Oracle: the files by name, in turn; of the shortest clip's length; and scenes that go on from there."""
    written(tmp_path / "clips", [10, 20, 30], "b.gif")
    written(tmp_path / "clips", [50], "a.png")
    clips = arrays(
        generate_samples(GenerateOptions(run, num=3, prime=tmp_path / "clips", scenes=("x", "yz"), prime_frames=1))
    )
    assert brightness(clips).tolist() == [[first + i for i in range(9)] for first in (50, 30, 50)]


def test_given_frames_of_an_earlier_run(run, tmp_path):
    """Oracle: the frames that the first command wrote, exactly, by its folder, its .npz or its samples."""
    first = generate_samples(GenerateOptions(run, num=2))
    for path in (first, *first.glob("*.npz"), first / "samples"):
        clips = arrays(generate_samples(GenerateOptions(run, num=2, prime=path)))
        assert np.array_equal(clips[:, :3], arrays(first)[:, -3:])
        assert brightness(clips)[:, 3:].tolist() == [[5, 6], [8, 9]]


# ------------------------------------------------------------------------------------------------------------- refused


def broken(folder: Path) -> Path:
    folder.mkdir()
    (folder / "a.mp4").write_bytes(b"no video at all")
    return folder / "a.mp4"


def an_npz(folder: Path) -> Path:
    folder.mkdir()
    album = Album(folder, (1, 3, 8, 8, 3))
    album.add_pictures(np.zeros((1, 3, 8, 8, 3), np.uint8))
    album.close()
    return folder


def cut_off(folder: Path) -> Path:
    (found,) = an_npz(folder).glob("*.npz")
    found.write_bytes(found.read_bytes()[:100])
    return found


def upsampler(folder: Path) -> Path:
    folder.mkdir()
    model = {"image_size": 8, "small_size": 4, "channel_mult": [1], "attention_resolutions": []}
    run = Run(system="iddpm", model=model, data={"image_size": 8})
    (folder / "run.yaml").write_text(recipe.dump_run(run))
    return folder


@pytest.mark.parametrize(
    "make, words, message",
    [
        (None, {"num_frames": 4}, "--num-frames 4: clips of this model have 1 + k * 2 frames: ask for 3 or 5"),
        (None, {"num_frames": 7}, "--num-frames 7: clips of this model have 5 at most"),
        (None, {"scenes": ("a",), "prime_frames": 2}, "--prime-frames 2: give 1 + m * 2 of the 5 frames, and not all"),
        (None, {"scenes": ("a",), "prime_frames": 5}, "and not all"),
        (None, {"scenes": ("a",), "num_frames": 1}, "raise --num-frames"),
        (None, {"prime_frames": 3}, "give one of them, or leave it out"),
        (None, {"scenes": ("a",), "prompts": ("b",)}, "leave out --prompts and --labels"),
        (None, {"prime": Path("/no/where.mp4")}, "--prime /no/where.mp4 cannot be read"),
        (broken, {}, "a.mp4 cannot be read"),
        (lambda folder: folder.mkdir() or folder, {}, "holds no video and no picture"),
        (lambda folder: written(folder, [1, 2]), {"prime_frames": 3}, "there are 2 frames, and --prime-frames 3"),
        (an_npz, {}, "goes on from uint8 (N, T, 5, 6, 3)"),
        (cut_off, {}, "samples_1x3x8x8x3.npz is no folder of pictures, nor a .npz with arr_0"),
        (counting.folder, {"then": True}, "begins from noise"),
        (upsampler, {"then": True}, "goes on from pictures, and "),
    ],
)
def test_wrong_options(run, tmp_path, make, words, message):
    """Oracle: one line that names the option or file and the remedy; no folder is made."""
    made = make(tmp_path / "made") if make else None
    changes = {"then": (made,)} if words.get("then") else words | ({"prime": made} if made else {})
    with pytest.raises(ConfigError) as refused:
        generate_samples(GenerateOptions(run, **changes))
    assert message in str(refused.value) and len(refused.value.problems) == 1
    assert not list(run.glob("generated*"))


def test_a_sampler_that_is_not_there(tmp_path):
    """Oracle: a run without checkpoints, which would be the next complaint."""
    run = upsampler(tmp_path / "run")
    with pytest.raises(ConfigError, match="--sampler=euler is none of dpm.*ddpm, ddim: name one"):
        generate_samples(GenerateOptions(run, sampler="euler"))


@pytest.mark.parametrize(
    "words, message", [({"scenes": ("a", "b")}, "--scenes: "), ({"prime": Path("x")}, "--prime: ")]
)
def test_a_system_without_priming(tmp_path, monkeypatch, words, message):
    """Oracle: a line that names the option and the system."""
    counting.register(monkeypatch)
    run = counting.folder(tmp_path / "run", goes_on=False)
    with pytest.raises(
        ConfigError, match="trains tests.support.counting, which cannot go on from given frames"
    ) as refused:
        generate_samples(GenerateOptions(run, **words))
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--scenes", "empty.txt"], "holds no line of text"),
        (["--scenes", "none.txt"], "cannot be read as a text file"),
        (["--prompts", "bytes.txt"], "cannot be read as a text file"),
        (["--format", "avi"], "is not of gif, mp4"),
        (["--num-frames", "0"], "is not a whole number above 0"),
    ],
)
def test_wrong_words(tmp_path, monkeypatch, words, message):
    """Oracle: the parser's own complaint, which names the file or the word."""
    (tmp_path / "empty.txt").write_text(" \n\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        parse_options(GenerateOptions, ["run", *words])


def test_words_of_videos(tmp_path):
    """Oracle: the options written by hand."""
    (tmp_path / "story.txt").write_text("one\n\n two \n")
    found = parse_options(
        GenerateOptions,
        [
            "run",
            "--scenes",
            str(tmp_path / "story.txt"),
            "--prime",
            "a.gif",
            "--prime-frames",
            "3",
            "--num-frames",
            "9",
            "--format",
            "mp4,gif",
            "--fps",
            "8",
            "--num-samples",
            "2",
        ],
    )
    assert found == GenerateOptions(
        Path("run"),
        num=2,
        scenes=("one", "two"),
        prime=Path("a.gif"),
        prime_frames=3,
        num_frames=9,
        formats=("mp4", "gif"),
        fps=8,
    )
