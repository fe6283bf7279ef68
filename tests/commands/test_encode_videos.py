"""Encoding videos: tokens, real frames, captions and their encodings, what the same command does again, refusals."""

import shutil

import numpy as np
import pytest
import torch

from dstrain import recipe, systems
from dstrain.commands.encode import EncodeOptions, encode_data
from dstrain.commands.job import prepare_job
from dstrain.commands.options.command import parse_options
from dstrain.commands.options.train import TrainOptions
from dstrain.data.batches import Batches
from dstrain.data.cached.latents import Latents
from dstrain.data.decode.clips import Cut
from dstrain.data.open import fill_in_codes_entry, open_sources
from dstrain.data.sources.videos import Mixed, open_videos
from dstrain.encoders.text import TextEncoder, unpack_captions
from dstrain.recipe import Codes, ConfigError, Data, Run
from tests.support import clips, tokenizer, towers
from tests.support.pictures import folder as folder_of_images

LENGTHS = (9, 3, 20, 5, 1, 7, 12)  # frames of each clip
TEXTS = [f"a {towers.WORDS[1 + i % 3]} {towers.WORDS[4 + i % 3]}" for i in range(len(LENGTHS))]


def write(root, captions=True):
    """Seven clips, longer and shorter than five frames, with a caption beside each."""
    root.mkdir()
    for i, (length, text) in enumerate(zip(LENGTHS, TEXTS)):
        clips.write_pictures(root / f"{i:03}.apng", clips.moving(length, 24, 16, seed=i))
        if captions:
            (root / f"{i:03}.txt").write_text(text)
    return root


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of clips, a tokenizer of random weights, and a text encoder."""
    root = tmp_path_factory.mktemp("videos")
    write(root / "clips")
    towers.sentences(root / "text")
    return root, *tokenizer.save(root / "stage", str(root / "clips"))


def options(root, out, **changes):
    return EncodeOptions(
        **{"out": out, "run": root / "stage", "batch": 3, "shard_size": 4, "dtype": "float32"} | changes
    )


def content(path):
    return {entry.name: entry.read_bytes() for entry in sorted(path.iterdir()) if entry.name[0] != "."}


def tokens_of(system, nets, videos, frames):
    """By the network itself, one clip at a time, since nothing may depend on what stands beside a clip."""
    found = []
    for video, count in zip(videos, frames):
        example = {"video": video[None], "frames": torch.tensor([int(count)]), "key": torch.zeros(1, dtype=torch.int64)}
        found.append(system.compute_codes(nets, system.encode(example))["tokens"])
    return torch.cat(found)


def test_shards_hold_tokens_and_what_is_said_of_them(made, tmp_path):
    """Oracle: the network by itself, the files' lengths and captions, and the text encoder by itself."""
    root, system, nets = made
    index = encode_data(options(root, tmp_path / "out", text_encoder=str(root / "text")))
    source, encoder = open_videos(root / "clips", Cut(5, 8, 12, 1), split="all"), TextEncoder(str(root / "text"))
    found = Latents(tmp_path / "out")
    assert index["encoding"]["codebook_size"] == 16 and index["encoding"]["shape"] == [3, 2, 3] and found.captioned
    assert [len(shard["hash"]) for shard in index["shards"]] == [64, 64] and len(found) == 7
    items, batch = [source[i] for i in range(7)], found.read_codes(torch.tensor([6, 0, 3, 4, 5, 1, 2]))
    rows = torch.tensor([6, 0, 3, 4, 5, 1, 2])
    wanted = tokens_of(system, nets, [item["video"] for item in items], [item["frames"] for item in items])
    assert batch["tokens"].dtype == torch.int64 and torch.equal(batch["tokens"], wanted[rows])
    assert len(batch["tokens"].unique()) > 4, "tokens that are all alike would show nothing"
    assert batch["frames"].tolist() == [min(LENGTHS[i], 5) for i in rows] and batch["frames"].dtype == torch.int64
    assert batch["caption"].dtype == torch.uint8 and unpack_captions(batch["caption"]) == [TEXTS[i] for i in rows]
    texts = encoder.encode([TEXTS[i] for i in rows])
    torch.testing.assert_close(batch["text_encodings"], texts["text_encodings"], rtol=1e-5, atol=1e-6)
    assert torch.equal(batch["text_mask"], texts["text_mask"]) and batch["text_mask"].dtype == torch.bool
    assert batch["label"].tolist() == [0] * 7
    assert found[4]["frames"] == 1 and torch.equal(found[4]["tokens"], wanted[4])
    with pytest.raises(ValueError, match="holds no mirrored"):
        found.read_codes(rows, torch.ones(7, dtype=torch.bool))


