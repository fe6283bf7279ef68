"""Objects in files of torch.save whose classes are not imported; whole files: tests/test_consolidate.py."""

import torch

from dstrain.engine import torch_files


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
