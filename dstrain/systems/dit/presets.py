"""Published sizes of DiT and of its kin: name -> fields of the model's section, which an entry in the recipe overrules.

Sources: Peebles & Xie 2022, table 1 (DiT; SiT, Ma et al. 2024, and REPA, Yu et al. 2024, have its networks); Yao et al.
2025 (LightningDiT); Li & He 2025 (JiT); Zheng et al. 2025 (RAE); nanovisionx/RAEv2; Chen et al. 2023 (PixArt-alpha);
Esser et al. 2024 (SD3), and Stability AI's configs of the published weights.
"""

from typing import Any

SHAPE = ("patch_size", "hidden_size", "depth", "num_heads")
# Letter -> hidden_size, depth, num_heads.
_DIT = {"S": (384, 12, 6), "B": (768, 12, 12), "L": (1024, 24, 16), "XL": (1152, 28, 16)}
_LIGHTNING = {
    **{letter: shape for letter, shape in _DIT.items() if letter != "S"},
    "1p0B": (1536, 24, 24),
    "1p6B": (1792, 28, 28),
}
_MODERN = {"norm": "rms", "mlp": "swiglu", "rope": True}


# Beside these the channels of the patches' bottleneck, and the block before which the class tokens join.
_JIT = {"B": (768, 12, 12, 128, 4), "L": (1024, 24, 16, 128, 8), "H": (1280, 32, 16, 256, 10)}
_WIDE = {"hidden_size": 2048, "depth": 2, "num_heads": 16}

# Width, depth, and patches of the square in whose middle an image lies; a head has 64 values.
_SD3 = {
    "SD3-medium": (1536, 24, 192, {}),
    "SD3.5-medium": (1536, 24, 384, {"qk_norm": "rms", "dual": 13}),
    "SD3.5-large": (2432, 38, 192, {"qk_norm": "rms"}),
}

_PIXART = {
    "patch_size": 2,
    "hidden_size": 1152,
    "depth": 28,
    "num_heads": 16,
    "block": {"modulation": "shared"},
    "cross_attention": True,
    "text_projection": "mlp",
}

PRESETS: dict[str, dict[str, Any]] = {
    **{
        f"{name}-{letter}/{patch}": {"patch_size": patch, "hidden_size": width, "depth": depth, "num_heads": heads}
        for name, patches in (("DiT", (2, 4, 8)), ("SiT", (2,)))
        for letter, (width, depth, heads) in _DIT.items()
        for patch in patches
    },
    **{
        f"LightningDiT-{letter}/{patch}": {
            "patch_size": patch,
            "hidden_size": width,
            "depth": depth,
            "num_heads": heads,
            "learn_sigma": False,
            "block": _MODERN,
        }
        for letter, (width, depth, heads) in _LIGHTNING.items()
        for patch in ((2,) if letter == "L" else (1, 2))
    },
    **{
        f"JiT-{letter}/{patch}": {
            "patch_size": patch,
            "hidden_size": width,
            "depth": depth,
            "num_heads": heads,
            "learn_sigma": False,
            "block": {**_MODERN, "qk_norm": "rms"},
            "tokens": {"label": 32, "joins": joins},
            "patch_bottleneck": bottleneck,
        }
        for letter, (width, depth, heads, bottleneck, joins) in _JIT.items()
        for patch in (16, 32)
    },
    "PixArt-XL/2": _PIXART,
    "PixArt-XL/2-1024": {**_PIXART, "size_embedding": "pixart", "interpolation_scale": 2},
    **{
        name: {
            "patch_size": 2,
            "hidden_size": width,
            "depth": depth,
            "num_heads": width // 64,
            "in_channels": 16,
            "learn_sigma": False,
            "objective": "flow",
            "flow": {"shift": 3.0},
            "block": {"joint": True, **block},
            "sines_within": [within, 64],
            "text_projection": "plain",
            "text_pooled_dim": 2048,
        }
        for name, (width, depth, within, block) in _SD3.items()
    },
    "RAE-DiTDH-XL": {
        "patch_size": 1,
        "hidden_size": 1152,
        "depth": 28,
        "num_heads": 16,
        "learn_sigma": False,
        "time_freq": "fourier",
        "block": _MODERN,
        "wide": _WIDE,
    },
    "RAEv2-XL": {
        "patch_size": 1,
        "hidden_size": 1440,
        "depth": 28,
        "num_heads": 20,
        "learn_sigma": False,
        "time_freq": "fourier",
        "block": {**_MODERN, "qk_norm": "rms", "modulation": "none"},
        "sines": False,
        "tokens": {"time": 4, "label": 8},
        "wide": _WIDE,
        "internal": {"depth": 8},
    },
}
