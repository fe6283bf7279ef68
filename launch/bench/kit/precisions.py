"""What fp32, tf32 and bf16 give on this machine: how far from float64 they are, how fast, with how much memory.

Cases of the kit. Weights are drawn at random, so that none need be at hand.
"""

import tempfile
import typing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dstrain import rng, systems
from dstrain.distributed import group
from dstrain.encoders.autoencoder import Autoencoder, encode_posterior
from dstrain.encoders.precision import Precision, choose_weight_dtype, find_precision_problem, use_precision
from dstrain.engine.initial import build_networks
from dstrain.engine.start import start_process_group
from dstrain.planning.synthetic import Repeated
from dstrain.recipe import Run
from dstrain.runs.trained import build_networks_from_states
from dstrain.sampling.draw import draw_all_samples
from dstrain.sampling.requests import make_sampling_request_and_captions
from dstrain.systems.base import System
from kit import jobs, speed
from kit.report import Record
from kit.timing import measured

_NEAR = 1e-5  # fp32 is nearer; products or convolutions in TF32 give 2e-4 or more
_STEP = 5  # of training: every network has joined

States = dict[str, dict[str, Tensor]]  # of weights, by part


def gradients(record: Record, system: str, most: float) -> None:
    """The gradient of each network's loss, from that in float64 on the CPU. `most`: how far it may be in fp32."""
    start_process_group()
    run = jobs.small(system, ["compile=off"])
    states, batch = _weights(systems.build(run.system, run.model), run), next(_batches(run, 8))
    exact = _gradients(run, states, batch, torch.float64, torch.device("cpu"))
    for precision in _possible(record):
        with use_precision(precision):
            ours = _gradients(run, states, batch, choose_weight_dtype(precision), group.device())
        for part, gradient in exact.items():
            record.row(
                f"{part} in {precision}: gradient, from float64 on the CPU",
                distance(ours[part], gradient),
                "of its norm",
                at_most=most if precision == "fp32" else None,
            )


def draw(record: Record, num: int = 64, steps: int = 20) -> None:
    """DiT-XL/2 with guidance, as launch/generate.py draws."""
    start_process_group()
    run = jobs.published("DiT-XL/2", record.dry, ["samples.sampler=ddim"])
    num, steps = (2, 2) if record.dry else (num, steps)
    system, device = systems.build(run.system, run.model), group.device()
    states, batch = _weights(system, run), next(_batches(run, 2))
    request, _ = make_sampling_request_and_captions(run.samples, system, num, num_steps=steps)

    def output(nets: dict[str, nn.Module]) -> Tensor:
        example = system.encode(dict(batch))
        times = rng.uniform(batch["key"], "timestep") * 1000
        with torch.no_grad():
            return nets["denoiser"](example["x_start"], times.long(), batch["label"])

    exact = output(build_networks_from_states(system, states.items(), torch.float64, device))
    for precision in _possible(record):
        nets = build_networks_from_states(system, states.items(), choose_weight_dtype(precision), device)
        with use_precision(precision):
            record.row(
                f"{precision}: one prediction, from float64",
                distance(output(nets), exact),
                "of its norm",
                at_most=_NEAR if precision == "fp32" else None,
            )
            _time(
                record,
                f"{precision}, {steps} steps: ",
                "samples",
                num,
                partial(draw_all_samples, system, nets, request, num),
            )


def encode(record: Record, num: int = 64) -> None:
    """The first stage of DiT's recipes, as launch/encode.py and training online encode."""
    start_process_group()
    num, side = (2, 32) if record.dry else (num, 256)
    key = rng.keys(0, 0, torch.arange(num)).to(group.device())
    image = rng.uniform(key, "image", (3, side, side)) * 2 - 1
    with tempfile.TemporaryDirectory(prefix="dstrain-kit-") as folder:
        _save_first_stage(folder, record.dry)

        def stage() -> Autoencoder:
            return Autoencoder(folder).to(group.device())

        exactly, few = stage(), image[:8]  # float64 is slow
        exactly.vae.double()
        exact, _ = encode_posterior(exactly.vae, few)
        del exactly
        for precision in _possible(record):
            own = stage()
            own.set_encode_precision(precision)
            with use_precision(precision):
                mean, _ = encode_posterior(own.vae, few)
            record.row(
                f"{precision}: mean of the latents, from float64",
                distance(mean, exact),
                "of its norm",
                at_most=_NEAR if precision == "fp32" else None,
            )
            _time(record, f"{precision}: ", "images", num, partial(own.encode, image, key))


