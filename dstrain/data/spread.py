"""A part of a source that stands for the whole of it."""

from typing import Any

from torch import Tensor

from dstrain.data.bad_files import BadSample


class Spread:
    """`num` samples of a source, evenly spaced over it, since a folder lists class by class; None takes all."""

    def __init__(self, whole: Any, num: int | None = None) -> None:
        self.whole, self.num = whole, min(num or len(whole), len(whole))
        self.unreadable: set[str] = set()                                # met by this rank
        if hasattr(whole, "take"):
            self.take = self._take                                       # a whole batch at once, see batches.py

    def _take(self, index: Tensor, mirrored: Tensor | None = None) -> dict[str, Tensor]:
        return self.whole.take(index * len(self.whole) // self.num, mirrored)

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            return self.whole[index * len(self.whole) // self.num]
        except BadSample as error:
            self.unreadable.add(error.path)
            raise


class Windows:
    """`num` windows of every clip of a source that has `read` (see videos.py), evenly spaced over where one may begin.

    A clip that is no longer than its window gives the same one each time.
    """

    light = False

    def __init__(self, whole: Any, num: int) -> None:
        self.whole, self.num = whole, num
        self.classes = whole.classes

    def __len__(self) -> int:
        return len(self.whole) * self.num

    def __getitem__(self, index: int) -> dict[str, Any]:
        clip, window = divmod(index, self.num)
        return self.whole.read(clip, (window + 0.5) / self.num)

    def name(self, index: int) -> str:
        return self.whole.name(index // self.num)

    def fingerprint(self) -> str:
        return f"{self.whole.fingerprint()} x {self.num}"

    def contents(self) -> str:
        return f"{self.whole.contents()} x {self.num}"
