"""A DiT of clips: its patches, positions, texts and first frames; latents frame by frame; what is refused."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dstrain import rng
from dstrain.commands.generate import generate_samples
from dstrain.commands.options.generate import GenerateOptions
from dstrain.encoders.autoencoder import Autoencoder
from dstrain.recipe import ConfigError, Run, dump_run
from dstrain.sampling.scenes import choose_clip_length, draw_further_scenes
from dstrain.systems.base import Request
from dstrain.systems.dit.config import Config
from dstrain.systems.dit.network import DiT, PatchEmbed
from dstrain.systems.dit.system import DiTSystem
from tests.support import first_stage
from tests.systems.dit.cases import MODERN, TINY, VIDEO
from tests.systems.dit.test_texts import fill


def build(**changes: Any) -> DiTSystem:
    """Clips of 5 frames of 4 x 4, in patches of 2 frames, from texts and up to 3 first frames."""
    return DiTSystem(Config(**(VIDEO | changes)))


def draw_input(*shape: int) -> torch.Tensor:
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_patches_of_clips(frames: int) -> None:
    """Oracle: torch's own convolution over three axes of the clip, before which its first frame is repeated; and the
    values of each patch, put back one by one in Wan's order: frames, rows, columns, channels.
    """
    embed = PatchEmbed(3, 8, 2, frames=frames)
    x = draw_input(3, 1 + 2 * frames, 4, 6)
    whole = torch.cat((x[:, :, :1].expand(-1, -1, frames - 1, -1, -1), x), dim=2)
    weight = embed.proj.weight.view(8, 3, frames, 2, 2)
    wanted = F.conv3d(whole, weight, embed.proj.bias, stride=(frames, 2, 2))  # (2, 8, 3, 2, 3)
    assert torch.allclose(embed(x), wanted.flatten(2).transpose(1, 2), atol=1e-6)

    network = DiT(6, 2, 3, 16, 1, 2, learn_sigma=False, patch_frames=frames)
    grid = network.compute_patch_grid(x)
    assert grid == (3, 2, 3)
    values = draw_input(18, frames * 2 * 2 * 3)
    found = network.unpatchify(values, grid)
    assert found.shape == x.shape
    for token, (t, row, column) in enumerate(
        (t, row, column) for t in range(3) for row in range(2) for column in range(3)
    ):
        patch = values[:, token].view(2, frames, 2, 2, 3)
        for frame in range(frames):
            number = t * frames + frame - (frames - 1)
            if number >= 0:
                place = found[:, :, number, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
                assert torch.equal(place, patch[:, frame].permute(0, 3, 1, 2))


def test_places_of_clips() -> None:
    """Oracle: angles of the token's frame, row and column, by hand, in a grid that is neither a cube nor a square; the
    sines of images, to which those of the frame add.
    """
    network = DiT(8, 2, 3, 64, 1, 2, rope=True, patch_frames=1)
    network.sines = True
    grid, dim = (3, 2, 4), 32
    table, sines = (
        network.get_rotary_positions(grid, dim, 1, torch.device("cpu")),
        network.get_position_embeddings(grid),
    )
    widths, token = (12, 10, 10), 0
    for t in range(3):
        for row in range(2):
            for column in range(4):
                places = (t, row * 4 / 2, column)  # rows over the range of the square of 4 x 4
                angles = [
                    place * 10000 ** (-2 * pair / width)
                    for place, width in zip(places, widths, strict=True)
                    for pair in range(width // 2)
                    for _ in range(2)
                ]
                wanted = torch.tensor([[math.cos(a) for a in angles], [math.sin(a) for a in angles]])
                assert torch.allclose(table[0, :, token], wanted, atol=1e-6)
                time = [t * 10000 ** (-k / 32) for k in range(32)]
                of_time = torch.tensor([*map(math.sin, time), *(math.cos(a) - 1 for a in time)])
                image = network.get_position_embeddings((2, 4))[0, row * 4 + column]
                assert torch.allclose(sines[0, token], image + of_time, atol=1e-6)
                token += 1
    assert torch.equal(table[0, :, token], torch.stack((torch.ones(dim), torch.zeros(dim))))  # a condition token
    assert (
        network.get_position_embeddings((2, 4)) is not network.pos_embed
        and network.get_position_embeddings((4, 4)) is network.pos_embed
    )


def test_a_clip_of_one_frame_is_an_image() -> None:
    """Oracle: the network of images with the same weights, to the bit: these begin a network of clips."""
    image = fill(DiT(8, 2, 3, 32, 2, 2))
    clip = DiT(8, 2, 3, 32, 2, 2, patch_frames=1)
    clip.load_state_dict(image.state_dict())
    x, t, y = draw_input(3, 8, 8), torch.tensor([3.0, 500.0]), torch.tensor([1, 4])
    assert torch.equal(clip(x[:, :, None], t, y)[:, :, 0], image(x, t, y))


def test_frames_are_told_apart() -> None:
    """Oracle: every frame of the output depends on every frame of the input, and on the order of frames."""
    for choices in ({"rope": True, "sines": False}, {}):
        network = fill(DiT(4, 2, 1, 32, 2, 2, num_classes=0, patch_frames=1, **choices))
        x, t = draw_input(1, 3, 4, 4), torch.tensor([3.0, 500.0])
        out = network(x, t)
        for frame in range(3):
            changed = x.clone()
            changed[:, :, frame] += 1
            assert ((network(changed, t) - out).abs().amax((1, 3, 4)) > 1e-4).all()
        assert (network(x.flip(2), t).flip(2) - out).abs().max() > 1e-3


def test_padding_of_texts_changes_nothing() -> None:
    """Oracle: the same network of the text without its padding, 1e-6; with other padding, to the bit."""
    for way in ({}, {"cross_attention": True}):
        network = fill(build(**way).networks()["denoiser"])
        key = rng.keys(0, 0, torch.arange(2))
        x, given, t = draw_input(1, 5, 4, 4), draw_input(2, 5, 4, 4), rng.uniform(key, "t")
        text, mask = 1 + rng.integers(key, "text", 39, (5,)), (torch.arange(5) < 3).expand(2, 5)
        cut = network(x, t, text=text[:, :3], given=given)
        padded = network(x, t, text=text, mask=mask, given=given)
        assert torch.allclose(padded, cut, atol=1e-6)
        other = torch.cat((text[:, :3], text[:, 3:].roll(1, 0)), dim=1)
        assert torch.equal(network(x, t, text=other, mask=mask, given=given), padded)


def test_given_frames_are_drawn_by_key() -> None:
    """Oracle: by hand: of 4,000 clips half are given 1 or 3 frames, equally often; these frames clean and marked, zeros
    elsewhere; the same at any place in a batch; guidance drops the text and keeps the frames.
    """
    system, seen = build(), []

    def network(x: torch.Tensor, t: torch.Tensor, given: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        seen.append((given, more["mask"]))
        return x

    example = system.encode(system.synthetic(4000))
    system.loss("denoiser", {"denoiser": network}, example)
    (given, mask), x = seen[0], example["x_start"]
    count = given[:, 1, :, 0, 0].sum(1)
    share = [(count == number).float().mean().item() for number in (0, 1, 3)]
    assert sum(share) == 1 and abs(share[0] - 0.5) < 0.03 and abs(share[1] - 0.25) < 0.03
    for number in (0, 1, 3):
        of = given[count == number]
        assert torch.equal(of[:, :1, :number], x[count == number][:, :, :number]) and not of[:, :, number:].any()
        assert (of[:, 1, :number] == 1).all()
    few = {name: value[7:9] for name, value in example.items()}
    assert torch.equal(system._make_condition_arguments(few)["given"], given[7:9])
    dropped = ~mask.any(1)
    assert 0.2 < (dropped & (count > 0)).float().mean() < 0.3
    rare = build(video=VIDEO["video"] | {"given": 1, "given_share": 0.1})
    marks = rare._make_condition_arguments(example)["given"][:, 1, :, 0, 0].sum(1)
    assert set(marks.tolist()) == {0.0, 1.0} and 0.07 < marks.mean() < 0.13


def test_samples_begin_with_the_given_frames() -> None:
    """Oracle: the frames themselves, to the bit; the network sees them at every step, with and without the text; a clip
    depends on them, and on its own seed alone.
    """
    system = build()
    nets = {"denoiser": fill(system.networks()["denoiser"])}
    frames = rng.integers(torch.arange(2), "frames", 256, (3, 1, 4, 4)).to(torch.uint8)
    texts = system.conditions_from_texts(["a bag", "a coat"])
    seeds, seen = torch.tensor([4, 5]), []

    def draw(seeds: torch.Tensor, conditions: dict[str, torch.Tensor], frames: int | None = None) -> torch.Tensor:
        def network(x: torch.Tensor, t: torch.Tensor, **told: torch.Tensor) -> torch.Tensor:
            seen.append(told["given"])
            return nets["denoiser"](x, t, **told)

        request = Request(seeds, conditions, 2, guidance_scale=2.0, num_frames=frames)
        return system.sample({"denoiser": network}, request)

    free = draw(seeds, texts)
    assert free.shape == (2, 5, 1, 4, 4) and free.dtype == torch.uint8 and not any(given.any() for given in seen)
    seen.clear()
    led = draw(seeds, texts | system.conditions_from(frames))
    assert torch.equal(led[:, :3], frames) and not torch.equal(led[:, 3:], free[:, 3:])
    clean = frames.transpose(1, 2).float() / 127.5 - 1
    for given in seen:
        for number in range(2):
            of = given[number::2]
            assert (
                torch.allclose(of[:, :1, :3], clean[number].expand(len(of), -1, -1, -1, -1))
                and (of[:, 1, :3] == 1).all()
            )
            assert not of[:, :, 3:].any()
    alone = draw(seeds[1:], {name: value[1:] for name, value in (texts | system.conditions_from(frames)).items()})
    assert (alone[0].int() - led[1].int()).abs().max() <= 1
    pictures = draw(seeds, texts | system.conditions_from(frames[:, 0]), frames=3)
    assert pictures.shape[1] == 3 and torch.equal(pictures[:, :1], frames[:, :1])


def test_scenes_go_on() -> None:
    """Oracle: by hand: of a clip of 5 frames and 1 given, two scenes have 9; each begins where the other ends."""
    system = build()
    nets = {"denoiser": fill(system.networks()["denoiser"])}
    length = choose_clip_length(system, None, None, has_scenes=True)
    assert (length.frames, length.primed) == (5, 1)
    first = Request(torch.tensor([3]), system.conditions_from_texts(["a bag"]), 2)
    clip = system.sample(nets, first)
    given = []

    def draw(request: Request) -> torch.Tensor:
        given.append(request.conditions["prime"])
        return system.sample(nets, request)

    told = [system.conditions_from_texts(["a coat"])]
    story = draw_further_scenes(system, clip, first.seeds, told, length.primed, first, draw)
    assert story.shape == (1, 9, 1, 4, 4) and torch.equal(story[:, :5], clip) and torch.equal(given[0], clip[:, -1:])


def test_latents_of_clips(tmp_path: Path) -> None:
    """Oracle: the autoencoder's latents of each frame alone, whose noise no other frame has; its pictures of each."""
    first_stage.save(tmp_path)
    stage = Autoencoder(str(tmp_path))
    side = 4 * stage.factor
    words = {"first_stage": {"path": str(tmp_path), "factor": stage.factor}, "in_channels": stage.channels}
    system = build(image_size=side, **words)
    batch = system.synthetic(2)
    batch["video"] = batch["video"][:, :1].expand(-1, 5, -1, -1, -1)  # the same frame five times
    latents = system.encode(batch)["x_start"]
    assert latents.shape == (2, stage.channels, 5, 4, 4)
    image = batch["video"][:, 0].float() / 127.5 - 1
    keys = rng.integers(batch["key"], "frames", 2**31, (5,))
    for frame in range(5):
        assert torch.allclose(latents[:, :, frame], system.first_stage.encode(image, keys[:, frame]), atol=1e-5)
    assert (latents[:, :, 0] - latents[:, :, 1]).abs().min() > 0
    decoded = system._decode_to_uint8(latents)
    one = system.first_stage.decode(latents[:, :, 2])
    assert decoded.shape == batch["video"].shape
    assert (decoded[:, 2].int() - ((one + 1) * 127.5).round().clamp(0, 255).int()).abs().max() <= 1


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"video": {"frames": 6, "patch_frames": 2}}, r"video.frames: 6 frames are no 1 \+ k x 2.*take 5 or 7"),
        ({"video": {"frames": 5, "patch_frames": 2, "given": 2}}, r"video.given: 2 frames are no .*take 1 or 3"),
        ({"video": {"frames": 3, "given": 3}}, "video.given: 3 frames leave none of 3 to draw"),
        ({"video": {"frames": 3, "height": 7}}, "video.height: 7 is no multiple of 2"),
        ({"align": {"kind": "repa", "depth": 1, "width": 4}}, "align.kind=repa does not go with clips.*layersync"),
        ({"embedding_dim": 4}, "embedding_dim does not go with clips"),
        ({"num_heads": 8}, "a head has 4 values; block.rope over three axes needs 8"),
        ({"codes": {"shape": (1, 4, 4), "scaling_factor": 1, "first_stage": "f"}}, "cached latents are of images"),
    ],
)
def test_config_errors(changes: dict[str, Any], words: str) -> None:
    """Oracle: a ValueError that names the field and the remedy."""
    with pytest.raises(ValueError, match=words):
        build(**changes)


