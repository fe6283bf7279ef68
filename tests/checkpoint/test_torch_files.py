"""Files of torch.save and what is written from them: shells, bounds, durability; more:
tests/commands/test_consolidate.py.
"""

import io
import operator
import struct
import zipfile
from collections import OrderedDict, defaultdict, deque

import pytest
import torch
from safetensors.torch import load_file

from dstrain.checkpoint import safetensors_io, torch_files
from dstrain.checkpoint.safetensors_io import Entry, write_huggingface_model
from dstrain.recipe import ConfigError


class Slotted:
    """Has slots and attributes; both stand in its pickle."""

    __slots__ = ("__dict__", "start")


class OnlySlots:
    __slots__ = ("start",)


class Plain:
    pass


def test_what_a_shell_holds(tmp_path):
    """Oracle: the attributes of the objects themselves, of classes with slots, without, and with both."""
    objects = {"both": Slotted(), "slots": OnlySlots(), "plain": Plain(), "empty": Plain()}
    for name in ("both", "slots", "plain"):
        objects[name].start = torch.Size([3])
    objects["both"].numel = objects["plain"].numel = 4
    torch.save(objects, tmp_path / "a.pt")
    content = torch_files.load_torch_file(tmp_path / "a.pt")
    shells = content.value
    assert all(isinstance(shell, torch_files.Shell) for shell in shells.values())
    assert [shell.start for shell in (shells["both"], shells["slots"], shells["plain"])] == [(3,)] * 3
    assert shells["both"].numel == shells["plain"].numel == 4
    assert not hasattr(shells["slots"], "numel") and not hasattr(shells["empty"], "start")
    assert {name.rpartition(".")[2] for name in content.asked} >= {"Slotted", "OnlySlots", "Plain"}


class Made:
    """Unpickles as what an object gives that is called."""

    def __reduce__(self):
        return operator.attrgetter("real"), (3,)


def test_what_a_shell_gives(tmp_path):
    """Oracle: by hand: a shell that is called gives another one, and takes items; nothing of it is run."""
    torch.save({"made": Made(), "items": defaultdict(list, a=1), "list": deque([1, 2])}, tmp_path / "a.pt")
    content = torch_files.load_torch_file(tmp_path / "a.pt")
    assert all(isinstance(value, torch_files.Shell) for value in content.value.values())
    assert content.asked >= {"operator.attrgetter", "collections.defaultdict", "collections.deque"}


