"""Measuring: a training step beside plain loops and rivals (compare.py), and the kit for a GPU (kit.py)."""