def online(record: Record, precision: Precision) -> None:
    """DiT-XL/2 as it trains where every step encodes its images. FLOPs are those of the denoiser alone."""
    if reason := find_precision_problem(precision, "model.first_stage.precision"):
        return record.left_out(reason)
    with tempfile.TemporaryDirectory(prefix="dstrain-kit-") as folder:
        _save_first_stage(folder, record.dry)
        speed.beside(
            record,
            "DiT-XL/2 of images",
            256,
            ("dstrain",),
            rounds=3,
            overrides=(f"model.first_stage.path={folder}", f"model.first_stage.precision={precision}"),
        )


def distance(ours: Tensor, exact: Tensor) -> float:
    """The norm of their difference, as a share of that of `exact`."""
    exact = exact.double()
    return ((ours.to(exact.device).double() - exact).norm() / exact.norm()).item()


def _save_first_stage(folder: str, dry: bool) -> None:
    """An AutoencoderKL with random weights and Stable Diffusion's sizes, or fewer channels."""
    from diffusers import AutoencoderKL

    channels = (32, 32, 32, 32) if dry else (128, 256, 512, 512)
    torch.manual_seed(0)
    AutoencoderKL(
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1 if dry else 2,
        scaling_factor=0.18215,
    ).save_pretrained(folder)


def _possible(record: Record) -> Iterator[Precision]:
    for precision in typing.get_args(Precision):
        if reason := find_precision_problem(precision, "--precision"):
            record.left_out(reason)
        else:
            yield precision


def _batches(run: Run, count: int) -> Iterator[dict[str, Tensor]]:
    return Repeated(systems.build(run.system, run.model), count, 1).read_step(_STEP)


def _weights(system: System, run: Run) -> States:
    """As training draws them; matrices that begin at zero, and would hide what comes before them, small at random."""
    states = {}
    for part, (network, values) in build_networks(system.networks, run.seed).items():
        network.load_state_dict(dict(values()), strict=False, assign=True)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(run.seed)
            for weight in network.parameters():
                if weight.ndim > 1 and not weight.any():
                    weight.normal_(std=0.02)
        states[part] = network.state_dict()
    return states


def _gradients(
    run: Run, states: States, batch: dict[str, Tensor], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Of each part's loss by its own weights, flat, on the CPU."""
    system = systems.build(run.system, run.model)
    nets = build_networks_from_states(system, states.items(), dtype, device)
    example = system.encode({name: values.to(device) for name, values in batch.items()})
    if dtype == torch.float64:  # torch 2.11 differentiates no mean of squares of two types
        for network in system.frozen():
            network.double()
        example = {
            name: values.double() if values.dtype == torch.float32 else values for name, values in example.items()
        }
    flat = {}
    for part in system.parts:
        weights = list(nets[part].parameters())
        grads = torch.autograd.grad(system.loss(part, nets, example)["loss"], weights, allow_unused=True)
        flat[part] = torch.cat(
            [
                torch.zeros_like(weight).flatten() if grad is None else grad.flatten()
                for weight, grad in zip(weights, grads)
            ]
        ).cpu()
    return flat


def _time(record: Record, where: str, what: str, num: int, work: Callable[[], Any], rounds: int = 3) -> None:
    """Rows of how many a second, and of the memory that it takes."""
    device = group.device()
    work()  # warms up
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    least = min(measured(work, device)[0] for _ in range(1 if record.dry else rounds))
    record.row(f"{where}{what}/s", num / least)
    if device.type == "cuda":
        record.row(f"{where}peak memory", torch.cuda.max_memory_allocated() / 1e9, "GB")
