"""Sources for tests of the batches; importable, so that workers can be given them."""

import os
import time

import torch

from dstrain.data.bad_files import BadSample


class Numbers:
    """Sample i is an image whose first pixel row spells i, with label i; those in `bad` cannot be
    read.
    """

    light = True

    def __init__(self, size: int, bad: tuple[int, ...] = ()) -> None:
        self.size, self.bad = size, frozenset(bad)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict:
        if index in self.bad:
            raise BadSample(self.name(index), "broken on purpose")
        image = torch.zeros(1, 2, 4, dtype=torch.uint8)
        image[0, 0] = torch.tensor([index >> shift & 255 for shift in (0, 8, 16, 24)])
        return {"image": image, "label": index}

    def name(self, index: int) -> str:
        return f"number {index}"


class Slow(Numbers):
    """Numbers whose workers leave a file PID, which says their number of threads, and take
    `seconds` for a sample.
    """

    def __init__(self, size: int, folder: str, seconds: float = 0.0) -> None:
        super().__init__(size)
        self.folder, self.seconds = folder, seconds

    def __getitem__(self, index: int) -> dict:
        path = os.path.join(self.folder, str(os.getpid()))
        if not os.path.exists(path):
            with open(path, "w") as file:
                file.write(str(torch.get_num_threads()))
        time.sleep(self.seconds)
        return super().__getitem__(index)
