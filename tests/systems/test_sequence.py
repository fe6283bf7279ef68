"""Networks whose tokens ranks share, against the same networks alone."""

import pytest
import torch
from torch import Tensor, nn

from dstrain import systems
from dstrain.nn.sequence import (
    gather_rank_slices,
    reorder_like_gathered_slices,
    take_rank_slice,
    take_rank_slice_of_both_parts,
)
from dstrain.systems.dit.blocks import BlockInputs, JointBlock
from dstrain.systems.dit.network import DiT
from dstrain.systems.phenaki.maskgit import MaskGit, TokenCritic
from dstrain.systems.phenaki.tokenizer.network import CViViT
from dstrain.systems.phenaki.transformer import ROWS, Transformer
from tests.support import gloo
from tests.support.sharing import compare


def dit(**choices) -> DiT:
    return DiT(8, 2, 3, 16, 4, 4, num_classes=5, **choices)


def call_dit(network: nn.Module) -> list[Tensor]:
    """Two images of 8 x 8: 16 tokens; with all that the network gives."""
    draw = torch.Generator().manual_seed(1)
    x, t = torch.randn(2, 3, 8, 8, generator=draw), torch.tensor([3.0, 500.0])
    words = {}
    if hasattr(network, "text_tokens"):
        words = {"text": torch.randn(2, 4, 6, generator=draw), "mask": torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])}
    out = network(x, t, torch.tensor([1, 4]), extras=True, **words)
    return [out["out"], *([out["base"]] if "base" in out else []), *out.get("projected", []), *_drawn(out)]


def call_clips(network: nn.Module) -> list[Tensor]:
    """Two clips of 3 frames of 8 x 8, in 2 x 16 patches, from texts and first frames."""
    draw = torch.Generator().manual_seed(1)
    x, given = (torch.randn(2, channels, 3, 8, 8, generator=draw) for channels in (3, 4))
    text, mask = torch.randn(2, 4, 6, generator=draw), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    return [network(x, torch.tensor([3.0, 500.0]), text=text, mask=mask, given=given)]


def _drawn(out) -> list[Tensor]:
    return [out["drawn"], out["towards"] - out["drawn"]] if "drawn" in out else []


class Joint(nn.Module):
    """Two joint blocks, the last of which drops the texts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([JointBlock(16, 4, qk_norm="rms", dual=True), JointBlock(16, 4, last=True)])

    def forward(self, x: Tensor, c: Tensor, mask: Tensor, patches: int) -> Tensor:
        ordered = reorder_like_gathered_slices(mask, patches, 1)[:, None, None]
        x = take_rank_slice_of_both_parts(x, patches, 1)
        seen = BlockInputs(c, mask=ordered, images=take_rank_slice(torch.arange(patches), 0).numel())
        for block in self.blocks:
            x = block(x, *seen)
        return gather_rank_slices(x, 1)


def call_joint(network: nn.Module) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, 18:] = mask[1, 13:15] = False
    x, c = (torch.randn(2, *shape, 16, generator=draw, dtype=torch.float64) for shape in ((20,), ()))
    return [network(x, c, mask, 12)]


class Grid(nn.Module):
    """A transformer over the rows of a clip's grid that ranks share."""

    def __init__(self, over: str, context: int | None) -> None:
        super().__init__()
        self.transformer = Transformer(16, 2, 4, 4, context, over != "all", over=over)

    def forward(self, x: Tensor, *told: Tensor | None) -> Tensor:
        return gather_rank_slices(self.transformer(take_rank_slice(x, ROWS), *told), ROWS)


def call_grid(network: nn.Module) -> list[Tensor]:
    """Two clips of 3 x 4 x 2 tokens, some of them hidden, with a bias for each head and, for some, texts."""
    draw = torch.Generator().manual_seed(1)
    block = network.transformer.layers[0]
    x = torch.randn(2, *GRID, 16, generator=draw, dtype=torch.float64)
    count = {"all": 24, "space": 8, "time": 3}[block.over]
    bias = torch.randn(4, count, count, generator=draw, dtype=torch.float64)
    mask = torch.rand(2, *GRID, generator=draw) > 0.2
    mask[0, 2] = mask[1, :, 3] = False  # a whole frame, and a row in all frames
    text = (None, None)
    if block.cross is not None:
        text = torch.randn(2, 5, 6, generator=draw, dtype=torch.float64), torch.arange(5) < torch.tensor([[5], [2]])
    return [network(x, bias, mask, *text), network(x, None, None, *text)]


def call_tokenizer(network: nn.Module) -> list[Tensor]:
    """Two clips of 5 frames, of which the second has 3."""
    draw = torch.Generator().manual_seed(1)
    video = torch.randn(2, 5, 1, 16, 8, generator=draw, dtype=torch.float64)
    clips, pictures = network(video, torch.tensor([5, 3])), network(video[:, :1], torch.tensor([1, 1]))
    return [
        values for passed in (clips, pictures) for values in passed if values.is_floating_point() and values.numel()
    ]


def call_maskgit(network: nn.Module) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(9, (2, *GRID), generator=draw)
    told = {
        "real": torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool),
        "dropped": torch.tensor([False, True]),
        "words": torch.tensor([[1, 2, 0], [3, 0, 0]]),
    }
    if isinstance(network, TokenCritic):
        return [network(tokens, **told).double()]
    masked, weights = torch.rand(2, *GRID, generator=draw) < 0.5, torch.tensor([0.1, 0.2], dtype=torch.float64)
    uniforms = torch.rand(2, tokens[0].numel(), generator=draw)
    passed = network(tokens, masked, weights, uniforms=uniforms, **told)
    return [passed.total, passed.critic.double()]


