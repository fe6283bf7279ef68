"""Views: sources that show the samples of another source, fewer of them or in another order."""

import numpy as np
from torch import Tensor

from dstrain.data.source import Bad, BadSample, Item, Source


class View(Source):
    """The samples of `whole`, in its order; subclasses say by `place` which sample stands at an index."""

    def __init__(self, whole: Source) -> None:
        self.whole = whole
        self.classes, self.light, self.batched, self.noun = whole.classes, whole.light, whole.batched, whole.noun
        self.captioned, self.uncaptioned = whole.captioned, whole.uncaptioned
        self.where, self.check = whole.where, whole.check

    def place(self, index: int | Tensor) -> int | Tensor:
        """Returns the index in `whole` of an int, or of each in int64 (b,)."""
        return index

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, index: int) -> Item:
        return self.whole[self.place(index)]

    def read_batch(
        self, index: Tensor, mirrored: Tensor | None = None, chance: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Bad]:
        if self.batched:
            return self.whole.read_batch(self.place(index), mirrored, chance)
        return super().read_batch(index, mirrored, chance)

    def captions(self, index: int) -> tuple[str, ...]:
        return self.whole.captions(self.place(index))

    def name(self, index: int) -> str:
        return self.whole.name(self.place(index))

    def fingerprint(self) -> str:
        return self.whole.fingerprint()

    def describe(self) -> str:
        return self.whole.describe()


class Remade(View):
    """All samples of `whole`, each read in another way, with the same random number."""

    def __init__(self, whole: Source) -> None:
        super().__init__(whole)
        self.chance_name, self.chance_count = whole.chance_name, whole.chance_count

    def __getitem__(self, index: int) -> Item:
        return self.read(index)

    def class_counts(self) -> np.ndarray | None:
        return self.whole.class_counts()

    def contents(self) -> str:
        return self.whole.contents()


class Spread(View):
    """`num` samples, evenly spaced, since a folder lists class by class; None takes all.

    `unreadable` are the names of those that this rank could not read.
    """

    def __init__(self, whole: Source, num: int | None = None) -> None:
        super().__init__(whole)
        self.asked = num or len(whole)
        self.num = min(self.asked, len(whole))
        self.unreadable: set[str] = set()

    def __len__(self) -> int:
        return self.num

    def place(self, index: int | Tensor) -> int | Tensor:
        return index * len(self.whole) // self.num

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(-(-end * self.num // len(self.whole)) for end in self.whole.ends)

    def describe(self) -> str:
        whole = self.whole.describe()
        if self.asked > len(self.whole):
            return f"{whole}; {self.asked:,} are asked for, and there are no more"
        return whole if len(self) == len(self.whole) else f"{len(self):,} of {whole}"

    def __getitem__(self, index: int) -> Item:
        try:
            return super().__getitem__(index)
        except BadSample as error:
            self.unreadable.add(error.path)
            raise


class Shuffled(View):
    """All samples in the order in which training takes them."""

    def __init__(self, whole: Source, seed: int) -> None:
        super().__init__(whole)
        self.taken = whole.order(1, seed)

    def place(self, index: int | Tensor) -> int | Tensor:
        return self.taken.index_at(index)


class Windows(View):
    """`num` windows of every clip, evenly spaced over the places where a window may begin.

    A clip that is no longer than a window gives the same one each time.
    """

    def __init__(self, whole: Source, num: int) -> None:
        super().__init__(whole)
        self.num = num

    def __len__(self) -> int:
        return len(self.whole) * self.num

    def place(self, index: int | Tensor) -> int | Tensor:
        return index // self.num

    def __getitem__(self, index: int) -> Item:
        return self.whole.read(self.place(index), (index % self.num + 0.5) / self.num)

    def fingerprint(self) -> str:
        return f"{self.whole.fingerprint()} x {self.num}"

    def describe(self) -> str:
        return f"{len(self):,} windows of {self.whole.describe()}"

    def contents(self) -> str:
        return f"{self.whole.contents()} x {self.num}"
