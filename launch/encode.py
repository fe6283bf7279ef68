#!/usr/bin/env python3
"""Encodes a data set once, as shards that training reads: deepspeed launch/encode.py RUN --out DIR [...]"""

from dstrain.commands.main import start_verb

if __name__ == "__main__":
    start_verb("encode")
