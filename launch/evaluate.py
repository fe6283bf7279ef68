#!/usr/bin/env python3
"""Measures a trained run: bits/dim on held-out data, or FID and its like: deepspeed launch/evaluate.py RUN [...]"""

from dstrain.commands.main import start_verb

if __name__ == "__main__":
    start_verb("evaluate")
