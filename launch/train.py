#!/usr/bin/env python3
"""Trains a system from a recipe: deepspeed launch/train.py [--recipe FILE] [--ds_config FILE] [key=value ...]"""

from dstrain.commands.main import start_verb

if __name__ == "__main__":
    start_verb("train")
