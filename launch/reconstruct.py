#!/usr/bin/env python3
"""Makes averages of any length from a run's snapshots: python launch/reconstruct.py RUN --ema 0.05,0.10"""

from dstrain.commands.main import start_verb

if __name__ == "__main__":
    start_verb("reconstruct")
