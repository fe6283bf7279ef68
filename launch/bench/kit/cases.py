"""What the kit runs: its parts, each below nine minutes on one H200, and the cases of each.

1  every system: its gradients in each precision, training in bf16 at stages 0 to 3, steps without synchronization
2  the same in fp16, fp32 and compiled
3  DiT-XL/2 in latents, B = 256, beside the best plain loop, stock DeepSpeed, accelerate and fast-DiT
4  the same with B = 32
5  DiT-XL/2 with each switch of the recipe
6  DiT-XL/2 with each switch of the DeepSpeed JSON
7  the other published systems beside the plain loop
8  optimizer, averages and checkpoints against their bytes; the README's first command
9  drawing, encoding, and training that encodes, in each precision
"""

import types
import typing
from collections.abc import Iterator
from typing import Any

from dstrain.encoders.precision import Precision
from dstrain.recipe import Section
from dstrain.systems import find_config_class
from kit import correct, floors, jobs, precisions, speed
from kit.kit import Case

TITLES = {
    1: "every system: gradients; bf16, stages 0 to 3",
    2: "every system, fp16, fp32, compiled",
    3: "DiT-XL/2 beside rivals, B = 256",
    4: "DiT-XL/2 beside rivals, B = 32",
    5: "DiT-XL/2, the recipe's switches",
    6: "DiT-XL/2, DeepSpeed's switches",
    7: "other published systems",
    8: "floors, and the first command",
    9: "drawing and encoding in each precision",
}

# The targets of issue 14, of one H200, by batch and row.
_TARGETS: dict[int, dict[str, dict[str, float]]] = {
    256: {
        "dstrain: samples/s": {"at_least": 780},
        "dstrain / plain": {"at_least": 0.98},
        "dstrain / fast-DiT": {"at_least": 1.7},
        "dstrain: idle share": {"at_most": 0.015},
        "dstrain: share of matmul": {"at_least": 0.7},
        "dstrain / stock": {"at_least": 1.0},
    },
    32: {
        "dstrain: samples/s": {"at_least": 560},
        "dstrain / plain": {"at_least": 0.98},
        "dstrain / stock": {"at_least": 1.0},
        "dstrain: idle share": {"at_most": 0.015},
    },
}

# How far a gradient in fp32 may be from float64, as a share of its norm. The limit is higher where an adversary is
# punished for its own gradient (tokenizer), and where rounding may change the side of a ReLU, which moves the gradient
# at once (dvae). The KL VAE's autoencoder was 2.5e-4 off on an H200 with cuDNN's convolutions in fp32, and 6e-7 with
# cuDNN switched off; convolutions in TF32 would be 1.8e-2 off.
_GRADIENTS = dict.fromkeys(jobs.SYSTEMS, 1e-5) | {"tokenizer": 1e-4, "dvae": 1e-3, "vae": 1e-3}

# Switches of the recipe whose every choice gets a row where the recipe has them; and values of those that are numbers.
_CHOICES = ("compile", "optimizer.name")
_VALUES = (
    "model.recompute=attention",
    "model.recompute=4",
    "model.recompute=2",
    "model.recompute=all",
    "optimizer.clip=1.0",
    "ema.decays=[]",
    "ema.decays=[0.9999,0.999]",
)
_ZERO = {"overlap_comm": {"overlap_comm": False}, "reduce_bucket_size": {"reduce_bucket_size": 500_000_000}}


def cases() -> list[Case]:
    """All, in the order in which a part runs them: what matters most comes first."""
    return [*_correct(), *_rivals(), *_ablation(), *_others(), *_floors(), *_precisions()]


def _correct() -> Iterator[Case]:
    def case(part: int, name: str, system: str, work: Any = correct.check, limit: float = 240, **options: Any) -> Case:
        return Case(f"{system} {name}", part, work, {"system": system, **options}, limit, alone=False)

    for system, most in _GRADIENTS.items():
        yield case(1, "gradients", system, precisions.gradients, most=most)
    # Four stages in one process took 240 to 300 s on an H200 that six cases shared.
    for stage in (0, 1, 2, 3):
        for system in jobs.SYSTEMS:
            yield case(1, f"bf16 stage {stage}", system, precision="bf16", stages=(stage,), compiled=False, limit=400)
    for system in jobs.STEPPED:
        yield case(1, "waits", system, correct.no_reads, precision="bf16", stages=(1, 2, 3))
    for system in jobs.SYSTEMS:
        yield case(2, "compiled", system, precision="bf16", stages=(1,), compiled=True, limit=500)  # moves to 3
    for system in jobs.SYSTEMS:
        yield case(2, "fp16", system, precision="fp16", stages=(1, 2, 3), compiled=False)
        yield case(2, "fp32", system, precision="fp32", stages=(0, 2), compiled=False)


