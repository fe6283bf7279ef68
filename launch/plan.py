"""What a run will cost, before it is started: python launch/plan.py [--recipe R] --world N [key=value ...]"""

import signal
from pathlib import Path

from dstrain.commands import arguments
from dstrain.commands.exits import run_main
from dstrain.distributed.progress import phases

_HELP = """\
Says what a run will take: bytes on each rank, traffic, operations, time, energy; and what makes it fit.

usage:  python launch/plan.py [options] [key=value ...]

  --recipe FILE        what is learned: YAML (launch/recipes/dit-small.yaml); its data need not be here
  --ds_config FILE     how it is sharded: DeepSpeed JSON (ds_configs/zero2.json)
  --world N            GPUs, a rank each, up to 4096 (1)
  --gpus-per-node M    GPUs of a machine (8)
  --gpu CHIP           h200, h100, a100, 4090, or the bytes of its memory, such as 96GiB; then no times (h200)
  --network GBITS      of a GPU to other machines, Gbit/s (h200, h100: 400; a100: 200; 4090: 25)
  --efficiency SHARE   of the chip's rate that training reaches, by which steps are timed (0.45)
  --search             the table of stage x micro-batch x recomputation that fits, the fastest first; rows go to
                       stderr as they are counted
  --json               for programs: bytes, seconds, operations
  -h, --help           this text

No network of a file is needed: leave out encoders with model.first_stage=null, model.text_encoder=null and the like.
Ends with 0 where it fits, 1 where it does not (of --search: where nothing does), 2 where the input is wrong.
docs/guides/plan.md says what is counted, what is modelled, and has tables of large runs.

examples:
  python launch/plan.py --world 8 --gpu 4090
  python launch/plan.py --recipe launch/recipes/prior-1b.yaml model.text_encoder=null --world 64 --search
"""

_DOES_NOT_FIT = 1


def _options(argv: list[str] | None = None) -> dict:
    parser = arguments.Parser(_HELP)
    parser.add_argument("--recipe", type=Path)
    parser.add_argument("--ds_config", "--ds-config", "--deepspeed_config", type=Path)
    parser.add_argument("--world", type=arguments.positive, default=1)
    parser.add_argument("--gpus-per-node", "--gpus_per_node", type=arguments.positive, default=8)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--network", type=arguments.positive)
    parser.add_argument("--efficiency", type=float, default=0.45)
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*")
    return parser.values(parser.parse_intermixed_args(argv))


def main() -> None:
    options = _options()
    phases().at("importing torch")
    from dstrain.commands import cli

    phases().at("checking the recipe")
    run, ds_config = cli.load_case(
        options["recipe"], options["ds_config"], Path(__file__).resolve().parents[1], options["overrides"]
    )
    phases().at("importing what counts")
    from dstrain.commands import plan

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the process that counts ends with this one
    names = "world", "gpus_per_node", "gpu", "network", "efficiency"
    case = plan.case(run, ds_config, *(options[name] for name in names))
    with plan.first_stage_may_be_away(run):
        text, fits = (plan.ways if options["search"] else plan.plan)(case, options["json"])
    print(text)
    if not fits:
        raise SystemExit(_DOES_NOT_FIT)


if __name__ == "__main__":
    run_main(main)
