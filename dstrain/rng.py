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
    """Keys of the samples at `positions` (B,) int64 of the global batch of `step`: int64 (B,)."""
    return _mix(positions * _GOLDEN + _signed(_mix_int(_mix_int(seed) + step)))


def keys_of_seeds(seeds: Tensor) -> Tensor:
    """Keys of generated samples, one for each seed: int64 (B,) -> int64 (B,)."""
    return _mix(_mix(seeds) ^ _SECOND)  # not a key that `keys` makes


def seed_torch(seed: int, step: int, micro: int) -> None:
    """Seeds torch's generators, which dropout draws from. `micro` numbers the micro-batches of a step over all ranks.

    A dropout mask is thus a function of (seed, step, micro-batch): the same after a resume, and at another world size
    as long as the micro-batch keeps its size. Keyed draws for each sample would cost more than the layer itself.
    """
    torch.manual_seed(_mix_int(_mix_int(_mix_int(seed) + step) ^ _mix_int(micro + 1)))


def uniform(key: Tensor, name: str, shape: tuple[int, ...] = ()) -> Tensor:
    """Uniform float32 in [0, 1), a stream for each key: (B,) -> (B, *shape)."""
    return _unit(_hash(key, name, math.prod(shape))).reshape(len(key), *shape)


def normal(key: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """Standard normal float32, a stream for each key: (B,) -> (B, *shape). Box-Muller, both branches used."""
    numel = math.prod(shape)
    half = (numel + 1) // 2
    bits = _hash(key, name, half)
    radius = (-2.0 * torch.log1p(-_unit(bits))).sqrt()  # 1 - u lies in (0, 1]
    angle = (bits & 0xFFFFFF).float() * (2 * math.pi / (1 << 24))  # the low 24 bits; _unit takes the high ones
    out = torch.cat((radius * torch.cos(angle), radius * torch.sin(angle)), dim=1)
    return out[:, :numel].reshape(len(key), *shape)


def integers(key: Tensor, name: str, high: int, shape: tuple[int, ...] = ()) -> Tensor:
    """Uniform int64 in [0, high), a stream for each key: (B,) -> (B, *shape). `high` is at most 2^31."""
    bits = _hash(key, name, math.prod(shape))
    return (((bits >> 32) & 0xFFFFFFFF) * high >> 32).reshape(len(key), *shape)


def _hash(key: Tensor, name: str, count: int) -> Tensor:
    """64 random bits for each key and index: (B,) -> int64 (B, count)."""
    stream = _mix(key ^ _signed(_mix_int(zlib.crc32(name.encode()))))  # (B,)
    index = _mix(torch.arange(1, count + 1, device=key.device) * _GOLDEN)  # (count,)
    return _mix(stream[:, None] + index[None, :])  # (B, count)


def _unit(bits: Tensor) -> Tensor:
    """The high 24 bits as float32 in [0, 1)."""
    return ((bits >> 40) & 0xFFFFFF).float() * (1.0 / (1 << 24))


def _mix(z: Tensor) -> Tensor:
    """The splitmix64 finalizer on int64; `>>` is arithmetic in torch, so the sign bits are masked off."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _FIRST
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _SECOND
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _mix_int(z: int) -> int:
    """`_mix` for one Python integer, as an unsigned 64-bit integer."""
    z &= _MASK
    z = (z ^ (z >> 30)) * (_FIRST & _MASK) & _MASK
    z = (z ^ (z >> 27)) * (_SECOND & _MASK) & _MASK
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    return z - (1 << 64) if z >> 63 else z
