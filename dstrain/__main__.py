"""Runs `python -m dstrain VERB ...`, and `deepspeed --module dstrain VERB ...`, as `dstrain VERB ...`."""

from dstrain.commands.main import main

if __name__ == "__main__":
    main()
