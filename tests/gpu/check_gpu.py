"""Run by test_gpu.py on the GPU that computes nothing, with a folder and stages as JSON: what the kit asks of steps,
saves and resumed runs; as JSON.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dstrain.checkpoint.fragments import Fragment
from dstrain.checkpoint.saver import HostCopies
from dstrain.engine import patches
from kit import correct, report

KNOWN_WAITS = {
    "a value that is read": lambda ones: ones.sum().item(),
    "an upload": lambda ones: torch.tensor(1.0).to(ones),
    "a stream": lambda ones: torch.cuda.current_stream().synchronize(),
}


def rows_of(folder: Path, work: Any, *words: Any) -> dict[str, Any]:
    """The rows of one case of the kit: what, value, whether it meets its target."""
    record = report.Record(folder / f"{work.__name__}-{words[0]}", False, folder)
    work(record, *words)
    return {row.what: (row.value, row.ok) for row in report.read(folder / f"{work.__name__}-{words[0]}")[0]}


def unseen_waits() -> list[str]:
    """Those of KNOWN_WAITS that torch's debug mode does not report."""
    ones, unseen = torch.ones(4, device="cuda"), []
    for name, wait in KNOWN_WAITS.items():
        with suppress(RuntimeError), correct._on_sync("error"):
            wait(ones)
            unseen.append(name)
    return unseen


def left_registered() -> tuple[int, int]:
    """What CUDA says when the memory of a snapshot is given back: of one in use (0), and of one that is gone (713)."""
    answers = []
    for gone in (False, True):
        snapshot = HostCopies()
        live = ("master", Fragment("w", (8,), 0, 8), torch.ones(8, device="cuda"))
        begin = snapshot.copy_entries_to_host({"part": [live]})["part"][0][2].data_ptr()
        if gone:
            del snapshot
        answers.append(int(torch.cuda.cudart().cudaHostUnregister(begin)))
    return tuple(answers)


def followed() -> bool:
    """Whether the current stream waits for ZeRO-3's reductions where DeepSpeed would have the host wait."""
    stream, waited, wait = patches._DeviceWaitStream(), [], torch.cuda.Stream.wait_stream
    torch.cuda.Stream.wait_stream = lambda waiting, other: waited.append((waiting, other))
    try:
        stream.synchronize()
    finally:
        torch.cuda.Stream.wait_stream = wait
    return waited == [(torch.cuda.current_stream(), stream)]


def main(folder: Path, stages: dict[str, list[int]]) -> None:
    """stages: those in which the steps of a system are looked at, by its name."""
    steps = {system: rows_of(folder, correct.no_reads, system, "bf16", own) for system, own in stages.items()}
    # IDDPM's timesteps have a state of their own; the tokenizer has two networks.
    saves = {system: rows_of(folder, correct.check, system, "bf16", (1,), False) for system in ("iddpm", "tokenizer")}
    (folder / "found.json").write_text(
        json.dumps(
            {
                "steps": steps,
                "saves": saves,
                "unseen": unseen_waits(),
                "registered": left_registered(),
                "followed": followed(),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
