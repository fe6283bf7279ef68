#!/usr/bin/env python3
"""Converts data of others once into what training reads: python launch/convert.py KIND PATH --out OUT"""

from dstrain.commands.main import start_verb

if __name__ == "__main__":
    start_verb("convert")
