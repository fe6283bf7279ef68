#!/usr/bin/env python3
"""Merges a checkpoint's weights into safetensors files: python launch/consolidate.py RUN --out DIR [...]"""

from dstrain.commands.main import start_verb

if __name__ == "__main__":
    start_verb("consolidate")
