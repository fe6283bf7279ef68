#!/usr/bin/env python3
"""Draws pictures or videos from a trained run: deepspeed launch/generate.py RUN [--num-samples N] [...]"""

from dstrain.commands.main import start_verb

if __name__ == "__main__":
    start_verb("generate")
