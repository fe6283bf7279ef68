#!/usr/bin/env python3
"""Starts a training command again where it has died: python launch/keep.py -- deepspeed launch/train.py ..."""

from dstrain.commands.main import start_verb

if __name__ == "__main__":
    start_verb("keep")
