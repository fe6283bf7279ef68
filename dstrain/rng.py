"""Randomness that belongs to a sample: a counter-based generator whose every draw is a function of (key, name).

A *key* is one int64 for each sample. In training it is made from (seed, step, position in the global batch), in
generation from the sample's own seed. All that is random about a sample -- noise, timestep, label drop, crop -- is
drawn from its key and a name, so that a sample meets the same noise on any rank, in any micro-batch, at any world
size, on CPU and GPU (there up to the rounding of log and cos), and no generator state needs to be saved.

The hash is two rounds of the splitmix64 finalizer (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
generators"), keyed before each: element j of stream `name` is mix(mix(key ^ hash(name)) + mix(j * golden)). It is plain
int64 arithmetic (which wraps in torch), runs on any device and needs no synchronization.
"""

import math
import zlib

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def keys(seed: int, step: int, positions: Tensor) -> Tensor:
    """Returns the int64 keys (B,) of the samples at `positions`, int64 (B,), in the global batch of `step`. All
    randomness of a sample is drawn from its key.
    """
    return _mix_bits(positions * _GOLDEN + _wrap_to_int64(_mix_integer(_mix_integer(seed) + step)))


def keys_of_seeds(seeds: Tensor) -> Tensor:
    """Returns the int64 keys (B,) of samples that are generated from `seeds`, int64 (B,). They differ from those of
    training.
    """
    return _mix_bits(_mix_bits(seeds) ^ _SECOND)  # not a key that `keys` makes


def seed_torch(seed: int, step: int, micro_batch: int) -> None:
    """Seeds torch's generators, from which dropout draws. `micro_batch` is the number of the micro-batch within the
    step, counted over all ranks. So a dropout mask depends only on seed, step, micro-batch and its size: it is the same
    after a resume.
    """
    torch.manual_seed(_mix_integer(_mix_integer(_mix_integer(seed) + step) ^ _mix_integer(micro_batch + 1)))


def uniform(key: Tensor, name: str, shape: tuple[int, ...] = ()) -> Tensor:
    """Draws uniform float32 in [0, 1) for each key: int64 (B,) -> (B, *shape). Different names give independent
    numbers.
    """
    return _convert_to_uniform(_draw_random_bits(key, name, math.prod(shape))).reshape(len(key), *shape)


def normal(key: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """Draws float32 from the standard normal distribution for each key: int64 (B,) -> (B, *shape). Different names give
    independent numbers.
    """
    numel = math.prod(shape)
    half = (numel + 1) // 2
    bits = _draw_random_bits(key, name, half)
    radius = (-2.0 * torch.log1p(-_convert_to_uniform(bits))).sqrt()  # 1 - u lies in (0, 1]
    angle = (bits & 0xFFFFFF).float() * (
        2 * math.pi / (1 << 24)
    )  # the low 24 bits; _convert_to_uniform takes the high ones
    out = torch.cat((radius * torch.cos(angle), radius * torch.sin(angle)), dim=1)
    return out[:, :numel].reshape(len(key), *shape)


def integers(key: Tensor, name: str, high: int, shape: tuple[int, ...] = ()) -> Tensor:
    """Draws uniform int64 in [0, high) for each key: int64 (B,) -> (B, *shape). Different names give independent
    numbers. `high` is at most 2^31.
    """
    bits = _draw_random_bits(key, name, math.prod(shape))
    return (((bits >> 32) & 0xFFFFFFFF) * high >> 32).reshape(len(key), *shape)


def _draw_random_bits(key: Tensor, name: str, count: int) -> Tensor:
    """Returns `count` numbers of 64 random bits for each key, hashes of key, name and index: int64 (B,) -> (B,
    count).
    """
    stream = _mix_bits(key ^ _wrap_to_int64(_mix_integer(zlib.crc32(name.encode()))))  # (B,)
    index = _mix_bits(torch.arange(1, count + 1, device=key.device) * _GOLDEN)  # (count,)
    return _mix_bits(stream[:, None] + index[None, :])  # (B, count)


def _convert_to_uniform(bits: Tensor) -> Tensor:
    """Converts the high 24 bits of each int64 to a float32 in [0, 1)."""
    return ((bits >> 40) & 0xFFFFFF).float() * (1.0 / (1 << 24))


def _mix_bits(z: Tensor) -> Tensor:
    """Applies the splitmix64 finalizer to each int64 of a tensor, and returns the result."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _FIRST
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _SECOND
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _mix_integer(z: int) -> int:
    """Applies the splitmix64 finalizer to one Python integer, modulo 2^64; the result lies in [0, 2^64)."""
    z &= _MASK
    z = (z ^ (z >> 30)) * (_FIRST & _MASK) & _MASK
    z = (z ^ (z >> 27)) * (_SECOND & _MASK) & _MASK
    return z ^ (z >> 31)


def _wrap_to_int64(z: int) -> int:
    """Returns the signed 64-bit integer that has the same bits as z, in [0, 2^64)."""
    return z - (1 << 64) if z >> 63 else z
