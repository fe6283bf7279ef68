"""Makes and describes the index of data: python launch/index.py DATA [--index FOLDER] [data.key=value]"""

import json
import os

from dstrain.commands import arguments
from dstrain.commands.exits import run_main
from dstrain.recipe import ConfigError

_HELP = """\
Lists data once and for all, and says what they hold: samples, classes, captions, sizes, broken files. Every command on
the same data then begins at once. See docs/guides/data.md.

usage:  python launch/index.py DATA [options] [data.key=value ...]

  DATA                  what a recipe has as data.path
  --index FOLDER        where the index is kept (then write data.index=FOLDER in recipes, too); without it, it is kept
                        in the user's cache, where every command finds it
  --captions            lists the captions of images, too
  --check               reads every sample whole, and not the headers of images alone
  --json                prints JSON
  data.key=value        as in a recipe: data.num_frames=17 for clips, data.captions=FILE; with data.buckets=[5,9,17],
                        the frames of clips are counted

An interrupted listing goes on where it was.

examples:
  python launch/index.py /data/imagenet/train
  python launch/index.py /data/clips data.num_frames=17 --check --json
"""


def _options(argv: list[str] | None = None):
    parser = arguments.Parser(_HELP)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--index")
    for flag in ("--captions", "--check", "--json"):
        parser.add_argument(flag, action="store_true")
    words = parser.values(parser.parse_intermixed_args(argv))
    data, *overrides = words["words"] or [None]
    if data is None or ("=" in data and data.startswith("data.")):
        raise ConfigError("name the data: python launch/index.py DATA; --help shows how")
    from dstrain.commands.index import IndexOptions
    from dstrain.recipe import load

    section = load(None, overrides).data.model_copy(update={"path": os.path.expanduser(data)})
    if words["index"] is not None:
        section = section.model_copy(update={"index": os.path.expanduser(words["index"])})
    return IndexOptions(section, words["captions"], words["check"]), words["json"]


def main() -> None:
    options, as_json = _options()
    from dstrain.commands.index import index_data, report

    result = index_data(options)
    print(json.dumps(result, indent=1) if as_json else report(result))


if __name__ == "__main__":
    run_main(main)
