"""Lists GPUs and what connects them, by their makers' data sheets.

Rates are dense ones (no sparsity), bandwidths go one way. The networks between machines are those of the makers' own
machines (DGX H100, H200, A100: one port a GPU); for others give --network.
"""

import re
from dataclasses import dataclass

import torch

from dstrain.recipe import ConfigError

GIB = 2**30
_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Dense peaks in TFLOP/s by the name that torch gives a GPU: 16-bit with fp32 sums, TF32, fp32. A part of a GPU (MIG)
# and laptops have other names, and are measured as all that is not listed.
_PEAKS = (
    (r"B200", 2250, 1125, 75),
    (r"H200|H100 \d+GB HBM\w+|H100|H800|GH200 .*", 989.4, 494.7, 66.9),
    (r"H[12]00 NVL", 835.5, 417.7, 60.3),
    (r"H100 PCIe", 756, 378, 51.2),
    (r"H20", 148, 74, 44),
    (r"A[18]00-\w+-\d+GB|A[18]00 \d+GB PCIe", 312, 156, 19.5),
    (r"A40", 149.7, 74.8, 37.4),
    (r"RTX A6000", 154.8, 77.4, 38.7),
    (r"L40S", 362, 183, 91.6),
    (r"L4", 121, 60, 30.3),
    (r"RTX 6000 Ada Generation", 364.2, 182.1, 91.1),
    (r"GeForce RTX 5090", 209.5, 104.8, 104.8),
    (r"GeForce RTX 4090", 165.2, 82.6, 82.6),
    (r"GeForce RTX 3090", 71.2, 35.6, 35.6),
)


@dataclass(frozen=True)
class Chip:
    """Describes a GPU in the machine it is sold in.

    memory      bytes; the data sheet's GB are GiB
    name        torch's, by which its rates are listed; None: only the memory is known, and no times follow
    link        bytes a second to the other GPUs of its machine
    network     bytes a second of its share in the network between machines
    host_link   bytes a second to the host's memory
    watts       of the board at most
    host        bytes of the host's memory for each GPU
    """

    memory: int
    name: str | None = None
    link: float = 0.0
    network: float = 0.0
    host_link: float = 0.0
    watts: float = 0.0
    host: int | None = None

    def get_peak_flops(self, precision: str) -> float:
        """Returns the peak operations a second of this GPU in a precision: fp32 (without TF32), bf16 or fp16."""
        return find_peak_flops(self.name, _PRECISIONS[precision])


CHIPS = {
    "h200": Chip(141 * GIB, "NVIDIA H200", 450e9, 50e9, 64e9, 700, 250 * GIB),
    "h100": Chip(80 * GIB, "NVIDIA H100 80GB HBM3", 450e9, 50e9, 64e9, 700, 250 * GIB),
    "a100": Chip(80 * GIB, "NVIDIA A100-SXM4-80GB", 300e9, 25e9, 32e9, 400, 250 * GIB),
    "4090": Chip(24 * GIB, "NVIDIA GeForce RTX 4090", 32e9, 3.125e9, 32e9, 450),  # PCIe; 25 Gbit/s
}


def find_peak_flops(gpu_name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """Returns the peak operations a second that are listed for a GPU. name: what torch calls it. Returns None if it is
    not listed.
    """
    for pattern, of_16_bits, of_tf32, of_fp32 in _PEAKS:
        if re.fullmatch(pattern, gpu_name.removeprefix("NVIDIA ")):
            if dtype != torch.float32:
                return of_16_bits * 1e12
            return (of_tf32 if tf32 else of_fp32) * 1e12
    return None


def parse_chip(text: str) -> Chip:
    """Returns the Chip that the option --gpu means: a name in CHIPS, or the bytes of a GPU's memory as 24GiB, 80GB or
    8e10. Raises ConfigError if it is neither, or no plausible size.
    """
    if text.lower() in CHIPS:
        return CHIPS[text.lower()]
    size = re.fullmatch(r"(?i)([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*(|[kmgt]i?)b?", text.strip())
    problem = f"--gpu {text}: write one of {', '.join(CHIPS)}, or the bytes of its memory, such as 96GiB"
    if size is None:
        raise ConfigError(problem)
    unit = size[2].lower()
    memory = float(size[1]) * (1024 if unit.endswith("i") else 1000) ** (" kmgt".index(unit[:1] or " "))
    if not 2**28 <= memory <= 2**50:
        raise ConfigError(f"{problem}; {memory:.3g} bytes are no GPU's")
    return Chip(int(memory))
