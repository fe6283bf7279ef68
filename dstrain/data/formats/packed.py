"""Shards of encoded files as launch/pack.py writes them, see ../packing.py: read by offset, whatever was packed."""

from collections.abc import Iterator

from dstrain.data.files.local import Files
from dstrain.data.formats.base import Layout, Place, Request, Sample, exists
from dstrain.data.formats.packing import INDEX, PACKING, read_index, samples_of, shard_name
from dstrain.recipe import ConfigError, NotRead

_MAX_BYTES = 1 << 28  # of a file that is read


class PackedFiles(Layout):
    """`file` is the number of the shard, `offset` and `size` are the sample's bytes in it."""

    kind = "shards of launch/pack.py"

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        return exists(files, INDEX) or (exists(files, PACKING) and exists(files, shard_name(0)))

    def parts(self) -> list[str]:
        """ConfigError: not packed to the end, a shard is missing or has another size, clips where
        images are asked for.
        """
        where = f"{self.request.key}={self.root}"
        try:
            body = read_index(self.files)
        except ConfigError as error:
            raise ConfigError(f"{where} {error}") from None
        if body["noun"] != self.request.noun:
            remedy = "write data.num_frames=17, say" if body["noun"] == "clips" else "leave data.num_frames out"
            raise ConfigError(f"{where} holds {body['noun']}, not {self.request.noun}: {remedy}")
        chosen = {"labels": self.request.labels not in ("auto", "none"), "class_list": self.request.class_list}
        if any(chosen.values()) and self.request.key == "data.path" and not self.request.mixed:
            raise ConfigError(
                f"{where} keeps the labels with which it was packed, and data."
                f"{next(name for name in chosen if chosen[name])} is of no use here: leave it out, or "
                "give it to launch/pack.py"
            )
        for shard in body["shards"]:
            try:
                size = self.files.stat(shard["name"]).size
            except NotRead:
                raise
            except OSError:
                size = None
            if size != shard["size"]:
                problem = "is missing" if size is None else f"has {size} bytes instead of {shard['size']}"
                raise ConfigError(f"{where}: {shard['name']} {problem}: repeat the launch/pack.py that wrote it")
        self.classes = () if self.request.labels == "none" else tuple(body["classes"])
        return [shard["name"] for shard in body["shards"]]

    def samples(self, part: str) -> Iterator[Sample]:
        number = int(part.removeprefix("files_").partition(".")[0])
        try:
            for packed in samples_of(self.files, part):
                yield Sample(
                    Place(packed.name, number, packed.offset, packed.size),
                    None if self.request.labels == "none" else packed.label,
                    packed.captions if self.request.captions else (),
                )
        except ConfigError as error:
            raise ConfigError(f"{self.request.key}={self.root}: {error}") from None

    def read(self, place: Place) -> bytes:
        if not 0 < place.size <= _MAX_BYTES:
            problem = "it could not be read when it was packed" if not place.size else f"has {place.size} bytes"
            raise ConfigError(f"{problem}; at most {_MAX_BYTES} are read")
        return self.files.span(shard_name(place.file), place.offset, place.size)

    def watched(self) -> list[str]:
        return [INDEX, *self.parts()]
