#!/usr/bin/env python3
"""Says what a run will cost, before it is started: python launch/plan.py [--recipe R] --world N [key=value ...]"""

from dstrain.commands.main import start_verb

if __name__ == "__main__":
    start_verb("plan")
