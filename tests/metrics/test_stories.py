"""What is seen of a story of several scenes: its item, whether it is kept, its motions and its seams."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dstrain import recipe, systems
from dstrain.commands.evaluating.quality import measure_quality
from dstrain.commands.generate import GenerateOptions, generate_samples
from dstrain.commands.options.evaluate import EvaluateOptions
from dstrain.data.builtin.fashion import FASHION, Fashion
from dstrain.data.builtin.moving import MOTIONS, MovingFashion, _draw_moving_item, make_caption
from dstrain.metrics.clips import SCENES, choose_story_items_and_motions, compute_scene_scores, sum_scene_measurements
from dstrain.metrics.features import open_feature_network
from tests.support import checkpoints, gloo, tokenizer
from tests.support.launch import here

NUM, SIDE, SIZE = 60, 24, 16  # stories; pixels of a clip and of its item
FREE = SIDE - SIZE
ENDS = [9, 17, 25, 33]


@pytest.fixture(scope="module")
def network():
    return open_feature_network("builtin", torch.device("cpu"))


def true_story(item: torch.Tensor, motions: list[int]) -> torch.Tensor:
    """One item that makes all motions, each from where the last one ends: uint8 (33, 1, 24, 24).

    Straight motions cross the whole canvas, and the first one on each axis decides where the item begins; a bouncing
    item comes back to where it was.
    """
    directions = [list(MOTIONS.values())[motion] for motion in motions]
    paths = []
    for axis in (0, 1):
        straight = [direction[axis] for direction in directions if not all(direction)]
        place = FREE * (next((step for step in straight if step), 0) < 0)
        path = [float(place)]
        for direction in directions:
            time = torch.linspace(0, 1, 9)[1:]
            if all(direction):  # to the other side and back
                path += (abs(place - FREE * (1 - (2 * time - 1).abs()))).tolist()
            else:
                path += (place + FREE * direction[axis] * time).tolist()
                place += FREE * direction[axis]
        paths.append(torch.tensor(path))
    return _draw_moving_item(item, *paths, SIDE, SIDE)[:, None]


def test_true_stories(network):
    """Oracle: how they were made: every motion is right, steps at seams are as long as others, and the item is as well
    known in each scene as in single clips of this size (86 %).
    """
    items, motions = choose_story_items_and_motions(torch.arange(NUM))
    images = Fashion(SIZE, 1, "held_out")
    numbers = [np.flatnonzero(images.labels == item)[turn // 10] for turn, item in enumerate(items.tolist())]
    videos = torch.stack(
        [true_story(images[number]["image"][0], asked) for number, asked in zip(numbers, motions.tolist())]
    )
    shown = {
        name: value
        for name, (value, _) in compute_scene_scores(
            sum_scene_measurements(network, videos, ENDS, items, motions)
        ).items()
    }
    assert shown["scenes_motion"] == 1 and shown["scenes_kept"] > 0.95 and shown["scenes_item"] > 0.8
    assert shown["scenes_seam"] == pytest.approx(1, abs=0.1)
    assert all(shown[f"scenes_kept/{number}"] > 0.95 for number in (2, 3, 4)) and "scenes_kept/1" not in shown


def test_stories_glued_from_others(network):
    """Oracle: chance: a tenth of unrelated clips shows the first one's item, a fifth moves as told; seams are jumps."""
    items, motions = choose_story_items_and_motions(torch.arange(NUM))
    source = MovingFashion(9, SIDE, SIDE, 1, "held_out")
    clips = torch.stack([source[number]["video"] for number in range(4 * NUM)])
    clips = clips.view(NUM, SCENES, 9, 1, SIDE, SIDE)
    videos = torch.cat([clips[:, 0], *(clips[:, scene, 1:] for scene in range(1, SCENES))], 1)
    shown = {
        name: value
        for name, (value, _) in compute_scene_scores(
            sum_scene_measurements(network, videos, ENDS, items, motions)
        ).items()
    }
    assert shown["scenes_kept"] < 0.25 and shown["scenes_motion"] < 0.35 and shown["scenes_item"] < 0.25
    assert shown["scenes_seam"] > 2


