"""Entries that do not fit each other: what is said of them, and that its remedy is one."""

from pathlib import Path

import pytest

from dstrain import recipe
from dstrain.recipe import ConfigError
from dstrain.recipe.shapes import require_divisible_sides

MIXED = "data.mixture=[{path: a, weight: 1}, {path: b, weight: 2}]"
# Overrides with %, the whole message about them, and what its remedy leaves.
REFUSALS = [
    (
        "data.height=8",
        "data.height: of clips, not of images: leave it out, or write data.num_frames=17, say",
        "data.height=8%data.num_frames=17",
    ),
    (
        "data.frame_stride=2%data.images=x%data.captions=y%data.height=8",
        "data.height, data.captions, data.images, "
        "data.frame_stride: of clips, not of images: leave it out, or write data.num_frames=17, say",
        "",
    ),
    (
        "data.num_frames=1%data.channels=4",
        "data.channels=4: clips have no transparency: write data.channels=3",
        "data.num_frames=1%data.channels=3",
    ),
    (
        "data.num_frames=1%data.images=x%data.image_share=0",
        "data.image_share=0 lies between 0 and 1: leave data.images "
        "out for no images; for images alone write their folder as data.path",
        "data.num_frames=1%data.image_share=0",
    ),
    *(
        (
            f"data.num_frames=2%{entry}",
            "data.crop, data.max_upscale and data.size_conditions are of images, not of clips: leave them out",
            entry,
        )
        for entry in ("data.crop=random", "data.size_conditions=true")
    ),
    (
        "data.num_frames=2%data.buckets=[2]%data.max_upscale=2",
        "data.crop, data.max_upscale and data.size_conditions are of images, not of clips: leave them out",
        "data.num_frames=2%data.buckets=[2]",
    ),
    *(
        (
            f"data.num_frames=9%data.buckets={value}",
            "data.buckets of clips are numbers of frames, not widths and heights: "
            "write data.buckets=[1,9], say, or leave it out",
            "data.num_frames=9%data.buckets=[1,9]",
        )
        for value in ("[[8, 8]]", "{pixels: 256}", "[9, [9, 9]]")
    ),
    (
        "data.num_frames=9%data.buckets=[1, 5]",
        "data.buckets=[1, 5]: the longest one is not data.num_frames=9: write "
        "data.num_frames=5, or give that bucket, too",
        "data.num_frames=5%data.buckets=[1, 5]",
    ),
    (
        "data.buckets=[1, 5]",
        "data.buckets=[1, 5] are numbers of frames, of clips: write widths and heights, "
        "[[256,256],[320,192]], or data.num_frames=5",
        "data.buckets=[[256,256],[320,192]]",
    ),
    *(
        (
            f"data.draft=true%{entry}",
            "data.draft=true goes with data.crop=center and without data.size_conditions: write data.draft=false",
            f"data.draft=false%{entry}",
        )
        for entry in ("data.crop=none", "data.size_conditions=true")
    ),
    (
        f"data.buckets=[[8, 8]]%{MIXED}",
        "data.mixture and data.buckets exclude each other: leave one of them out",
        MIXED,
    ),
    ("data.held_out=1", "data.held_out=1 leaves nothing to train on: give a share below 1", "data.held_out=0.99"),
    (
        "data.held_out=0.1%data.held_out_path=/x",
        "data.held_out=0.1 and data.held_out_path=/x both name held-out images: give one of the two",
        "data.held_out_path=/x",
    ),
    ("data.buckets=[]", "data.buckets=[] gives no shape: give some, or null for squares", "data.buckets=null"),
    (
        "data.buckets=[[8, 9], [9, 8], [8, 9]]",
        "data.buckets names a shape twice: name each once",
        "data.buckets=[[8, 9], [9, 8]]",
    ),
    (
        "data.max_upscale=2",
        "data.max_upscale=2.0 is of data.buckets: leave it out, or give buckets",
        "data.max_upscale=2%data.buckets=[[8, 8]]",
    ),
    (
        "data.crop_scale=[0.5, 1]",
        "data.crop_scale is of data.crop=random and random_resized, not of center: leave it out",
        "data.crop_scale=[0.5, 1]%data.crop=random",
    ),
    (
        "data.crop_ratio=[0.5, 1]%data.crop=random",
        "data.crop_ratio is of data.crop=random_resized, not of random: leave it out",
        "data.crop_ratio=[0.5, 1]%data.crop=random_resized",
    ),
    (
        "data.crop=dalle%data.buckets=[[8, 8]]",
        "data.crop=dalle cuts squares: leave data.buckets out, or write data.crop=random",
        "data.crop=random%data.buckets=[[8, 8]]",
    ),
    (
        "data.crop_scale=[1, 0.5]%data.crop=random_resized",
        "data.crop_scale=[1.0, 0.5]: write the lower number first",
        "data.crop_scale=[0.5, 1]%data.crop=random_resized",
    ),
    (
        "data.crop_ratio=[2, 1]%data.crop=random_resized",
        "data.crop_ratio=[2.0, 1.0]: write the lower number first",
        "data.crop_ratio=[1, 1]%data.crop=random_resized",
    ),
    (
        "data.mixture=[]",
        "data.mixture=[]: name its sources, [{path: A, weight: 3}, {path: B, weight: 1}], or leave it out",
        "data.mixture=[{path: A, weight: 3}, {path: B, weight: 1}]",
    ),
    (
        "data.mixture=[{path: c}, {path: a/b}, {path: a//b}]",
        "data.mixture names a/b twice: name it once",
        "data.mixture=[{path: c}, {path: a/b}]",
    ),
    (
        "data.mixture=[{path: a}, {path: b, weight: 2}, {path: c, weight: 1}]",
        "data.mixture: b has a weight, and others "
        "have none: give all of them weights, or none, and they are drawn by the numbers of their samples",
        "data.mixture=[{path: a}, {path: b}, {path: c}]",
    ),
    (
        "data.mixture=[{path: a, held_out: 0.1}, {path: b, held_out: 0.1, held_out_path: c}, {path: d, held_out: 0.1, "
        "held_out_path: c}]",
        "data.mixture: b has held_out and held_out_path: give one of the two",
        "data.mixture=[{path: a, held_out: 0.1}, {path: b, held_out: 0, held_out_path: c}]",
    ),
    (
        f"data.held_out_path=/x%{MIXED}",
        "data.held_out_path=/x: with data.mixture, write held_out_path into the source that it belongs to",
        "data.mixture=[{path: a, held_out_path: /x}]",
    ),
    *(
        (
            f"{MIXED}%data.num_frames=2%{entry}=x",
            "data.captions and data.images: with data.mixture, write captions into "
            "the source, and a folder of images as one more source",
            "data.mixture=[{path: a, captions: x}]%data.num_frames=2",
        )
        for entry in ("data.captions", "data.images")
    ),
    (
        "batch.global=12%batch.micro=5",
        "batch.global=12 is no multiple of batch.micro=5: micro-batches that fit are 1, 2, 3, 4, 6, 12",
        "batch.global=12%batch.micro=4",
    ),
    (
        "optimizer.betas=[0.9, 1]",
        "optimizer.betas=[0.9, 1.0] must lie below 1, for example [0.9, 0.999]",
        "optimizer.betas=[0.9, 0.999]",
    ),
    ("optimizer.momentum=1", "optimizer.momentum=1 must lie below 1, for example 0.95", "optimizer.momentum=0.95"),
    (
        "optimizer.lr=0.1%optimizer.final_lr=0.2",
        "optimizer.final_lr=0.2 is above optimizer.lr=0.1: the schedules only go down; lower final_lr or raise lr",
        "optimizer.lr=0.2%optimizer.final_lr=0.2",
    ),
    (
        "optimizer.decay_steps=10%optimizer.warmup=10",
        "optimizer.warmup=10 is not below optimizer.decay_steps=10: shorten the warm-up",
        "optimizer.decay_steps=10%optimizer.warmup=9",
    ),
    (
        "ema.decays=[0.6, 0.5, 0.7, 0.5, 0.6]",
        "ema.decays=[0.6, 0.5, 0.7, 0.5, 0.6] holds [0.5, 0.6] twice: name each decay once",
        "ema.decays=[0.6, 0.5, 0.7]",
    ),
    (
        "ema.profiles=[0.1, 0.1]",
        "ema.profiles=[0.1, 0.1] holds [0.1] twice: name each profile once",
        "ema.profiles=[0.1]",
    ),
    (
        "ema.profiles=[0.1]%ema.decays=[0.9, 0.2]",
        "ema.decays=[0.9, 0.2]: with ema.profiles, --ema takes a number up to "
        "0.288 for a width: leave so short a decay out",
        "ema.profiles=[0.1]%ema.decays=[0.9]",
    ),
    (
        "ema.snapshots=5",
        "ema.snapshots=5 keeps averages of ema.profiles, which is empty: write ema.profiles=[0.05,0.10]",
        "ema.snapshots=5%ema.profiles=[0.05,0.10]",
    ),
    (
        "samples.labels=[]",
        "samples.labels=[] names no label: give some, or null for every class in turn",
        "samples.labels=null",
    ),
    (
        "samples.prompts=[]",
        "samples.prompts=[] holds no text, or an empty one: give texts, or null for none",
        "samples.prompts=null",
    ),
    (
        "samples.prompts=[a, ' ']",
        "samples.prompts=['a', ' '] holds no text, or an empty one: give texts, or null for none",
        "samples.prompts=[a]",
    ),
    (
        "samples.guidance_interval=[2, 1]",
        "samples.guidance_interval=[2.0, 1.0]: write the lower noise level first",
        "samples.guidance_interval=[1, 1]",
    ),
    (
        "samples.labels=[0]%samples.prompts=[a]",
        "samples.labels and samples.prompts are both given: give one of the two",
        "samples.labels=[0]",
    ),
    (
        "faults.hang_factor=0.5",
        "faults.hang_factor=0.5: a step that takes less than usual does not hang: write a number "
        "above 1, or 0 for faults.timeout_minutes alone",
        "faults.hang_factor=0",
    ),
    (
        "ema.decays=[0.5, 0.9]%samples.ema=0.6",
        "samples.ema=0.6 is none of ema.decays=[0.5, 0.9]: choose one of them, or add it to ema.decays",
        "ema.decays=[0.5, 0.9, 0.6]%samples.ema=0.6",
    ),
    (
        "ema.decays=[]%ema.profiles=[0.1]%samples.ema=0",
        "samples.ema=0.0 is none of ema.decays=[] and ema.profiles=[0.1]: choose one of them, or add it to ema.decays",
        "ema.profiles=[0.1]%samples.ema=0.1",
    ),
    (
        "save.format=deepspeed%optimizer.name=lion",
        "save.format=deepspeed holds the moments of adamw, not of lion: write save.format=fragments",
        "save.format=fragments%optimizer.name=lion",
    ),
    (
        "save.best=true%every.evaluate=0",
        "save.best=true needs held-out losses: set every.evaluate",
        "save.best=true%every.evaluate=1",
    ),
    (
        "save.best=fd",
        "save.best=fd needs that metric: set every.metrics, and name it in samples.metrics",
        "save.best=fd%every.metrics=1",
    ),
    (
        "save.best=fd%every.metrics=1%samples.metrics=[accuracy]",
        "save.best=fd needs that metric: set every.metrics, and name it in samples.metrics",
        "save.best=fd%every.metrics=1%samples.metrics=[accuracy, fd]",
    ),
    (
        "every.metrics=7%samples.metrics=[]",
        "every.metrics=7: samples.metrics names none: write samples.metrics=[fd], say, or every.metrics=0",
        "every.metrics=7%samples.metrics=[fd]",
    ),
    (
        "data.path=/a%data.mixture=[{path: b}]",
        "data.path=/a: data.mixture takes its place: leave one of them out, or write data.mixture=null, too",
        "data.path=/a%data.mixture=null",
    ),
]


