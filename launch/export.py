#!/usr/bin/env python3
"""Writes a trained run as a folder that others load: python launch/export.py RUN --out DIR [...]"""

from dstrain.commands.main import start_verb

if __name__ == "__main__":
    start_verb("export")
