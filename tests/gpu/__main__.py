"""python -m tests.gpu COMMAND ...: see build.py."""

import sys

from tests.gpu.build import main

main(sys.argv[1:])
