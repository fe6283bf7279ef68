#!/usr/bin/env python3
"""Writes the report of one run, or of several side by side: python launch/report.py RUN [RUN ...] [--out FILE]"""

from dstrain.commands.main import start_verb

if __name__ == "__main__":
    start_verb("report")
