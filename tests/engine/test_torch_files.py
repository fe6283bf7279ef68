"""Files of torch.save and what is written from them: shells, bounds, durability; more: tests/test_consolidate.py."""

import io
import os
import struct
import zipfile
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load_file

from dstrain.engine import streams, torch_files
from dstrain.engine.streams import Entry, write_model
from dstrain.recipe import ConfigError


class Slotted:
    """Has slots and attributes; both stand in its pickle."""

    __slots__ = ("start", "__dict__")


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
    content = torch_files.load(tmp_path / "a.pt")
    shells = content.value
    assert all(isinstance(shell, torch_files.Shell) for shell in shells.values())
    assert [shell.start for shell in (shells["both"], shells["slots"], shells["plain"])] == [(3,)] * 3
    assert shells["both"].numel == shells["plain"].numel == 4
    assert not hasattr(shells["slots"], "numel") and not hasattr(shells["empty"], "start")
    assert {name.rpartition(".")[2] for name in content.asked} >= {"Slotted", "OnlySlots", "Plain"}


class Tagged(torch.Tensor):
    """A class of tensors that is not torch's own."""


def test_tensors_with_attributes(tmp_path):
    """Oracle: torch.save's own form of a tensor that carries an attribute: the tensor; of another class: a shell."""
    plain, other = torch.arange(3.0), torch.arange(3.0).as_subclass(Tagged)
    plain.origin = other.origin = "here"
    torch.save({"plain": plain, "other": other}, tmp_path / "a.pt")
    content = torch_files.load(tmp_path / "a.pt").value
    assert isinstance(content["plain"], streams.Stored) and content["plain"].shape == (3,)
    assert isinstance(content["other"], torch_files.Shell)


@pytest.mark.parametrize("more, whole", [(0, True), (1 << 20, False)])
def test_a_storage_beyond_the_end(tmp_path, more, whole):
    """Oracle: the length of the file: an entry of the archive's list that reaches beyond it is refused."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.arange(5)}, path)
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        name = next(info.filename for info in archive.infolist() if info.filename.endswith("data/0")).encode()
    entry = data.rindex(b"PK\1\2", 0, data.rindex(name))      # of the list at the end, where sizes stand at 20 and 24
    for place in (20, 24):
        struct.pack_into("<I", data, entry + place, 40 + more)
    path.write_bytes(data)
    if whole:
        assert torch_files.load(path).value["w"].shape == (5,)
    else:
        with pytest.raises(ConfigError, match="a.pt: it is truncated"):
            torch_files.load(path)


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
    torch_files.load(tmp_path / "27.pt")
    with pytest.raises(ConfigError, match="reaches beyond its storage"):
        torch_files.load(tmp_path / "26.pt")


def test_a_pickle_of_altered_bytes(tmp_path):
    """Oracle: the checksum of the archive's list, which one byte of a text breaks."""
    path = tmp_path / "a.pt"
    torch.save({"name": "unaltered"}, path)
    path.write_bytes(path.read_bytes().replace(b"unaltered", b"unalterad"))
    with pytest.raises(ConfigError, match="data.pkl has altered bytes: it is damaged"):
        torch_files.load(path)


def test_a_tensor_larger_than_what_is_copied_at_a_time(tmp_path):
    """Oracle: the elements, four pieces of them."""
    values = torch.arange(100_000)
    torch.save({"first": torch.zeros(3), "w": values}, tmp_path / "a.pt")
    entry = Entry("w", torch_files.load(tmp_path / "a.pt").value["w"], "I64")
    write_model(tmp_path / "out", [entry], 10**9, {}, lambda count: None)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], values)


@pytest.mark.parametrize("shard_size", (10**9, 16))
def test_what_is_written_is_synced(tmp_path, monkeypatch, shard_size):
    """Oracle: the files that the system was asked to write down, by their descriptors: all of them."""
    torch.save({"a": torch.zeros(4), "b": torch.ones(4)}, tmp_path / "a.pt")
    entries = [Entry(name, value, "F32") for name, value in torch_files.load(tmp_path / "a.pt").value.items()]
    sync, synced = os.fsync, set()

    def fsync(descriptor: int) -> None:
        synced.add(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_model(tmp_path / "out", entries, shard_size, {}, lambda count: None)
    assert synced == {path.name for path in (tmp_path / "out").iterdir()}
    assert len(synced) == (1 if shard_size > 16 else 3)


def test_a_file_that_takes_a_part_at_a_time():
    """Oracle: the bytes; a write may take fewer than it was given, as of more than 2 GiB."""
    class Slow(io.BytesIO):
        def write(self, data):
            return super().write(data[:3])

    file = Slow()
    streams._put(file, memoryview(bytes(range(20))))
    assert file.getvalue() == bytes(range(20))
