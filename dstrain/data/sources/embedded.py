"""Images with the embeddings that dstrain encode --image-encoder has made of them: what a decoder learns from.

Row n of the embeddings belongs to image n of the same data, listed with their captions. The folder of the embeddings
says how many images they were made of, with a hash of their names. Other images are refused.
"""

from torch import Tensor

from dstrain.data.builtin.emoji import EMOJI, Emoji
from dstrain.data.cached.embeddings import BUILTIN, Stored, open_all_pairs, read_data_fingerprint
from dstrain.data.source import Chance, Item, Source
from dstrain.data.sources.captioned import Captioned
from dstrain.data.sources.images import Images
from dstrain.data.views import Remade
from dstrain.recipe import ConfigError, reword_errors


class Embedded(Remade):
    """The samples of `whole`, whose items have image_embed float32 (D,), as stored, and no caption."""

    def __init__(self, whole: Emoji | Images, stored: Stored) -> None:
        super().__init__(whole)
        self.stored, self.prefetches = stored, whole.prefetches
        self.captioned, self.uncaptioned = False, None

    def read(self, index: int, random_number: Chance | None = None) -> Item:
        """Reads an image with its embedding, without its caption."""
        item = self.whole.read(index, random_number)
        item.pop("caption", None)
        return item | {
            "image_embed": self.stored.read_row_of_table("image_embed", self.whole.find_row_of_sample(index))
        }

    def prefetch(self, index: Tensor, mirrored: Tensor | None = None, random_number: Tensor | None = None) -> None:
        """Begins to read the images that a later `read_batch` needs."""
        self.whole.prefetch(index, mirrored, random_number)

    def describe_samples(self) -> str:
        """Returns the line about the images, with the width of their embeddings."""
        return f"{self.whole.describe_samples()}; embeddings of width {self.stored.tables['image_embed'].shape[0]}"

    def compute_fingerprint(self) -> str:
        return f"{self.whole.compute_fingerprint()} {self.stored.compute_fingerprint()}"

    def compute_full_fingerprint(self) -> str:
        return f"{self.whole.compute_full_fingerprint()} {self.stored.compute_fingerprint()}"


def add_embeddings(images: Source, path: str) -> Embedded:
    """Returns a source of the images together with their embeddings. path: the folder of the embeddings,
    data.embeddings.

    Raises ConfigError if the embeddings were made of other images, or if the folder does not say of which.
    """
    with reword_errors(options={"data.path=": "data.embeddings="}):
        stored = open_all_pairs(path)
    refusal = f"data.embeddings={path} is not of these images: "
    if isinstance(images, Emoji) != (path == BUILTIN):
        raise ConfigError(
            f"{refusal}{BUILTIN} goes with data.path={EMOJI}, and a folder of images with what "
            "dstrain encode --image-encoder has made of it"
        )
    if isinstance(images, Emoji):
        return Embedded(images, stored)
    whole = Captioned(images.layout, images.index, images.image_size, captions=True)
    source, names = read_data_fingerprint(path), whole.compute_names_fingerprint()
    if source is None:
        raise ConfigError(
            f"data.embeddings={path} does not say of which images it is: make it by dstrain encode "
            f"--image-encoder ... --data {images.path}"
        )
    if not source.startswith(f"{names} "):
        raise ConfigError(
            f"{refusal}{images.path} holds {len(whole):,} with captions, and the embeddings are of "
            f"{len(stored):,}, or of other names; make them by dstrain encode --image-encoder ... "
            f"--data {images.path}"
        )
    return Embedded(images, stored)
