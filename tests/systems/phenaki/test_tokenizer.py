"""C-ViViT and its system: clips and images to tokens and back."""

import zlib

import pytest
import torch

from dstrain import systems
from dstrain.nn.measures import compute_psnr, compute_ssim
from dstrain.nn.perceptual import CHANNELS, Perceptual
from dstrain.recipe import Run
from dstrain.systems.phenaki.tokenizer import Config

SMALL = {
    "image_size": [8, 12],
    "num_frames": 7,
    "channels": 1,
    "dim": 16,
    "codebook_size": 32,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_depth": 2,
    "temporal_depth": 1,
    "dim_head": 8,
    "heads": 2,
}
COSINE = {"quantizer": "cosine", "codebook_size": 20, "codebook_dim": 4}
FSQ = {"quantizer": "fsq", "codebook_size": 60, "levels": [5, 4, 3]}
JUDGED = {"image_size": 16, "discriminator": {"start": 3, "n_layers": 2, "base_channels": 16, "weight": 0.4}}


def build(**more):
    return systems.build("phenaki.tokenizer", SMALL | more)


def nets_of(system):
    """Networks whose weights are all random."""
    nets = system.networks()
    for network in nets.values():
        for name, parameter in network.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return nets


def clips(count=3, frames=7, size=(8, 12), channels=1):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, frames, channels, *size, generator=generator) * 2 - 1


@pytest.fixture(params=[{}, COSINE, FSQ], ids=["lookup_free", "cosine", "fsq"])
def network(request):
    return nets_of(build(**request.param))["tokenizer"]


# ---------------------------------------------------------------------------------------------------------- the network


def test_tokens_do_not_see_later_frames(network):
    """Oracle: the tokens of the clip before its last patch was changed; those of the last frames do change."""
    video, frames = clips(), torch.full((3,), 7)
    changed = video.clone()
    changed[:, 5:] = -changed[:, 5:]
    before, after = network.encode_to_tokens(video), network.encode_to_tokens(changed)
    assert before.shape == (3, 4, 2, 3) and torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3], after[:, 3])
    first, second = network(video, frames).video, network(changed, frames).video
    assert torch.equal(first[:, :5], second[:, :5]) and not torch.equal(first[:, 5:], second[:, 5:])


