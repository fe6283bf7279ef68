#!/usr/bin/env python3
"""Makes a run's folder of weights from elsewhere: python launch/import.py FILE --recipe RECIPE --out RUN"""

from dstrain.commands.main import start_verb

if __name__ == "__main__":
    start_verb("import")