def test_what_does_not_fit_is_refused() -> None:
    """Oracle: a message that names the key and the remedy: data of another length, height or kind; frames to begin with
    that are too many, of another size, or no 1 + k x 2; exports to diffusers.
    """
    system = build()

    def problems(model: dict[str, Any], **data: Any) -> str:
        config, told = Config(**model), {"image_size": 4, "channels": 1, "path": "builtin:moving-fashion"} | data
        return " ".join(
            config.list_conflicts(Run.model_validate({"name": "x", "steps": 1, "system": "dit", "data": told}))
        )

    fine = {"num_frames": 5}
    assert "num_frames" not in problems(VIDEO, **fine) and "buckets" not in problems(VIDEO, **fine)
    assert "data.num_frames=3 and model.video.frames=5: make both equal" in problems(VIDEO, num_frames=3)
    assert "data.height=6 and model.video.height=4 differ" in problems(VIDEO, **fine, height=6)
    assert "data.buckets: 2 is not 1 + a multiple" in problems(VIDEO, **fine, buckets=[2, 5])
    assert "clips need model.video, such as model.video.patch_frames=2" in problems(TINY | {"image_size": 4}, **fine)
    for frames, words in ((2, "2 frames are no 1"), (5, "learned from 3 at most .*--prime-frames 3"), (7, "5 at most")):
        with pytest.raises(ConfigError, match=f"prime: .*{words}"):
            system.conditions_from(torch.zeros(1, frames, 1, 4, 4, dtype=torch.uint8))
    prime = system.conditions_from(torch.zeros(1, 3, 1, 6, 4, dtype=torch.uint8))
    texts = system.conditions_from_texts(["a bag"])
    for conditions, frames, words in (
        (prime, None, "3 frames, 4 wide and 6 high, do not begin a clip of 5 frames, 4 wide and 4 high"),
        (system.conditions_from(torch.zeros(1, 3, 1, 4, 4, dtype=torch.uint8)), 3, "3 frames.* do not begin"),
        ({}, 4, r"num_frames: 4 frames are no 1 \+ k x 2.*take 3 or 5"),
        ({}, 7, "clips of this model have 5 at most"),
    ):
        with pytest.raises(ConfigError, match=words):
            system.sample(system.networks(), Request(torch.tensor([1]), texts | conditions, 2, num_frames=frames))
    with pytest.raises(ConfigError, match="begins from noise"):
        build(video={"frames": 5}).conditions_from(torch.zeros(1, 1, 4, 4, dtype=torch.uint8))
    with pytest.raises(ConfigError, match=r"the data\s+give \(1, 8, 8\)"):
        system.encode({"key": torch.arange(1), "video": torch.zeros(1, 5, 1, 8, 8), "caption": torch.zeros(1, 3)})
    with pytest.raises(ConfigError, match="video: the pipeline of an export draws images alone; take --format saf"):
        DiTSystem(Config(**(TINY | {"video": {"frames": 3}}))).require_expressible_in_diffusers()