def test_pictures_do_not_see_later_tokens(network):
    """Oracle: the frames that were decoded before the last latent frame was changed, and a shorter clip's."""
    tokens = network.encode_to_tokens(clips())
    changed = tokens.clone()
    changed[:, 3] = (tokens[:, 3] + 1) % 20
    before, after = network.decode_tokens(tokens), network.decode_tokens(changed)
    assert before.shape == (3, 7, 1, 8, 12) and torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])
    torch.testing.assert_close(network.decode_tokens(tokens[:, :1]), before[:, :1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("held", [9.0, float("nan")])
def test_padding_changes_nothing(network, held):
    """Oracle: terms, tokens and pictures of the clips alone, whatever padding holds, and how long it is."""
    video, frames = clips(), torch.tensor([1, 3, 6])  # 6: its last frame fills no patch
    padded = video.clone()
    for number, count in enumerate((1, 3, 5)):
        padded[number, count:] = held
    found = network(padded, frames)
    for number, count in enumerate((1, 3, 5)):
        alone = network(video[number : number + 1, :count], torch.tensor([count]))
        assert torch.equal(alone.tokens[0], found.tokens[number, : 1 + count // 2])
        torch.testing.assert_close(alone.video[0], found.video[number, :count], rtol=1e-5, atol=1e-6)
        for name in ("commitment", "codebook", "entropy", "shares"):
            torch.testing.assert_close(getattr(alone, name)[0], getattr(found, name)[number], rtol=1e-5, atol=1e-6)


def test_round_trip(network):
    """Oracle: the video of the one forward pass, clamped, from its tokens."""
    video, frames = clips(), torch.tensor([7, 5, 1])
    found = network(video, frames)
    assert torch.equal(found.tokens, network.encode_to_tokens(video, frames))
    decoded = network.decode_tokens(found.tokens)
    torch.testing.assert_close(decoded, found.video.clamp(-1, 1), rtol=1e-4, atol=1e-5)


def test_patches():
    """Oracle: pixel (y, x) of frame f lies in patch (y // 4, x // 4), and comes back where it was."""
    network = build().networks()["tokenizer"]
    video = torch.arange(2 * 4 * 1 * 8 * 12).view(2, 4, 1, 8, 12).float()
    patches = network._cut_patches(video, 2)
    assert patches.shape == (2, 2, 2, 3, 32)
    assert torch.equal(patches[1, 1, 1, 2].view(2, 1, 4, 4), video[1, 2:4, :, 4:8, 8:12])
    assert torch.equal(network._join_patches(patches, 2), video)


@pytest.mark.parametrize("more", [{}, COSINE, FSQ], ids=["lookup_free", "cosine", "fsq"])
def test_images_alone(more):
    """Oracle: a gradient for every weight, 0 up to rounding for those of later frames, and others elsewhere.

    Over one latent frame the weight of attention is 1 whatever the queries say, and a bias that all scores share says
    nothing. That such a gradient, a difference of equal sums, is 0 to the last bit is so on some CPUs only.
    """
    system = build(**more)
    nets, example = (
        nets_of(system),
        system.encode({"image": torch.randint(0, 256, (4, 1, 8, 12), dtype=torch.uint8), "key": torch.arange(4)}),
    )
    assert example["x_start"].shape == (4, 1, 1, 8, 12) and example["frames"].tolist() == [1] * 4
    system.loss("tokenizer", nets, example)["loss"].backward()
    weights = dict(nets["tokenizer"].named_parameters())
    assert all(weight.grad is not None for weight in weights.values())
    typical = torch.stack([weight.grad.abs().max() for weight in weights.values()]).median()
    for name, weight in weights.items():
        later = name.startswith(("to_patch_emb.", "to_pixels."))
        later |= name == "spatial_rel_pos_bias.net.4.bias"
        later |= "temporal" in name and ("to_q" in name or "q_norm" in name or "k_norm" in name)
        assert bool((weight.grad.abs() < 1e-5 * typical).all()) == later, name


def test_bfloat16():
    """Oracle: the float32 network to bfloat16's precision."""
    video, frames = clips(), torch.tensor([7, 3, 1])
    plain, network = (nets_of(build())["tokenizer"] for _ in range(2))
    expected, rounded = plain(video, frames), network.bfloat16()(video, frames)
    assert rounded.video.dtype == torch.float32
    torch.testing.assert_close(rounded.entropy, expected.entropy, rtol=0.2, atol=0.1)


def test_readme_size():
    """Oracle: 60.2 M weights of the original at these sizes; ours differ by norms and by widths in eights."""
    config = Config(image_size=256, codebook_size=65536, patch_size=32, num_frames=17)
    with torch.device("meta"):
        network = systems.build("phenaki.tokenizer", config.model_dump()).networks()["tokenizer"]
    assert sum(weight.numel() for weight in network.parameters()) == pytest.approx(60.2e6, rel=0.05)


# ----------------------------------------------------------------------------------------------------------- the system


def batch_of(system, frames=(7, 5, 2, 1)):
    batch = system.synthetic(len(frames))
    return batch | {"frames": torch.tensor(frames)}


def test_terms():
    """Oracle: sums over real frames and tokens by hand; a frame that fills no patch is padding."""
    system = build()
    nets, example = nets_of(system), system.encode(batch_of(system))
    passed = nets["tokenizer"](example["x_start"], example["frames"])
    terms, held_out = system.loss("tokenizer", nets, example), system.evaluate(nets, example)
    for number, count in enumerate((7, 5, 1, 1)):
        video, truth = passed.video[number, :count], example["x_start"][number, :count]
        torch.testing.assert_close(terms["recon"][number], (video - truth).square().mean())
        video, truth = ((x.clamp(-1, 1) + 1) / 2 for x in (video, truth))
        torch.testing.assert_close(held_out["psnr"][number], compute_psnr(video, truth).mean())
        torch.testing.assert_close(held_out["ssim"][number], compute_ssim(video, truth).mean())
        tokens = passed.tokens[number, : (count + 1) // 2].flatten()
        torch.testing.assert_close(held_out["usage"][number], tokens.bincount(minlength=32) / len(tokens))
    loss = terms["recon"] + 0.25 * terms["commitment"] + 0.1 * (terms["entropy"] - terms["diversity"])
    torch.testing.assert_close(terms["loss"], loss.mean())
    torch.testing.assert_close(held_out["loss"], loss + 0.1 * terms["diversity"])
    found = system.compute_figures({"usage": held_out["usage"].mean(0)})
    shares = held_out["usage"].mean(0).double()
    assert found["perplexity"] == pytest.approx(torch.special.entr(shares).sum().exp().item())
    assert found["dead_tokens"] == (shares == 0).double().mean()


def test_fsq_has_no_terms():
    """Oracle: the reconstruction alone is the loss, of samples that learn and of held-out ones."""
    system = build(**FSQ)
    nets, example = nets_of(system), system.encode(batch_of(system))
    terms, held_out = system.loss("tokenizer", nets, example), system.evaluate(nets, example)
    assert not {"commitment", "codebook", "entropy"} & {*terms, *held_out}
    torch.testing.assert_close(terms["loss"], terms["recon"].mean())
    torch.testing.assert_close(held_out["loss"], held_out["recon"])


def test_turns_and_penalty():
    """Oracle: the start and the interval of the config; `slope` at those steps alone."""
    system = build(**JUDGED | {"discriminator": JUDGED["discriminator"] | {"penalty": {"every": 2}}})
    nets, batch = nets_of(system), batch_of(system)
    for step, parts, sloped in ((0, 1, False), (2, 1, False), (3, 2, False), (4, 2, True), (5, 2, False)):
        assert len(system.turns(step)) == parts
        example = system.encode(batch)
        assert ("critique" in system.loss("tokenizer", nets, example)) == (parts == 2)
        if parts == 2:
            assert ("slope" in system.loss("discriminator", nets, example)) == sloped


def test_the_adversary_weighs_as_the_frame_does():
    """Oracle: its gradient is 0.4 times as long as the reconstruction's on the judged frame, and 0 elsewhere."""
    system = build(**JUDGED)
    nets, example = nets_of(system), system.encode(batch_of(system))
    passed = nets["tokenizer"](example["x_start"], example["frames"])
    of_recon = torch.autograd.grad(
        system._compute_reconstruction_error(passed.video, example).sum(), passed.video, retain_graph=True
    )[0]
    _, descended = system._compute_terms_and_surrogate_loss(nets, passed.video, example)
    pull = torch.autograd.grad(descended.sum(), passed.video)[0]
    for number, (count, place) in enumerate(zip((7, 5, 1, 1), system._draw_frame_number_per_clip(example).tolist())):
        assert place < count
        added = pull[number] - of_recon[number]
        others = [frame for frame in range(7) if frame != place]
        assert float(added[others].abs().max()) == pytest.approx(0, abs=1e-7)
        # In the mean over frames the frame's own error weighs by 1 / count, and it is judged in one of count draws.
        expected = 0.4 * count * of_recon[number, place].norm()
        torch.testing.assert_close(added[place].norm(), expected, rtol=1e-2, atol=0.0)


def test_perceptual(tmp_path):
    """Oracle: LPIPS of one real frame of each clip, drawn by its key."""
    from torchvision.models import vgg16

    torch.manual_seed(0)
    state = {f"features.{name}": tensor for name, tensor in vgg16(weights=None).features.state_dict().items()}
    state |= {f"lin{number}.model.1.weight": torch.rand(1, width, 1, 1) for number, width in enumerate(CHANNELS)}
    torch.save(state, tmp_path / "both.pt")
    system = build(image_size=16, perceptual={"path": str(tmp_path), "weight": 0.5})
    nets, example = nets_of(system), system.encode(batch_of(system))
    terms = system.loss("tokenizer", nets, example)
    video = nets["tokenizer"](example["x_start"], example["frames"]).video
    place, each = system._draw_frame_number_per_clip(example), torch.arange(4)
    expected = Perceptual(tmp_path)(video[each, place], example["x_start"][each, place])
    torch.testing.assert_close(terms["perceptual"], expected.detach(), rtol=1e-4, atol=1e-6)
    judged = build(**JUDGED, perceptual={"path": str(tmp_path), "weight": 0.5})
    torch.testing.assert_close(
        judged.loss("tokenizer", nets_of(judged), judged.encode(batch_of(judged)))["perceptual"],
        expected.detach(),
        rtol=1e-4,
        atol=1e-6,
    )


def test_pictures():
    """Oracle: original and reconstruction beside each other; a clip stands still behind its last real frame."""
    system = build()
    nets, batch = nets_of(system), batch_of(system)
    shown = system.make_pictures(nets, system.encode(batch))["reconstruction"]
    assert shown.shape == (4, 7, 1, 8, 24) and shown.dtype == torch.uint8
    assert torch.equal(shown[0, ..., :12], batch["video"][0]) and not torch.equal(shown[0, 5], shown[0, 4])
    assert torch.equal(shown[1, 4:5].expand(3, -1, -1, -1), shown[1, 4:]) and torch.equal(
        shown[1, :5, ..., :12], batch["video"][1, :5]
    )
    alone = system.encode({"image": batch["video"][:, 0], "key": batch["key"]})
    assert system.make_pictures(nets, alone)["reconstruction"].shape == (4, 1, 8, 24)


def test_state():
    """Oracle: the shares that were observed, in a system that loads them; another codebook's are refused."""
    system = build()
    assert system.watched == ("shares",)
    nets, example = nets_of(system), system.encode(batch_of(system))
    shares = system.loss("tokenizer", nets, example)["shares"]
    system.observe({"shares": shares})
    other = build()
    other.load_state_dict(system.state_dict())
    torch.testing.assert_close(other.state_dict()["usage"], 0.9 / 32 + 0.1 * shares.mean(0))
    with pytest.raises(ValueError, match="set quantizer and codebook_size"):
        build(codebook_size=64).load_state_dict(system.state_dict())
    assert build(**COSINE).state_dict() == {} and build(**COSINE).watched == ()


def test_codes_and_identity():
    """Oracle: the network's tokens; an identity that frames, dropout and losses do not change, and the grid does."""
    system = build()
    nets, example = nets_of(system), system.encode(batch_of(system))
    tokens = system.compute_codes(nets, example)["tokens"]
    assert torch.equal(tokens, nets["tokenizer"].encode_to_tokens(example["x_start"], example["frames"]))
    assert system.codebook_size == 32 and system.encodes
    said = system.describe_identity(nets)[0]
    assert build(num_frames=3, dropout=0.1, entropy_weight=0, codebook_dim=7).describe_identity(nets)[0] == said
    assert (
        build(image_size=8).describe_identity(nets)[0] != said
        and system.describe_identity(nets)[1].keys() == nets["tokenizer"].state_dict().keys()
    )


def test_weights_of_elsewhere():
    """Oracle: any size and length takes the same weights; what differs is named with its fields."""
    state = build(image_size=[16, 8], num_frames=1).networks()["tokenizer"].state_dict()
    assert build().adapt_weights("tokenizer", state)[0].keys() == state.keys()
    for more, fields in (
        ({"codebook_size": 64}, "quantizer, codebook_size"),
        ({"patch_size": 2}, "patch_size"),
        ({"temporal_depth": 2}, "temporal_depth"),
    ):
        with pytest.raises(ValueError, match=f"weights: .*set .*{fields}"):
            build(**more).adapt_weights("tokenizer", state)
    with pytest.raises(ValueError, match="phenaki-pytorch.*train anew"):
        build().adapt_weights("tokenizer", {"enc_spatial_transformer.layers.0.0.dsconv.weight": torch.zeros(1)})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"codebook_size": 1000}, "codebook_size: 1000 is no power of two.*512 or 1024"),
        ({"quantizer": "fsq"}, "levels belong to quantizer=fsq, which needs them"),
        ({"levels": [5, 4, 3]}, "levels belong to quantizer=fsq, .* leave both out"),
        ({"quantizer": "fsq", "levels": [8, 5]}, r"levels \[8, 5\] make 40 tokens and codebook_size is 32"),
        ({"patch_size": 5}, "patch_size 5 does not divide image_size 8 x 12"),
        ({"num_frames": 8}, "num_frames 8 is not 1 .* temporal_patch_size 2: take 7 or 9"),
        ({"discriminator": {"n_layers": 2}}, "n_layers 2 needs pictures of 12 pixels, image_size is 8 x 12"),
        ({"perceptual": {"path": "x"}}, "perceptual halves the side four times"),
        ({"perceptual": {"path": "x"}, "channels": 4}, "perceptual sees 1 or 3 channels"),
    ],
)
def test_refused_configs(more, message):
    """Oracle: a ValueError that names the field and the remedy."""
    with pytest.raises(ValueError, match=message):
        build(**more)


def test_refused_batches():
    """Oracle: a ValueError that names the data's field and the remedy."""
    system, batch = build(), build().synthetic(2)
    with pytest.raises(ValueError, match=r"the model takes \(1, 8, 12\).*the data give \(1, 8, 8\)"):
        system.encode(batch | {"video": batch["video"][..., :8]})
    with pytest.raises(ValueError, match="data.num_frames: 6 is not 1 .* take 5"):
        system.encode(batch | {"video": batch["video"][:, :6]})


def test_recipe():
    """Oracle: what the data say where the model is silent, and the differences by name."""
    data = {"path": "builtin:moving-fashion", "image_size": 12, "height": 8, "num_frames": 7, "channels": 1}

    def run(**more):
        return Run.model_validate({"name": "t", "system": "phenaki.tokenizer", "data": data | more})

    completed = Config.model_validate(Config.complete_section({"patch_size": 4}, run()))
    assert completed.frame_size == (8, 12) and completed.num_frames == 7 and completed.channels == 1
    assert completed.list_conflicts(run()) == []
    problems = completed.list_conflicts(run(height=12, num_frames=9))
    assert len(problems) == 2 and "data.height=12" in problems[0] and "data.num_frames=9" in problems[1]
