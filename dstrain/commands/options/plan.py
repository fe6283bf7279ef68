"""Options of `dstrain plan`."""

from dataclasses import dataclass
from typing import ClassVar

from dstrain.commands.options.arguments import parse_positive_integer
from dstrain.commands.options.command import make_option_field
from dstrain.commands.options.train import RecipeOptions


@dataclass(frozen=True)
class PlanOptions(RecipeOptions):
    """Says what a run will take: bytes on each rank, traffic, operations, time, energy; and what makes it fit.

    The recipe's data need not be here. Autoencoders, tokenizers and text encoders are counted where they are, and left
    out where they are not. Ends with 0 where it fits, 1 where it does not (of --search: where nothing does), 2 where
    the input is wrong. docs/guides/plan.md says what is counted, what is modelled, and has tables of large runs.
    """

    usage: ClassVar[str] = "dstrain plan [options] [key=value ...]"
    examples: ClassVar[str] = """
        dstrain plan --world 8 --gpu 4090
        dstrain plan --recipe prior-1b model.text_encoder=null --world 64 --search
    """

    world: int = make_option_field(
        1, "GPUs, a rank each, up to 4096", parse_positive_integer, metavar="N", elsewhere=("--gpus", "--num-gpus")
    )
    gpus_per_node: int = make_option_field(8, "GPUs of a machine", parse_positive_integer, metavar="M")
    gpu: str = make_option_field(
        "h200",
        "h200, h100, a100, 4090, or the bytes of its memory, such as 96GiB; then no times",
        metavar="CHIP",
    )
    network: int | None = make_option_field(
        None,
        "of a GPU to other machines, Gbit/s (h200, h100: 400; a100: 200; 4090: 25)",
        parse_positive_integer,
        metavar="GBITS",
    )
    efficiency: float = make_option_field(
        0.45, "of the chip's rate that training reaches, by which steps are timed", float, metavar="SHARE"
    )
    search: bool = make_option_field(
        False,
        "the table of stage x micro-batch x recomputation that fits, the fastest first; rows go to stderr as they are "
        "counted",
    )
    json: bool = make_option_field(False, "for programs: bytes, seconds, operations")
