"""Tiny autoencoders for the contract of all systems."""

TOKENS = {"num_tokens": 16, "codebook_dim": 8, "num_layers": 2, "hidden_dim": 8, "kl_weight": 1.0}
POSTERIOR = {"block_out_channels": [8, 16], "norm_num_groups": 4, "layers_per_block": 1, "kl_weight": 0.1}
PATCHES = {"discriminator": {"n_layers": 2, "base_channels": 16}}
CASES = [
    {"image_size": 16, "channels": 3, "discrete": TOKENS | {"num_resnet_blocks": 1}},
    {"image_size": 8, "channels": 4, "discrete": TOKENS | {"sampling": "reinmax", "reconstruction": "logit_laplace"}},
    {"image_size": 16, "channels": 1, "kl": POSTERIOR | PATCHES},
    {
        "image_size": 16,
        "channels": 3,
        "discrete": TOKENS
        | PATCHES
        | {
            "kl_weight": 0.0,
            "quantizer": "fsq",
            "levels": [4, 4],
            "perceptual": {"path": "builtin:fashion", "weight": 0.1},
        },
    },
    {"image_size": 8, "channels": 3, "kl": POSTERIOR | {"reconstruction": "mse", "quant_conv": False}},
]
