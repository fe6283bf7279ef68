"""Layers and blocks that the systems share, in plain torch."""
