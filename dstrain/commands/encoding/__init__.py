"""Serves `dstrain encode`: plans of latents and tokens, folders of shards, and embedding pairs."""