def test_too_many_first_frames_are_refused_by_their_option(tmp_path: Path) -> None:
    """Oracle: one line that begins with the option and its file, though prompts are given, and names the remedy."""
    (tmp_path / "run").mkdir()
    model = VIDEO | {"video": VIDEO["video"] | {"given": 1}}
    data = {"path": "builtin:moving-fashion", "image_size": 4, "channels": 1, "num_frames": 5}
    run = Run.model_validate({"name": "x", "steps": 1, "system": "dit", "model": model, "data": data})
    (tmp_path / "run" / "run.yaml").write_text(dump_run(run))
    path = tmp_path / "samples.npz"
    np.savez(path, arr_0=np.zeros((1, 5, 4, 4, 3), np.uint8))
    with pytest.raises(ConfigError) as refused:
        generate_samples(GenerateOptions(tmp_path / "run", prompts=("a bag",), prime=path, prime_frames=3))
    (line,) = refused.value.problems
    assert line.startswith(f"--prime {path}: 3 frames are given, and the model learned from 1 at most")


def test_the_section_is_filled_in_from_the_data() -> None:
    """Oracle: the data's frames and height; what the section says itself stays, to be compared with them."""
    data = {"path": "builtin:moving-fashion", "image_size": 8, "height": 6, "num_frames": 5, "channels": 1}
    run = Run.model_validate({"name": "x", "steps": 1, "system": "dit", "data": data | {"buckets": [3, 5]}})
    shape = {name: MODERN[name] for name in ("patch_size", "hidden_size", "depth", "num_heads")}
    config = Config(**Config.complete_section(shape | {"video": {"patch_frames": 2}}, run))
    assert (config.video.frames, config.video.height, config.sizes) == (5, 6, None)
    assert config.get_input_shape() == (1, 5, 6, 8) and config.get_input_shape(frames=3) == (1, 3, 6, 8)
    assert config.count_tokens(config.get_input_shape()) == 3 * 3 * 4
    assert Config.complete_section(shape | {"video": {"frames": 3}}, run)["video"]["frames"] == 3
    assert config.list_conflicts(run) == []