def test_windows_of_a_clip(made, tmp_path):
    """Oracle: windows counted by hand: of 20 frames two of five may begin at 16 places, so at the 4th and the 12th."""
    root, system, nets = made
    encode_data(options(root, tmp_path / "out", clips=2))
    found, whole = Latents(tmp_path / "out"), open_videos(root / "clips", Cut(20, 8, 12, 1), split="all")[2]["video"]
    batch = found.read_codes(torch.arange(14))
    wanted = tokens_of(system, nets, [whole[4:9], whole[12:17]], [5, 5])
    assert torch.equal(batch["tokens"][4:6], wanted) and not torch.equal(wanted[0], wanted[1])
    assert batch["frames"].tolist() == [min(length, 5) for length in LENGTHS for _ in (0, 1)]
    assert unpack_captions(batch["caption"]) == [text for text in TEXTS for _ in (0, 1)] and "text_mask" not in batch


def test_the_same_command_again(made, tmp_path):
    """Oracle: the bytes of the first time, from whatever is left; other shard borders and batches move no content."""
    root, out = made[0], tmp_path / "out"
    words = {"text_encoder": str(root / "text"), "clips": 3}
    encode_data(options(root, out, **words))
    before = content(out)
    data = bytearray(before["shard_00003.safetensors"])
    data[-2] ^= 8
    (out / "shard_00003.safetensors").write_bytes(data)
    for name in ("index.json", "shard_00000.safetensors"):
        (out / name).unlink()
    kept = (out / "shard_00001.safetensors").stat().st_mtime_ns
    encode_data(options(root, out, **words))
    assert content(out) == before and (out / "shard_00001.safetensors").stat().st_mtime_ns == kept
    for changes, message in (
        ({"clips": 2}, "data .* x 3.* there, .* x 2.* here"),
        ({"text_encoder": None}, "text .*encoder.* there, None here"),
        ({"max_text_len": 6}, r"'shape': \[10, 12\].* there, .*'shape': \[6, 12\]"),
        ({"batch": 4}, "batch 3 there, 4 here"),
    ):
        with pytest.raises(ConfigError, match=f"holds another encoding: .*{message}"):
            encode_data(options(root, out, **words | changes))
    assert content(out) == before
    encode_data(options(root, tmp_path / "cut", **words, shard_size=5))
    whole, cut = (Latents(path).read_codes(torch.arange(21)) for path in (out, tmp_path / "cut"))
    assert whole.keys() == cut.keys() and all(torch.equal(whole[name], cut[name]) for name in whole)


def test_other_clips_of_the_same_names(made, tmp_path):
    """Oracle: the bytes of the first time, kept for a copied folder alone, as what training compares."""
    root, out, there = made[0], tmp_path / "out", write(tmp_path / "clips")
    words = {"data": str(there), "clips": 2}
    encode_data(options(root, out, **words))
    before = content(out)
    shutil.copytree(there, tmp_path / "copy", copy_function=shutil.copyfile)
    encode_data(options(root, out, data=str(tmp_path / "copy"), clips=2))
    assert {name for name, data in content(out).items() if data != before[name]} == {"encoding.json"}, "names the copy"
    encode_data(options(root, out, **words))
    assert content(out) == before
    known = open_videos(there, Cut(5, 8, 12, 1), split="all").compute_fingerprint()
    clips.write_pictures(there / "003.apng", clips.moving(9, 24, 16, seed=3))
    (tmp_path / "copy" / "003.txt").write_text("another text")
    for data in (there, tmp_path / "copy"):
        again = f"holds another encoding: data {there}, train .* there, {data}, train .* here. Name another"
        with pytest.raises(ConfigError, match=again):
            encode_data(options(root, out, data=str(data), clips=2))
        assert open_videos(data, Cut(5, 8, 12, 1), split="all").compute_fingerprint() != known
    assert content(out) == before
    for folder in (root / "clips", tmp_path / "copy"):
        source = open_videos(folder, Cut(5, 8, 12, 1), split="all")
        assert Mixed(source, source, 0.5).compute_full_fingerprint().count(source.compute_full_fingerprint()) == 2