@pytest.mark.parametrize("overrides, message, mended", REFUSALS, ids=[overrides for overrides, _, _ in REFUSALS])
def test_what_does_not_fit(overrides, message, mended):
    """Oracle: by hand: what a user reads, whole; and what it tells him to do is taken."""
    with pytest.raises(ConfigError) as caught:
        recipe.load_recipe(None, overrides.split("%"))
    assert caught.value.problems == [message]
    recipe.load_recipe(None, [entry for entry in mended.split("%") if entry])


def test_several_at_once():
    """Oracle: by hand: a line for each, in the order of the sections."""
    with pytest.raises(ConfigError) as caught:
        recipe.load_recipe(
            None,
            [
                "data.held_out=1",
                "data.height=8",
                "data.draft=true",
                "data.crop=none",
                "batch.micro=3",
                "optimizer.betas=[0, 1]",
                "optimizer.momentum=1",
                "samples.labels=[]",
                "samples.prompts=[]",
            ],
        )
    assert [line.split(":")[0].split("=")[0].split(" ")[0] for line in caught.value.problems] == [
        "data.height",
        "data.draft",
        "data.held_out",
        "batch.global",
        "optimizer.betas",
        "optimizer.momentum",
        "samples.labels",
        "samples.prompts",
    ]
    with pytest.raises(ConfigError) as caught:
        recipe.load_recipe(None, ["samples.ema=0.1", "save.format=deepspeed", "optimizer.name=lion"])
    assert [line.split("=")[0] for line in caught.value.problems] == ["samples.ema", "save.format"]


