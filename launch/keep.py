"""Starts a training command again where it has died: python launch/keep.py -- deepspeed launch/train.py ..."""

import sys
from pathlib import Path

from dstrain.commands import arguments, cli
from dstrain.commands.keep import KeepOptions, command_of, keep
from dstrain.recipe import load

_HELP = """\
Starts a training command, and starts it again where a rank has died or hung, until the run is complete.

usage:  python launch/keep.py [options] -- deepspeed [...] launch/train.py [...]

  --max-restarts N      (20)
  --backoff S           seconds before a restart (5); doubled with each start that saved no step
  --restart-on-stop     also after exit code 75: stopped and saved
  -h, --help            this text

Behind -- stands the command as you would type it, with any launcher: deepspeed
[--hostfile FILE], torchrun, srun, python. It is not started again after wrong input (2),
divergence (3), a stop on purpose (75), a signal to keep.py, which is passed on, and four
starts in a row that have saved no step. Restarts are listed in RUN/restarts.log.
"""


def _options(argv: list[str]) -> tuple[KeepOptions, cli.JobOptions]:
    split = argv.index("--") if "--" in argv else len(argv)
    parser = arguments.Parser(_HELP)
    parser.add_argument("--max-restarts", "--max_restarts", type=arguments.count, default=20)
    parser.add_argument("--backoff", type=arguments.scale, default=5.0)
    parser.add_argument("--restart-on-stop", "--restart_on_stop", action="store_true")
    words = parser.words(argv[:split])
    command = argv[split + 1 :]
    job = cli.train_arguments(Path(__file__).resolve().parents[1], command_of(command))
    if job.dry_run or job.print_config:
        raise cli.ConfigError("--dry-run and --print-config end at once: give them without launch/keep.py")
    return KeepOptions(tuple(command), **words), job


def main() -> None:
    options, job = _options(sys.argv[1:])
    raise SystemExit(keep(options, load(job.recipe, job.overrides)))


if __name__ == "__main__":
    cli.run_main(main, speaks=False)  # the command that it starts does
