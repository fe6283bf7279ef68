"""Makes lucidrains_NAME.safetensors with lucidrains' DALLE2-pytorch itself, which no test needs:

    pip install --no-deps --target NEW dalle2-pytorch==1.15.6 rotary-embedding-torch==0.2.3 einops
    pip install --no-deps --target OLD dalle2-pytorch==1.0.6
    PYTHONPATH=.:NEW python tests/golden/make_lucidrains.py texts timesteps
    PYTHONPATH=.:OLD:NEW python tests/golden/make_lucidrains.py products

Weights are filled from their names (tests/support/golden.py). Packages that only its decoder imports are stood in for.
"""

import json
import sys
from unittest.mock import MagicMock

import torch
from safetensors.torch import save_file

from tests.support import golden

for absent in (
    "kornia",
    "kornia.filters",
    "kornia.augmentation",
    "resize_right",
    "x_clip",
    "coca_pytorch",
    "embedding_reader",
    "dalle2_pytorch.tokenizer",
    "dalle2_pytorch.vqgan_vae",
    "dalle2_pytorch.trainer",
    "clip",
    "vector_quantize_pytorch",
    "ema_pytorch",
    "torchvision",
    "torchvision.transforms",
    "torchvision.utils",
):
    sys.modules[absent] = MagicMock()
sys.modules["x_clip"].CLIP = sys.modules["coca_pytorch"].CoCa = type("Absent", (), {})

from dalle2_pytorch import dalle2_pytorch  # noqa: E402 (after its stand-ins)
from dalle2_pytorch.version import __version__  # noqa: E402

NETWORK = {"dim": 16, "depth": 2, "heads": 3, "dim_head": 8, "max_text_len": 5}
CASES = {  # arguments of the network, and of the diffusion
    "texts": (
        NETWORK | {"num_timesteps": 8, "norm_in": True, "normformer": True, "self_cond": True},
        {"sampling_clamp_l2norm": True, "sampling_final_clamp_l2norm": True},
    ),
    "timesteps": (
        NETWORK | {"dim_head": 40, "rotary_emb": True, "norm_out": False, "final_proj": False, "ff_mult": 2},
        {"predict_v": True, "condition_on_text_encodings": False},
    ),
    "products": (NETWORK | {"num_timesteps": 8, "rotary_emb": False}, {}),
}
COUNT = 3


@torch.no_grad()
def make(name: str) -> None:
    network, diffusion = CASES[name]
    net = dalle2_pytorch.DiffusionPriorNetwork(**network)
    prior = dalle2_pytorch.DiffusionPrior(net, image_embed_dim=16, timesteps=8, cond_drop_prob=0.1, **diffusion).eval()
    if hasattr(net, "null_text_embed"):  # its name until version 1.8
        net.null_text_encodings = net.null_text_embed
        del net.null_text_embed
    buffers = {
        key: value.clone() for key, value in prior.state_dict().items() if "noise_scheduler" in key or "rotary" in key
    }
    golden.fill(net, keep=tuple(key.removeprefix("net.") for key in buffers))
    if "null_text_encodings" in net._parameters and __version__ < "1.1":
        net.null_text_embed = net.null_text_encodings
    keys = {key: list(value.shape) for key, value in prior.state_dict().items()}
    if __version__ < "1.1":
        keys.pop("net.null_text_encodings")
    x, text = (golden.stream(key, (COUNT, 16)).float() for key in ("x", "text_embed"))
    encodings = golden.stream("text_encodings", (COUNT, 4, 16)).float()
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    text = torch.nn.functional.normalize(text, dim=1)
    t = torch.tensor([0, 3, 7])
    texts = {"text_embed": text}
    if diffusion.get("condition_on_text_encodings", True):
        texts["text_encodings"] = encodings * mask[:, :, None]
    old = {"cond_drop_prob": 1.0} if __version__ < "1.1" else {"text_cond_drop_prob": 1.0, "image_cond_drop_prob": 1.0}
    dummy = golden.stream("self_cond", (COUNT, 16)).float()
    own = {"self_cond": dummy} if network.get("self_cond") else {}
    tensors = {"out": net(x, t, **texts, **own), "null": net(x, t, **texts, **own, **old)}
    drawn = iter(["start", *(f"noise/{i}" for i in range(8))])
    torch.randn = torch.randn_like = lambda *_, **__: golden.stream(next(drawn), (COUNT, 16)).float()
    dalle2_pytorch.tqdm = lambda iterable, **_: iterable
    tensors["chain"] = prior.p_sample_loop((COUNT, 16), text_cond=texts, cond_scale=2.5)
    if __version__ < "1.1":  # there sample() unscales, behind the chain
        tensors["chain"] = tensors["chain"] / prior.image_embed_scale
    tensors |= {"mask": mask, "betas": prior.noise_scheduler.betas} | {
        key: value.clone() for key, value in buffers.items() if "rotary" in key
    }
    meta = {
        "version": __version__,
        "network": network,
        "diffusion": diffusion,
        "keys": keys,
        "made": "tests/golden/make_lucidrains.py",
    }
    save_file(
        {key: value.contiguous().clone() for key, value in tensors.items()},
        golden.FOLDER / f"lucidrains_{name}.safetensors",
        metadata={"meta": json.dumps(meta)},
    )


for chosen in sys.argv[1:]:
    make(chosen)