@pytest.mark.parametrize(
    "rule, shapes",
    [
        # 16 x 16 and 32 x 8 have 256 pixels; 24 x 10 no multiples of 8.
        ({"pixels": 256, "step": 8, "ratio": 4}, [(32, 8), (16, 16), (8, 32)]),
        ({"pixels": 256, "step": 8, "ratio": 3.99}, [(16, 16)]),
        ({"pixels": 255, "step": 8, "ratio": 3}, [(24, 8), (8, 24)]),
        ({"pixels": 4096}, [(80, 48), (64, 64), (48, 80)]),  # of 16 and 2, which no rule need name
        ({"pixels": 64, "step": 1, "ratio": 1.3}, [(9, 7), (8, 8), (7, 9)]),
    ],
)
def test_shapes_of_a_rule(rule, shapes):
    """Oracle: by hand, from the widest to the highest."""
    entry = ", ".join(f"{name}: {value}" for name, value in rule.items())
    assert list(recipe.load_recipe(None, [f"data.buckets={{{entry}}}"]).data.buckets) == shapes


@pytest.mark.parametrize(
    "rule, problem",
    [
        ("{pixels: 100, step: 16}", "this rule makes no shape: take more pixels, or a smaller step"),
        ("{pixels: 0}", "a rule is {pixels: 65536, step: 16, ratio: 2}; pixels: it should be greater than 0"),
        ("{pixels: 4294967297}", "pixels: it should be less than or equal to 4294967296"),
        ("{pixels: 65536, step: 4097}", "step: it should be less than or equal to 4096"),
        ("{pixels: 65536, step: 0}", "step: it should be greater than 0"),
        ("{pixels: 65536, ratio: 0.9}", "ratio: it should be greater than or equal to 1"),
        ("{pixels: 65536, ratio: 16.1}", "ratio: it should be less than or equal to 16"),
        ("{step: 16}", "pixels: Field required"),
        ("{pixels: 65536, stap: 8}", "stap: Extra inputs are not permitted"),
    ],
)
def test_rules_that_are_none(rule, problem):
    """Oracle: by hand: the entry of the rule, and what it should be; the last values that are taken are tried, too."""
    with pytest.raises(ConfigError) as caught:
        recipe.load_recipe(None, [f"data.buckets={rule}"])
    assert len(caught.value.problems) == 1 and f"{problem} [command line]" in str(caught.value)
    for taken in ("{pixels: 4294967296, step: 4096, ratio: 1}", "{pixels: 65536, ratio: 16}", "{pixels: 1, step: 1}"):
        assert recipe.load_recipe(None, [f"data.buckets={taken}"]).data.buckets