def test_captions_files_are_told_apart(made, tmp_path):
    """Oracle: texts that are the same letters in a row, but of other clips."""
    found = []
    for split in (1, 2):
        texts = ["abc"[:split], "abc"[split:], *"defgh"]
        (tmp_path / "a.tsv").write_text("".join(f"{i:03}.apng\t{text}\n" for i, text in enumerate(texts)))
        clips = open_videos(made[0] / "clips", Cut(5, 8, 12, 1), split="all", captions=tmp_path / "a.tsv")
        found.append(clips.compute_full_fingerprint())
    assert found[0] != found[1]


def test_maskgit_on_clips_themselves(made, tmp_path):
    """Oracle: the contract of launch/train.py's checks; a broken first clip is passed over, as in training."""
    there, stage = write(tmp_path / "clips"), made[0] / "stage"
    images = folder_of_images(tmp_path / "images", 1, 3) / "c0"
    (there / "000.apng").write_bytes(b"")

    def prepared(*words):
        given = [
            "data.height=8",
            "data.image_size=12",
            f"data.path={there}",
            f"model.tokenizer.path={stage}",
            "data.held_out=0",
            "every.metrics=0",
            f"folder={tmp_path / 'run'}",
            *words,
        ]
        return prepare_job(
            parse_options(TrainOptions, ["--recipe", "tests/launch/tiny-phenaki.yaml", *given]), 1, "cpu"
        )

    assert prepared().run.data.path == str(there)
    none = ("model.unconditional=true", "samples.prompts=null", "samples.guidance_scale=1")
    assert prepared("data.flip=true", *none).run.data.flip, "nobody reads what would be belied"
    for words, message in (
        (["data.flip=true"], "data.flip=true: phenaki reads the captions .*data.flip=false"),
        ([f"data.images={images}"], f"data.images={images}: no captions are there"),
        (["data.captions=null", f"data.path={images}"], f"data.path={images}: no captions"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepared(*words)


def test_batches_of_a_cache(made, tmp_path):
    """Oracle: the items of the cache by their index, found again in batches at two world sizes; the recipe's words."""
    root = made[0]
    encode_data(options(root, tmp_path / "out", text_encoder=str(root / "text"), dtype="float16"))
    given = Data(path=str(tmp_path / "out"), image_size=12, height=8, num_frames=5, channels=1, flip=False)
    data = fill_in_codes_entry(given)
    first = Latents(tmp_path / "out").encoding["first_stage"]
    assert data.codes == Codes(
        kind="tokens",
        shape=(3, 2, 3),
        flips=1,
        scaling_factor=None,
        first_stage=first,
        codebook_size=16,
        text=(10, 12),
        text_encoder=TextEncoder(str(root / "text")).compute_fingerprint(),
    )
    parts = []
    for world in (1, 2):
        for rank in range(world):
            with Batches(
                open_sources(data)[0],
                global_batch=6,
                micro_batch=6 // world,
                seed=2,
                rank=rank,
                world=world,
                flip=False,
            ) as batches:
                parts += batches.read_step(1)
    whole, halves = parts[0], {name: torch.cat([part[name] for part in parts[1:]]) for name in parts[0]}
    assert all(torch.equal(whole[name], halves[name]) for name in whole)
    assert {"tokens", "frames", "caption", "text_encodings", "text_mask", "label"} <= whole.keys()
    assert whole["text_encodings"].dtype == torch.float16 and unpack_captions(whole["caption"])[0] in TEXTS
    run = Run(name="x", system="phenaki", data=data, model={"dim": 16, "depth": 1, "heads": 2, "dim_head": 8})
    system = systems.build("phenaki", recipe.complete_model_section(run, systems.find_config_class("phenaki")).model)
    assert (system.config.max_text_len, system.config.text_encoder_fingerprint) == (10, data.codes.text_encoder)
    terms = system.loss("maskgit", system.networks(), system.encode(whole))
    assert 0.5 * np.log(16) < terms["loss"] < 2 * np.log(16), "the model of these tokens learns from the batch as it is"
    for change, message in (
        ({"num_frames": 7}, "data.num_frames=7: .* write data.num_frames=5"),
        ({"num_frames": None}, "data.num_frames=None: .* clips of num_frames 5"),
        ({"height": None}, "data.height=12: .* write data.height=8"),
        ({"frame_stride": 2}, "write data.frame_stride=1"),
        ({"flip": True}, "no mirrored videos, since captions name directions.*data.flip=false"),
    ):
        with pytest.raises(ValueError, match=message):
            fill_in_codes_entry(given.model_copy(update=change))


def test_what_cannot_be_encoded(made, tmp_path):
    """Oracle: the contract: one line with the remedy, before anything is written."""
    root, out = made[0], tmp_path / "out"
    write(tmp_path / "silent", captions=False)
    write(tmp_path / "half")
    (tmp_path / "half" / "003.txt").unlink()
    tokenizer.save(tmp_path / "moving")
    few = tmp_path / "few.tsv"
    few.write_text(f"000.apng\t{TEXTS[0]}\n")
    text = str(root / "text")
    for changes, message in (
        ({"data": str(tmp_path / "silent"), "text_encoder": text}, "the videos have no captions to encode; write X"),
        ({"data": str(tmp_path / "half")}, "no .txt with a caption beside 003.apng"),
        ({"data": str(tmp_path / "silent"), "captions": str(few)}, f"--captions {few}: no caption of 001.apng"),
        ({"text_encoder": text, "max_text_len": 99}, "--max-text-len: the encoder .* takes 10 tokens"),
        ({"text_encoder": str(tmp_path / "no")}, "--text-encoder: there is no folder"),
        ({"max_text_len": 5}, "--max-text-len counts the tokens of --text-encoder"),
        ({"run": tmp_path / "moving", "clips": 2}, "--clips 2: the videos of builtin:moving-fashion are as long"),
        ({"run": tmp_path / "moving", "split": "all"}, "--split all: builtin:moving-fashion holds out"),
        ({"split": "held_out"}, "no videos are held out: set --held-out"),
        ({"image_size": 24}, "takes \\(1, 8, 12\\); set .*--image-size"),
        ({"ema": 0.9}, "is an export and holds weights of one kind: leave out --ema"),
        ({"run": tmp_path / "silent"}, "is not a run's folder"),
    ):
        with pytest.raises(ValueError, match=message):
            encode_data(options(root, out, **changes))
        assert not out.exists()
    index = encode_data(options(root, out, data=str(tmp_path / "silent")))
    assert not index["encoding"]["captions"] and "caption" not in Latents(out)[0]


def test_words_for_videos_need_videos(tmp_path):
    """Oracle: the contract: a first stage of images refuses them, naming the option."""
    from tests.support import first_stage

    vae = first_stage.save(tmp_path / "vae")
    for name, value in (("clips", 2), ("captions", "x.tsv")):
        with pytest.raises(ConfigError, match=f"--{name} is for videos, and .*vae encodes images"):
            encode_data(
                EncodeOptions(
                    tmp_path / "out", first_stage=str(vae), data="builtin:fashion", image_size=16, **{name: value}
                )
            )


def test_unreadable_clips(made, tmp_path):
    """Oracle: the rule of bad_files.py, by files: each window of a broken one is the next clip's."""
    root = write(tmp_path / "clips")
    (root / "002.apng").write_bytes((root / "002.apng").read_bytes()[:60])
    refusal = "1 of 7 files cannot be read, more than --max-bad-fraction 0.0 tolerates, such as "
    with pytest.raises(ConfigError, match=f"{refusal}002.apng: "):
        encode_data(options(made[0], tmp_path / "none", data=str(root), clips=2, max_bad_fraction=0.0))
    index = encode_data(options(made[0], tmp_path / "out", data=str(root), clips=2))
    assert [name for name, _ in index["bad_files"]] == ["002.apng"]
    batch = Latents(tmp_path / "out").read_codes(torch.arange(14))
    assert unpack_captions(batch["caption"])[4:6] == [TEXTS[3]] * 2
    assert np.array_equal(batch["tokens"][4], batch["tokens"][6])


@pytest.mark.parametrize("content", [b"", b" \r\n", b"\xef\xbb\xbf", b"caf\xe9"])
def test_a_caption_that_is_empty_or_no_text(made, tmp_path, content):
    """Oracle: the file: named with what is wrong about its caption, and no broken clip."""
    root = write(tmp_path / "clips")
    for clip in sorted(root.glob("*.apng")):
        clip.with_suffix(".txt").write_bytes(content if clip.stem == "002" else b"a clip")
    reason = "UnicodeDecodeError" if content == b"caf\xe9" else "its caption is empty"
    with pytest.raises(ConfigError, match=f"such as 002.apng: {reason}"):
        encode_data(options(made[0], tmp_path / "none", data=str(root), max_bad_fraction=0.0))
