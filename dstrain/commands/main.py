"""The command `dstrain VERB ...`, and what scripts for launchers run: each runs a verb.

A verb is its options in options/VERB.py, which import no torch, and `run_verb(options)` in a module of its own.
"""

import importlib
import sys
from contextlib import suppress
from typing import NamedTuple

# Nothing else is imported here: the first line, and stacks on request, come before other imports.
from dstrain import __version__
from dstrain.distributed.environment import open_closed_standard_streams
from dstrain.distributed.processes import install_stack_dump_handler
from dstrain.distributed.progress import get_phases, make_greeting_line

_BRIEF = {"--dry-run", "--print-config", "--help", "-h"}  # training that only prints what it is asked for


class Verb(NamedTuple):
    """Says what a verb does, and where its code and options are."""

    summary: str  # a line of `dstrain --help`
    options: str  # the class in options/MODULE.py
    module: str  # of dstrain.commands: run_verb(options)
    ranks: bool = False  # several processes of a launcher work together
    light: bool = False  # works without torch
    speaks: bool = True  # says what it is at wherever it is silent for long


VERBS = {
    "train": Verb("trains a system from a recipe, or goes on", "TrainOptions", "train"),
    "generate": Verb("draws pictures, videos or embeddings", "GenerateOptions", "generate", ranks=True),
    "evaluate": Verb("measures bits/dim, or FID and its like", "EvaluateOptions", "evaluate", ranks=True),
    "encode": Verb("caches latents, tokens or embedding pairs", "EncodeOptions", "encode", ranks=True),
    "export": Verb("writes a run for diffusers, or as safetensors", "ExportOptions", "export"),
    "consolidate": Verb("merges a sharded checkpoint, without torch", "Order", "consolidate", light=True),
    "import": Verb("makes a run of published weights", "ImportOptions", "import_weights"),
    "keep": Verb("starts a training again where it dies", "KeepOptions", "keep", speaks=False),
    "reconstruct": Verb("makes averages of any width", "ReconstructOptions", "reconstruct", ranks=True),
    "index": Verb("lists data once, and describes them", "IndexOptions", "index"),
    "pack": Verb("writes data as few large shards", "PackOptions", "pack", ranks=True),
    "convert": Verb("converts CIFAR, MNIST, LSUN, npz, latents once", "ConvertOptions", "convert"),
    "plan": Verb("says what a run will cost, before it starts", "PlanOptions", "plan"),
    "report": Verb("writes a run's report, or compares runs", "ReportOptions", "report", light=True),
    "watch": Verb("shows where all runs in a folder stand", "WatchOptions", "watch", light=True, speaks=False),
}

_HELP = """\
dstrain {version}: a trainer for visual generative models, on DeepSpeed

usage:  dstrain VERB ...                                one process
        deepspeed --module dstrain VERB ...             a process for each GPU

{verbs}

dstrain VERB --help shows the options of a verb."""


def main() -> None:
    """Runs `dstrain VERB ...`; without a verb prints the help. Raises SystemExit(2) if there is no such verb."""
    words = sys.argv[1:]
    # The deepspeed launcher puts its own option first.
    launched = [word for word in words[:1] if word.startswith(("--local_rank=", "--local-rank="))]
    verb, *rest = words[len(launched) :] or ["--help"]
    if verb in VERBS:
        sys.argv = [f"dstrain {verb}", *launched, *rest]
        start_verb(verb)
    elif verb in ("-h", "--help"):
        rows = "\n".join(f"  {name:13} {entry.summary}" for name, entry in VERBS.items())
        print(_HELP.format(version=__version__, verbs=rows))
    elif verb == "--version":
        print(__version__)
    else:
        import difflib

        close = difflib.get_close_matches(verb, VERBS, 1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        print(f"dstrain: error:\n  {verb}: there is no such verb{meant}; dstrain --help lists them", file=sys.stderr)
        raise SystemExit(2)


def start_verb(name: str) -> None:
    """Runs a verb with the options in sys.argv. If the verb fails, ends the process. Also ends the process after a
    success if the verb has begun a process group; see `run_main_with_exit_code`.
    """
    open_closed_standard_streams()
    if name == "train":
        install_stack_dump_handler()
        if not _BRIEF.intersection(sys.argv):
            with suppress(ValueError):  # run_main_with_exit_code reports what is wrong with a launcher's variables
                get_phases().print_lines(make_greeting_line())
    try:
        from dstrain.commands.exits import run_main_with_exit_code

        run_main_with_exit_code(lambda: _parse_options_and_run_verb(VERBS[name]), interactive=VERBS[name].speaks)
    except KeyboardInterrupt:  # while modules are imported
        raise SystemExit(130) from None
    finally:
        from dstrain.disk.owner import release_all_holds

        release_all_holds()


def _parse_options_and_run_verb(verb: Verb) -> None:
    """Runs a verb with the options in sys.argv. If the verb uses several ranks, and there are several, begins a process
    group for it.
    """
    from dstrain.commands.options.command import Command, parse_options
    from dstrain.recipe.trust import trust_system

    silence_bitsandbytes()
    options: Command = parse_options(find_options_class(verb), sys.argv[1:])
    for name in getattr(options, "trust_system", ()):
        trust_system(name)
    if not verb.light:
        get_phases().enter_phase("importing torch")
    module = importlib.import_module(f"dstrain.commands.{verb.module}")
    if not verb.ranks:
        module.run_verb(options)
        return
    from dstrain.distributed import group
    from dstrain.engine.start import start_process_group

    if group.read_rank_and_world().world > 1:
        start_process_group()
    module.run_verb(options)
    group.leave_process_group()


def silence_bitsandbytes() -> None:
    """Hides the warnings of bitsandbytes about 4-bit kernels, which dstrain never calls."""
    import logging

    # diffusers imports bitsandbytes, which looks for kernels of 4 bits.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def find_options_class(verb: Verb) -> type:
    """Returns the dataclass of a verb's options."""
    return getattr(importlib.import_module(f"dstrain.commands.options.{verb.module}"), verb.options)