def test_sides_that_are_no_multiples():
    """Oracle: by hand: a shape either side of which does not fit is named, five at most; none without buckets."""
    require_divisible_sides(((16, 32), (48, 16)), 16, "the patch")
    require_divisible_sides(None, 16, "the patch")
    for shapes, named in (
        (((16, 24), (16, 16), (24, 16)), "16 x 24, 24 x 16"),
        (tuple((16, side) for side in range(1, 8)), "16 x 1, 16 x 2, 16 x 3, 16 x 4, 16 x 5"),
    ):
        with pytest.raises(
            ConfigError,
            match=rf"^sizes: the sides of {named} in data.buckets are no multiples of 16, "
            "the patch: give others, or a rule whose step is a multiple$",
        ):
            require_divisible_sides(shapes, 16, "the patch")


def test_parts_of_a_mixture():
    """Oracle: by hand: a source's own entries, then those of the section; a share is held out of a folder that names no
    other, and never of what is built in; the kind of the data is that of the first; ~ is the home folder.
    """
    data = recipe.load_recipe(
        None,
        [
            "data.mixture=[{path: ~/a, captions: ~/c}, {path: b, held_out: 0.5}, {path: d, "
            "held_out_path: ~/e}, {path: 'builtin:fashion'}, {path: f, held_out: 0}]",
            "data.held_out=0.1",
            "data.flip=false",
        ],
    ).data
    home = str(Path.home())
    parts = data.list_sources()
    assert [part.path for part in parts] == [f"{home}/a", "b", "d", "builtin:fashion", "f"] and data.path == f"{home}/a"
    assert [part.held_out for part in parts] == [0.1, 0.5, 0.0, 0.0, 0.0] and not any(part.flip for part in parts)
    assert [part.held_out_path for part in parts] == [None, None, f"{home}/e", None, None]
    assert [part.captions for part in parts] == [f"{home}/c"] + [None] * 4
    assert all(part.mixture is None for part in parts) and recipe.load_recipe(None, []).data.list_sources() == ()