def test_seeds_tell_stories():
    """Oracle: what a story is: every item in turn, four different motions, all of which come first now and then."""
    items, motions = choose_story_items_and_motions(torch.arange(100))
    assert items.tolist() == [*range(len(FASHION))] * 10
    assert all(len({*row}) == SCENES for row in motions.tolist())
    assert {*motions[:, 0].tolist()} == {*motions[:, -1].tolist()} == {*range(len(MOTIONS))}
    assert torch.equal(choose_story_items_and_motions(torch.arange(40, 60))[1], motions[40:60])


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A token model of random weights with its tokenizer, of clips of 8 x 12 pixels and 5 frames."""
    folder = tmp_path_factory.mktemp("stories")
    tokenizer.save(folder / "tokenizer")
    run = recipe.Run.model_validate(
        {
            "name": "tiny",
            "system": "phenaki",
            "samples": {"num_steps": 2, "guidance_scale": 2.0},
            "model": {
                "tokenizer": {"path": str(folder / "tokenizer")},
                "dim": 16,
                "depth": 1,
                "heads": 2,
                "dim_head": 8,
                "num_words": 50,
                "max_text_len": 8,
            },
            "data": {
                "path": "builtin:moving-fashion",
                "image_size": 12,
                "height": 8,
                "num_frames": 5,
                "channels": 1,
                "flip": False,
            },
        }
    )
    run = recipe.complete_model_section(run, systems.find_config_class("phenaki"))
    torch.manual_seed(0)
    networks = systems.build("phenaki", run.model).networks()
    for weight in networks["maskgit"].parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return checkpoints.write(folder / "run", run, networks)


def measured(rank: int, folder: Path, out: Path) -> dict[str, float]:
    options = EvaluateOptions(metrics=("scenes",), folder=folder, num=5, seed=3, batch=2, prime_frames=1, out=out)
    return measure_quality(options)[1]["figures"]


def test_a_run_tells_stories(run, network, tmp_path):
    """Oracle: the stories that generate --scenes draws for the same seeds, one by one; and two ranks, one of which is
    left without a story in the last round.
    """
    items, motions = choose_story_items_and_motions(3 + torch.arange(5))
    videos = []
    for number, (item, asked) in enumerate(zip(items.tolist(), motions.tolist())):
        texts = tuple(make_caption(FASHION[item], list(MOTIONS)[motion]) for motion in asked)
        out = generate_samples(
            GenerateOptions(
                run, num=1, seed=3 + number, prime_frames=1, pngs=False, scenes=texts, out=tmp_path / f"{number}"
            )
        )
        with np.load(next(out.glob("*.npz"))) as file:
            videos.append(torch.from_numpy(file["arr_0"][0, ..., :1]).permute(0, 3, 1, 2))
    ends = [5, 9, 13, 17]
    expected = {
        name: value
        for name, (value, _) in compute_scene_scores(
            sum_scene_measurements(network, torch.stack(videos), ends, items, motions)
        ).items()
    }
    figures_of_one = measured(0, run, tmp_path / "one")
    assert figures_of_one == pytest.approx(expected, rel=1e-5) and len(expected) == 4 + 4 + 3 + 4 + 3
    for result in gloo.run(tmp_path, measured, run, tmp_path / "two"):
        assert result == pytest.approx(figures_of_one, rel=1e-5)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--metrics", "scenes,fd"], "ask for it alone"),
        (["--metrics", "fd", "--prime-frames", "3"], "is of --metrics scenes"),
        (["--metrics", "scenes", "--prompts", __file__], "--prompts changes nothing beside --metrics scenes"),
        (["--metrics", "scenes", "--features", "builtin"], "--features changes nothing beside --metrics scenes"),
        (["--metrics", "scenes", "--prime-frames", "2"], "--prime-frames 2: give 1 + m * 2 of the 5 frames"),
        (["--prime-frames", "2"], "--prime-frames is for metrics"),
    ],
)
def test_command_line(run, words, message, monkeypatch, capsys):
    """Oracle: exit code 2 and a line that names the option."""
    code, _, error = here("evaluate.py", [str(run), *words], monkeypatch, capsys)
    assert code == 2 and message in error