GRID = (3, 4, 2)
TRUNK = {
    "token_shape": GRID,
    "dim": 16,
    "depth": 2,
    "heads": 4,
    "dim_head": 4,
    "gradient_shrink": 0.5,
    "text": {"num_words": 5, "max_text_len": 3, "encodings_dim": None, "learns_null": True},
}
SMALL = (16, 16, (16, 8), 4, 2, 1, 1, 4, 4, 1)  # of a tokenizer: 4 x 2 patches, 16 channels, 4 heads
CASES = {
    "all": (lambda: Grid("all", 6), call_grid),
    "space": (lambda: Grid("space", None), call_grid),
    "time": (lambda: Grid("time", 6), call_grid),
    "tokenizer": (lambda: CViViT(*SMALL), call_tokenizer),
    "maskgit": (lambda: MaskGit(9, self_critic=True, **TRUNK), call_maskgit),
    "critic": (lambda: TokenCritic(9, **TRUNK), call_maskgit),
    "modern": (
        lambda: dit(
            rope=True,
            block={"norm": "rms", "mlp": "swiglu", "qk_norm": "rms"},
            tokens={"time": 4, "label": 8, "joins": 2},
            wide={"hidden_size": 24, "depth": 1, "num_heads": 4},
            base_depth=1,
            align={"depth": 1, "target": 3, "widths": [5], "hidden": 7},
        ),
        call_dit,
    ),
    "texts": (lambda: dit(rope=True, text={"encodings_dim": 6}, tokens={"joins": 1}), call_dit),
    "cross": (lambda: dit(text={"encodings_dim": 6, "learns_null": True}, cross_attention=True), call_dit),
    "joint": (Joint, call_joint),
    "sd3": (
        lambda: dit(
            joint=True,
            dual=1,
            pooled_dim=5,
            sines_within=(6, 4),
            block={"qk_norm": "rms"},
            text={"encodings_dim": 6, "learns_null": True, "projection": "plain"},
        ),
        call_dit,
    ),
    "clips": (
        lambda: DiT(
            8, 2, 3, 32, 2, 4, rope=True, text={"encodings_dim": 6}, tokens={"joins": 1}, patch_frames=2, given=True
        ),
        call_clips,
    ),
}


def work(_rank: int, teams: tuple[int, ...]) -> dict[str, dict[str, float]]:
    return {
        f"{name} on {ranks}": compare(build, call, ranks) for name, (build, call) in CASES.items() for ranks in teams
    }


@pytest.mark.parametrize("world, teams", [(2, (2,)), pytest.param(4, (2, 4), marks=pytest.mark.faults)])
def test_shared_networks_are_the_networks(tmp_path, world, teams):
    """Oracle: the same network on one rank: outputs and, by the mean over ranks, every weight's gradient, which
    ZeRO takes, both in float64 to 1e-10.
    """
    for figures in gloo.run(tmp_path, work, teams, world=world):
        for name, found in figures.items():
            assert max(found.values()) < 1e-10, (name, found)


def conflicts(name: str, ranks: int, **model) -> list[str]:
    return systems.build_config(name, model).list_conflicts_among_ranks(ranks)


def test_what_ranks_cannot_share_is_named():
    """Oracle: by hand: 4 heads, 16 tokens, 18 and 8 in two buckets, 6 condition tokens; what divides all of a message's
    numbers; networks without tokens to cut.
    """
    small = {"patch_size": 4, "hidden_size": 16, "depth": 2, "num_heads": 4, "image_size": 16}
    assert conflicts("dit", 4, **small) == conflicts("dit", 1, **small) == []
    assert conflicts("dit", 3, **small) == [
        "parallel.sequence=3 does not divide the 16 tokens of an image: what works is 1, 2, 4",
        "parallel.sequence=3 does not divide the 4 attention heads, num_heads: what works is 1, 2, 4",
    ]
    (text,) = conflicts("dit", 4, **small, sizes=[[24, 12], [8, 16]])
    assert "the 18 tokens of 24 x 12 pixels: what works is 1, 2" in text
    (text,) = conflicts("dit", 4, **small, tokens={"time": 2, "label": 4})
    assert "the 6 condition tokens of model.tokens: what works is 1, 2" in text
    (text,) = conflicts("dit", 4, **small, wide={"hidden_size": 24, "depth": 1, "num_heads": 6})
    assert "the 6 attention heads, model.wide.num_heads: what works is 1, 2" in text
    clips = small | {"hidden_size": 32, "image_size": 8, "video": {"frames": 5, "patch_frames": 2}}
    assert conflicts("dit", 4, **clips) == []
    (text,) = conflicts("dit", 8, **clips | {"num_heads": 8})
    assert "the 12 tokens of a clip: what works is 1, 2, 4" in text
    (text,) = conflicts("dit", 2, **small, routing={"start": 1})
    assert "leave model.routing out, or write parallel.sequence=1" in text
    video = {"image_size": [48, 16], "heads": 6, "dim": 20}
    assert conflicts("phenaki.tokenizer", 2, **video) == []
    assert conflicts("phenaki.tokenizer", 4, **video) == [
        "parallel.sequence=4 does not divide the 6 rows of a frame's patches: what works is 1, 2",
        "parallel.sequence=4 does not divide the 6 attention heads, heads: what works is 1, 2",
    ]
    words = {"token_shape": [1, 6, 5], "codebook_size": 8, "heads": 6, "dim": 20, "unconditional": True}
    assert len(conflicts("phenaki", 3, **words)) == 1 and conflicts("phenaki", 3, **words, peg=False) == []
    for name in ("iddpm", "vae", "prior"):
        (text,) = systems.find_config_class(name).model_construct().list_conflicts_among_ranks(2)
        assert text.startswith("parallel.sequence=2: ") and text.endswith("write parallel.sequence=1")