@pytest.mark.parametrize("limit, fits", [(0, True), (-1, False)])
def test_a_pickle_of_any_size(tmp_path, monkeypatch, limit, fits):
    """Oracle: the length of the archive's pickle."""
    torch.save({"w": torch.arange(5)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        size = next(info.file_size for info in archive.infolist() if info.filename.endswith("data.pkl"))
    monkeypatch.setattr(torch_files, "_MAX_PICKLE_BYTES", size + limit)
    if fits:
        assert torch_files.load_torch_file(tmp_path / "a.pt").value["w"].shape == (5,)
    else:
        with pytest.raises(ConfigError, match=f"a pickle of {size} bytes is no checkpoint's"):
            torch_files.load_torch_file(tmp_path / "a.pt")


class Tagged(torch.Tensor):
    """A class of tensors that is not torch's own."""


def test_tensors_with_attributes(tmp_path):
    """Oracle: torch.save's own form of a tensor that carries an attribute: the tensor; of another class: a shell."""
    plain, other = torch.arange(3.0), torch.arange(3.0).as_subclass(Tagged)
    plain.origin = other.origin = "here"
    torch.save({"plain": plain, "other": other}, tmp_path / "a.pt")
    content = torch_files.load_torch_file(tmp_path / "a.pt").value
    assert isinstance(content["plain"], safetensors_io.Stored) and content["plain"].shape == (3,)
    assert isinstance(content["other"], torch_files.Shell)


@pytest.mark.parametrize("order, refused", [(b"little", False), (b"big", True), (None, False)])
def test_the_order_of_bytes(tmp_path, order, refused):
    """Oracle: torch's own member "byteorder", which older versions did not write; its values are little-endian then."""
    torch.save({"w": torch.arange(5)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive, zipfile.ZipFile(tmp_path / "b.pt", "w") as copy:
        for name in archive.namelist():
            content = order if name.endswith("/byteorder") else archive.read(name)
            if content is not None:
                copy.writestr(name, content)
    if refused:
        with pytest.raises(ConfigError, match="its numbers are big-endian"):
            torch_files.load_torch_file(tmp_path / "b.pt")
    else:
        assert torch_files.load_torch_file(tmp_path / "b.pt").value["w"].shape == (5,)


def test_a_name_of_the_longest(tmp_path):
    """Oracle: the elements: names within the archive begin with the file's, and these have more than 255 bytes."""
    path = tmp_path / f"{'a' * 252}.pt"
    torch.save({"w": torch.arange(5)}, path)
    entry = Entry("w", torch_files.load_torch_file(path).value["w"], "I64")
    write_huggingface_model(tmp_path / "out", [entry], 10**9, {}, lambda count: None)
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("more, whole", [(0, True), (1 << 20, False)])
def test_a_storage_beyond_the_end(tmp_path, more, whole):
    """Oracle: the length of the file: an entry of the archive's list that reaches beyond it is refused."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.arange(5)}, path)
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        name = next(info.filename for info in archive.infolist() if info.filename.endswith("data/0")).encode()
    entry = data.rindex(b"PK\1\2", 0, data.rindex(name))  # of the list at the end, where sizes stand at 20 and 24
    for place in (20, 24):
        struct.pack_into("<I", data, entry + place, 40 + more)
    path.write_bytes(data)
    if whole:
        assert torch_files.load_torch_file(path).value["w"].shape == (5,)
    else:
        with pytest.raises(ConfigError, match="a.pt: it is truncated"):
            torch_files.load_torch_file(path)


class Forged:
    """Unpickles as the elements 20, 22, 24 and 26 of a storage."""

    def __init__(self, numel: int):
        self.storage = torch.arange(float(numel)).storage()

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, (self.storage, 20, (4,), (2,), False, OrderedDict())


@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_elements_beyond_a_storage(tmp_path):
    """Oracle: the length of the storage: element 26 is the last one of 27, and beyond 26."""
    for numel in (27, 26):
        torch.save({"w": Forged(numel)}, tmp_path / f"{numel}.pt")
    torch_files.load_torch_file(tmp_path / "27.pt")
    with pytest.raises(ConfigError, match="reaches beyond its storage"):
        torch_files.load_torch_file(tmp_path / "26.pt")


@pytest.mark.parametrize(
    "module, asked", [("torch", set()), ("torch.storage", set()), ("other", {"other.FloatStorage"})]
)
def test_storages_are_torchs(module, asked):
    """Oracle: by hand: of a module that is not torch's, a class of the same name is only asked for."""
    unpickler = torch_files._Unpickler(io.BytesIO(b""), None, None)
    unpickler.find_class(module, "FloatStorage")
    assert unpickler.asked == asked


def test_a_pickle_of_altered_bytes(tmp_path):
    """Oracle: the checksum of the archive's list, which one byte of a text breaks."""
    path = tmp_path / "a.pt"
    torch.save({"name": "unaltered"}, path)
    path.write_bytes(path.read_bytes().replace(b"unaltered", b"unalterad"))
    with pytest.raises(ConfigError, match="data.pkl has altered bytes: it is damaged"):
        torch_files.load_torch_file(path)


def test_a_tensor_larger_than_what_is_copied_at_a_time(tmp_path):
    """Oracle: the elements, four pieces of them."""
    values = torch.arange(100_000)
    torch.save({"first": torch.zeros(3), "w": values}, tmp_path / "a.pt")
    entry = Entry("w", torch_files.load_torch_file(tmp_path / "a.pt").value["w"], "I64")
    write_huggingface_model(tmp_path / "out", [entry], 10**9, {}, lambda count: None)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], values)


@pytest.mark.parametrize("shard_size", (10**9, 16))
def test_what_is_written_is_synced(tmp_path, synced, shard_size):
    """Oracle: the files that the system was asked to write down, by their descriptors: all of them, when whole."""
    torch.save({"a": torch.zeros(4), "b": torch.ones(4)}, tmp_path / "a.pt")
    entries = [
        Entry(name, value, "F32") for name, value in torch_files.load_torch_file(tmp_path / "a.pt").value.items()
    ]
    out = tmp_path / "new" / "out"
    for _ in range(2):
        write_huggingface_model(out, entries, shard_size, {}, lambda count: None)
    assert synced == {path.name: path.stat().st_size for path in out.iterdir()}
    assert len(synced) == (1 if shard_size > 16 else 3)


def test_a_file_that_takes_a_part_at_a_time():
    """Oracle: the bytes; a write may take fewer than it was given, as of more than 2 GiB."""

    class Slow(io.BytesIO):
        def write(self, data):
            return super().write(data[:3])

    file = Slow()
    safetensors_io._write_all_bytes(file, memoryview(bytes(range(20))))
    assert file.getvalue() == bytes(range(20))


def test_where_elements_lie(tmp_path):
    """Oracle: by hand: types of every size begin at multiples of their size, whatever their order was."""
    torch.save(
        {
            str(size): torch.ones(3, dtype=kind)
            for size, kind in ((1, torch.uint8), (2, torch.float16), (8, torch.int64), (4, torch.float32))
        },
        tmp_path / "a.pt",
    )
    content = torch_files.load_torch_file(tmp_path / "a.pt").value
    entries = [Entry(name, value, value.dtype) for name, value in content.items()]
    write_huggingface_model(tmp_path, entries, 10**9, {}, lambda count: None)
    for name, tensor in safetensors_io.read_safetensors_header(tmp_path / "model.safetensors")[0].items():
        assert tensor.spans[0].offset % int(name) == 0 and tensor.spans[0].nbytes == 3 * int(name)
