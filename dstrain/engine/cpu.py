"""What the CPU at hand can do."""

import os

# Values of ONEDNN_MAX_CPU_ISA within which products of bf16 are emulated, whatever the CPU has.
_EMULATING = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")


def multiplies_bf16() -> bool:
    """Whether this CPU has instructions for products of bf16, and oneDNN may use them.

    A table, and no measurement: ranks time the same thing differently, and must agree. The default recipe on one thread
    of an AMD EPYC, samples a second in bf16 and fp32: 345 and 166; with ATen's AVX2 kernels 242 and 150.
    """
    import torch

    if os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper() in _EMULATING:
        return False
    native = (getattr(torch.cpu, f"_is_{name}_supported", lambda: False) for name in ("avx512_bf16", "amx_tile"))
    return any(check() for check in native) or os.uname().machine in ("aarch64", "arm64")
