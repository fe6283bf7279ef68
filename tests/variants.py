"""Do the tests of numbers pass on other CPUs? Runs them with other instruction sets and numbers of threads.

    python -m tests.variants                      # NUMBERS under every variant, MORE under the first and the last
    python -m tests.variants tests/nn             # these files under every variant

ATEN_CPU_CAPABILITY chooses torch's own kernels, ONEDNN_MAX_CPU_ISA those of oneDNN: products of matrices, filters. A
CPU without an instruction set takes the best that it has. Exit code 1 where a variant failed.

Two threads meet at the end of every operation. They sleep there (OMP_WAIT_POLICY): where other programs use the cores,
too, OpenMP's usual busy waiting takes many times as long as the operation, and a variant seems to hang.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TWO_THREADS = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
VARIANTS = [
    {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "OMP_NUM_THREADS": "1"},
    {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"},
    {"ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"},
    {"ATEN_CPU_CAPABILITY": "avx512", **TWO_THREADS},
    {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"},
    {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", **TWO_THREADS},
]
NUMBERS = [
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/systems/*/test_golden.py")),
    "tests/nn",
    "tests/diffusion",
    "tests/systems/phenaki/test_tokenizer.py",
    "tests/test_rng.py",
]
MORE = ["tests/systems", "tests/encoders", "tests/commands/test_import_weights.py", "tests/engine/ema/test_shadow.py"]


def main(chosen: list[str]) -> int:
    failed = 0
    for variant in VARIANTS:
        more = MORE if variant in (VARIANTS[0], VARIANTS[-1]) else []
        words = [sys.executable, "-m", "pytest", "-n0", "-q", "-m", "not slow", *(chosen or NUMBERS + more)]
        done = subprocess.run(
            words, cwd=ROOT, env=os.environ | variant, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        failed += done.returncode != 0
        lines = done.stdout.splitlines()
        print(
            *(f"{name}={value}" for name, value in variant.items()),
            "failed" if done.returncode else "passed",
            *(f"\n  {line}" for line in lines if line.startswith(("FAILED", "ERROR"))),
            flush=True,
        )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
