#!/usr/bin/env python3
"""Writes any data as shards of encoded files, or as webdataset tars: [deepspeed] launch/pack.py DATA --out SHARDS"""

from dstrain.commands.main import start_verb

if __name__ == "__main__":
    start_verb("pack")
