"""A part of a source that stands for the whole of it."""

from typing import Any

from dstrain.data.bad_files import BadSample


class Spread:
    """`num` samples of a source, evenly spaced over it, since a folder lists class by class; None takes all."""

    def __init__(self, whole: Any, num: int | None = None) -> None:
        self.whole, self.num = whole, min(num or len(whole), len(whole))
        self.unreadable: set[str] = set()                                # met by this rank

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            return self.whole[index * len(self.whole) // self.num]
        except BadSample as error:
            self.unreadable.add(error.path)
            raise
