"""Frozen networks of other projects that encode images, texts and pictures for dstrain's systems and metrics."""
