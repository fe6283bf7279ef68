#!/usr/bin/env python3
"""Shows where all runs in a folder stand: python launch/watch.py FOLDER [FOLDER ...] [--follow] [--json]"""

from dstrain.commands.main import start_verb

if __name__ == "__main__":
    start_verb("watch")
