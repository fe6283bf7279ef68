#!/usr/bin/env python3
"""Makes and describes the index of data: python launch/index.py DATA [--index FOLDER] [data.key=value]"""

from dstrain.commands.main import start_verb

if __name__ == "__main__":
    start_verb("index")
