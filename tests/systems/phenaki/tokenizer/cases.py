"""Tiny tokenizers of videos for the contract of all systems."""

CLIPS = {
    "image_size": 16,
    "num_frames": 5,
    "channels": 1,
    "dim": 32,
    "codebook_size": 64,
    "spatial_depth": 1,
    "temporal_depth": 1,
    "dim_head": 8,
    "heads": 2,
}
PATCHES = {"discriminator": {"n_layers": 2, "base_channels": 16}}
CASES = [
    CLIPS,
    CLIPS | PATCHES | {"image_size": [16, 24], "channels": 3, "recompute": True},
    CLIPS | {"quantizer": "cosine", "codebook_size": 50, "codebook_dim": 4},
    CLIPS | {"quantizer": "fsq", "codebook_size": 60, "levels": [5, 4, 3]},
]
EVALUATES_BY_KEYS = False  # held-out clips are encoded without a draw
