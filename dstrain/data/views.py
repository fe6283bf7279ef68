"""Views: sources that show the samples of another source, fewer of them or in another order."""

import numpy as np
from torch import Tensor

from dstrain.data.source import Bad, BadSample, Item, Source


class View(Source):
    """The samples of `whole`, in its order. A subclass overrides `find_index_in_whole` to choose or order
    them in another way.
    """

    def __init__(self, whole: Source) -> None:
        self.whole = whole
        self.classes, self.light, self.batched, self.noun = whole.classes, whole.light, whole.batched, whole.noun
        self.captioned, self.uncaptioned = whole.captioned, whole.uncaptioned
        self.where, self.check, self.left_out = whole.where, whole.check, whole.left_out

    def find_index_in_whole(self, index: int | Tensor) -> int | Tensor:
        """Returns the index in `whole` of the sample at `index` of this view. Returns an int for an int, int64 (b,) for
        int64 (b,).
        """
        return index

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, index: int) -> Item:
        return self.whole[self.find_index_in_whole(index)]

    def read_batch(
        self, index: Tensor, mirrored: Tensor | None = None, random_number: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Bad]:
        """Reads the samples at `index` of the view. See Source.read_batch."""
        if self.batched:
            return self.whole.read_batch(self.find_index_in_whole(index), mirrored, random_number)
        return super().read_batch(index, mirrored, random_number)

    def read_captions(self, index: int) -> tuple[str, ...]:
        return self.whole.read_captions(self.find_index_in_whole(index))

    def name_sample(self, index: int) -> str:
        return self.whole.name_sample(self.find_index_in_whole(index))

    def compute_fingerprint(self) -> str:
        return self.whole.compute_fingerprint()

    def describe_samples(self) -> str:
        """Returns the line of `whole` about its samples."""
        return self.whole.describe_samples()


class Remade(View):
    """All samples of `whole`, in its order, for subclasses that change the items. A subclass overrides `read(index,
    random_number)`, whose argument `random_number` is the same random number that `whole.read` takes.
    """

    def __init__(self, whole: Source) -> None:
        super().__init__(whole)
        self.chance_name, self.chance_count = whole.chance_name, whole.chance_count

    def __getitem__(self, index: int) -> Item:
        return self.read(index)

    def count_samples_by_class(self) -> np.ndarray | None:
        return self.whole.count_samples_by_class()

    def compute_full_fingerprint(self) -> str:
        return self.whole.compute_full_fingerprint()


class Spread(View):
    """`num` samples of `whole`, evenly spaced over its order, so that many classes are among them where a folder lists
    one class after the other. None or 0 takes all samples, as does a `num` above their number.

    `unreadable` collects the names of the samples that this rank could not read.
    """

    def __init__(self, whole: Source, num: int | None = None) -> None:
        super().__init__(whole)
        self.asked = num or len(whole)
        self.num = min(self.asked, len(whole))
        self.unreadable: set[str] = set()

    def __len__(self) -> int:
        return self.num

    def find_index_in_whole(self, index: int | Tensor) -> int | Tensor:
        """Returns the index in `whole` of the sample at `index` of this view, whose samples are evenly spaced over
        `whole`.
        """
        return index * len(self.whole) // self.num

    @property
    def end_index_by_shape(self) -> tuple[int, ...]:
        """Returns the index, in this view, after the last sample of each shape."""
        return tuple(-(-end * self.num // len(self.whole)) for end in self.whole.end_index_by_shape)

    def describe_samples(self) -> str:
        """Returns the line about `whole`, with the number of samples that are taken of it."""
        whole = self.whole.describe_samples()
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
    """All samples in the order in which a training with `seed` takes them."""

    def __init__(self, whole: Source, seed: int) -> None:
        super().__init__(whole)
        self.taken = whole.make_sample_order(1, seed)

    def find_index_in_whole(self, index: int | Tensor) -> int | Tensor:
        """Returns the index in `whole` of the sample that training takes at position `index`."""
        return self.taken.find_sample_index(index)


class Windows(View):
    """`num` windows of every clip, evenly spaced over all places where a window may begin.

    A clip that is no longer than a window gives the same window each time.
    """

    def __init__(self, whole: Source, num: int) -> None:
        super().__init__(whole)
        self.num = num

    def __len__(self) -> int:
        return len(self.whole) * self.num

    def find_index_in_whole(self, index: int | Tensor) -> int | Tensor:
        """Returns the index in `whole` of the clip from which the window at `index` is cut."""
        return index // self.num

    def __getitem__(self, index: int) -> Item:
        return self.whole.read(self.find_index_in_whole(index), (index % self.num + 0.5) / self.num)

    def compute_fingerprint(self) -> str:
        return f"{self.whole.compute_fingerprint()} x {self.num}"

    def describe_samples(self) -> str:
        """Returns the line about `whole`, with the number of windows."""
        return f"{len(self):,} windows of {self.whole.describe_samples()}"

    def compute_full_fingerprint(self) -> str:
        return f"{self.whole.compute_full_fingerprint()} x {self.num}"