def _rivals() -> Iterator[Case]:
    def case(part: int, batch: int, *sides: str, limit: float = 150, **options: Any) -> Case:
        return Case(
            f"DiT-XL/2 B={batch} {' '.join(sides)}",
            part,
            speed.beside,
            {"recipe": "DiT-XL/2", "batch": batch, "sides": sides, "targets": _TARGETS[batch], **options},
            limit,
        )

    yield case(3, 256, "dstrain", "plain", limit=240)
    for side in ("fast-DiT", "stock", "accelerate"):  # two fit into the memory; five do not
        yield case(3, 256, "dstrain", side, rounds=2, limit=200)  # DeepSpeed may compile its own AdamW first
    yield case(4, 32, "dstrain", "plain", "stock", "accelerate", "fast-DiT", limit=500, steps=10)


def _ablation() -> Iterator[Case]:
    def case(part: int, name: str, **options: Any) -> Case:
        return Case(
            f"DiT-XL/2 with {name}",
            part,
            speed.beside,
            {"recipe": "DiT-XL/2", "batch": 256, "sides": ("dstrain",), "rounds": 3, **options},
            120,
        )

    yield case(5, "the recipe as shipped")
    for override in [override for key in _CHOICES for override in choices(key)] + list(_VALUES):
        yield case(5, override, overrides=(override,))
    yield case(5, "4 micro-batches", accumulation=4)
    yield case(6, "zero1.json as shipped")
    for stage in (0, 2, 3):
        yield case(6, f"stage {stage}", stage=stage)
    for name, zero in _ZERO.items():  # at stages 1 and 2 one rank has no buckets
        yield case(6, f"stage 3, {name}={next(iter(zero.values()))}", stage=3, zero=zero)
    yield case(6, "fp16", precision="fp16")


def choices(key: str) -> list[str]:
    """KEY=VALUE for every choice of a recipe's field but what it ships as; none where the recipe has no such field."""
    section: Any = jobs.published("DiT-XL/2", dry=False)
    *within, name = key.split(".")
    for inner in within:
        section = find_config_class(section.system)(**section.model) if inner == "model" else getattr(section, inner)
    if not isinstance(section, Section) or name not in type(section).model_fields:
        return []
    shipped = getattr(section, name)
    return [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for value in _values(type(section).model_fields[name].annotation)
        if value != shipped
    ]


def _values(annotation: Any) -> list[Any]:
    """The values of a Literal, a bool, or a union with them; numbers and texts have no list of values."""
    if annotation is bool:
        return [False, True]
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return list(typing.get_args(annotation))
    unions = (typing.Union, types.UnionType, typing.Annotated)
    return [value for inner in typing.get_args(annotation) for value in _values(inner)] if origin in unions else []


def _others() -> Iterator[Case]:
    for name, batch in (("IDDPM-64", 128), ("VAE f8", 24), ("C-ViViT", 32), ("MaskGit", 64), ("prior", 1024)):
        yield Case(
            name,
            7,
            speed.beside,
            {
                "recipe": name,
                "batch": batch,
                "sides": ("dstrain", "plain"),
                "targets": {"dstrain / plain": {"at_least": 0.98}, "dstrain: idle share": {"at_most": 0.015}},
            },
            150,
        )
    # By its sources, torch's GroupNorm gives NCHW on a GPU: whether NHWC gains is to be measured.
    yield Case(
        "IDDPM-64 in NCHW",
        7,
        speed.beside,
        {"recipe": "IDDPM-64", "batch": 128, "sides": ("dstrain",), "overrides": ("channels_last=false",)},
        100,
    )


def _floors() -> Iterator[Case]:
    for stage in (1, 3):
        yield Case(f"update at stage {stage}", 8, floors.update, {"stage": stage}, 120)
    yield Case("stall", 8, floors.stall, {"stage": 1}, 300)
    yield Case("first command", 8, floors.first_command, {}, 300)


def _precisions() -> Iterator[Case]:
    yield Case("drawing", 9, precisions.draw, {}, 150)
    yield Case("encoding", 9, precisions.encode, {}, 150)
    for precision in _values(Precision):
        yield Case(f"encoding in every step in {precision}", 9, precisions.online, {"precision": precision}, 200)
