"""Ways in which a checkpoint on a disk can be ruined, by accident or by hand."""

import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dstrain.checkpoint.manifest import NAME, hash_files
from dstrain.disk.sealed import parse_json_if_hash_matches, render_json_with_hash

HARMLESS = {
    "extra file",
    "copied under another name",
    "another shard",
    "hint",
    "leftover",
    "link to itself moved",
    "unlisted",
    "files is empty",
}  # sealed by hand, and true as far as it goes
# The older step, or one error that names what is wrong: both folders are, or somebody has sealed other contents.
CONTENTS = (
    "common without counters",
    "common without metadata",
    "a tensor is missing",
    "a tensor is renamed",
    "a tensor of another shape",
    "a tensor of another type",
)
NAMED = {"folders swapped", *CONTENTS}


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def flip(data: bytes, at: int, chance: random.Random) -> bytes:
    return data[:at] + bytes([data[at] ^ chance.randrange(1, 256)]) + data[at + 1 :]


def of_bytes(kind: str, path: Path, chance: random.Random) -> None:
    """Faults of one file's bytes."""
    data = path.read_bytes()
    at = chance.randrange(len(data))
    page = at // 4096 * 4096
    other = chance.randrange(len(data))
    altered = {
        "flip": lambda: flip(data, at, chance),
        "one bit": lambda: data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :],
        "many flips": lambda: data[:at] + chance.randbytes(min(64, len(data) - at)) + data[at + 64 :],
        "truncated": lambda: data[:at],
        "empty": lambda: b"",
        "header alone": lambda: data[:8],
        "zeroed page": lambda: (
            data[:page] + b"\xff" * min(4096, len(data) - page) + data[page + 4096 :]
            if not data[page : page + 4096].strip(b"\0")
            else data[:page] + bytes(min(4096, len(data) - page)) + data[page + 4096 :]
        ),
        "all zeros": lambda: bytes(len(data)),
        "appended": lambda: data + chance.randbytes(chance.choice((1, 4096))),
        "inserted": lambda: data[:at] + chance.randbytes(1) + data[at:],
        "twice": lambda: data + data,
        "noise": lambda: chance.randbytes(len(data)),
        "bytes swapped": lambda: (
            flip(data, at, chance)
            if data[at] == data[other] or at == other
            else bytes(data[other] if i == at else data[at] if i == other else byte for i, byte in enumerate(data))
        ),
    }[kind]()
    path.write_bytes(altered)


BYTES = (
    "flip",
    "one bit",
    "many flips",
    "truncated",
    "empty",
    "header alone",
    "zeroed page",
    "all zeros",
    "appended",
    "inserted",
    "twice",
    "noise",
    "bytes swapped",
)


def of_entry(kind: str, path: Path, chance: random.Random) -> None:
    """Faults of one file as an entry of its folder."""
    beside = path.with_name(f"{path.name}.moved")
    if kind == "huge and sparse":
        os.truncate(path, 1 << 42)
        return
    path.rename(beside)
    if kind == "is a folder":
        path.mkdir()
    elif kind == "is a FIFO":
        os.mkfifo(path)
    elif kind == "is a socket":
        folder = os.open(path.parent, os.O_RDONLY)  # a socket's path may have 107 bytes
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)
    elif kind == "is a dangling link":
        path.symlink_to("nowhere")
    elif kind == "links in a circle":
        path.symlink_to(path.name)
    elif kind == "is /dev/zero":
        path.symlink_to("/dev/zero")
    elif kind == "is /dev/null":
        path.symlink_to("/dev/null")
    elif kind == "link to itself moved":  # the same bytes, through a link: as good as the file
        path.symlink_to(beside.name)
        return
    elif kind == "renamed":
        return
    beside.unlink()


ENTRIES = (
    "huge and sparse",
    "missing",
    "is a folder",
    "is a FIFO",
    "is a socket",
    "is a dangling link",
    "links in a circle",
    "is /dev/zero",
    "is /dev/null",
    "link to itself moved",
    "renamed",
)


def of_folder(kind: str, folder: Path, older: Path, newer: Path, chance: random.Random) -> None:
    """Faults of whole folders and of several files."""
    first, second = (
        chance.sample(sorted(path for path in newer.iterdir() if path.suffix == ".safetensors"), 2)
        if len(list(newer.glob("*.safetensors"))) > 1
        else [next(newer.glob("*.safetensors"))] * 2
    )
    same = older / first.name
    if kind == "two files swapped":
        first.rename(newer / "aside"), second.rename(first), (newer / "aside").rename(second)
    elif kind == "file of the older step":
        shutil.copy(same, first)
    elif kind == "manifest of the older step":
        shutil.copy(older / NAME, newer / NAME)
    elif kind == "folders swapped":  # each then holds the other's step
        older.rename(folder / "aside"), newer.rename(older), (folder / "aside").rename(newer)
    elif kind == "older copied over":
        shutil.rmtree(newer), shutil.copytree(older, newer)
    elif kind == "folder renamed":
        newer.rename(folder / f"step_{chance.randrange(5, 1000):08d}")
    elif kind == "folder copied ahead":
        newer.rename(folder / "step_00000099")
    elif kind == "folder is a file":
        shutil.rmtree(newer), newer.write_text("once a folder")
    elif kind == "folder is empty":
        shutil.rmtree(newer), newer.mkdir()
    elif kind == "folder is a dangling link":
        shutil.rmtree(newer), newer.symlink_to("nowhere")
    elif kind == "folder links in a circle":
        shutil.rmtree(newer), newer.symlink_to(newer.name)
    elif kind == "folder is a link to the older":
        shutil.rmtree(newer), newer.symlink_to(older.name)
    elif kind == "folder is a FIFO":
        shutil.rmtree(newer), os.mkfifo(newer)
    elif kind == "extra file":
        (newer / "notes.txt").write_text("mine")
    elif kind == "copied under another name":
        shutil.copy(first, newer / f"copy-of-{first.name}.bak")
    elif kind == "another shard":
        shutil.copy(first, newer / "another-00000-of-00001.safetensors")
    elif kind == "hint":
        (folder / "newest").write_bytes(chance.choice((b"", b"step_00000002\n", b"step_99\n", chance.randbytes(50))))
    elif kind == "leftover":
        shutil.copytree(newer, folder / "step_00000006.tmp")


FOLDERS = (
    "two files swapped",
    "file of the older step",
    "manifest of the older step",
    "folders swapped",
    "older copied over",
    "folder renamed",
    "folder copied ahead",
    "folder is a file",
    "folder is empty",
    "folder is a dangling link",
    "folder links in a circle",
    "folder is a link to the older",
    "folder is a FIFO",
    "extra file",
    "copied under another name",
    "another shard",
    "hint",
    "leftover",
)


def of_manifest(kind: str, newer: Path, chance: random.Random) -> None:
    """Faults of the manifest that its seal does not show: somebody has sealed it again."""
    path = newer / NAME
    body = parse_json_if_hash_matches(path.read_bytes())
    files = body["files"]
    name = chance.choice(sorted(files))
    if kind.startswith("no "):
        del body[kind[3:]]
    elif kind == "another step":
        body["step"] += 1
    elif kind == "step as text":
        body["step"] = str(body["step"])
    elif kind in ("step is null", "files is null"):
        body[kind.split()[0]] = None
    elif kind == "files is a list":
        body["files"] = sorted(files)
    elif kind == "files is empty":
        body["files"] = {}
    elif kind == "entry is null":
        files[name] = None
    elif kind == "entry without size":
        del files[name]["size"]
    elif kind == "entry without hash":
        del files[name]["hash"]
    elif kind == "size as text":
        files[name]["size"] = str(files[name]["size"])
    elif kind == "another size":
        files[name]["size"] += chance.choice((-1, 1))
    elif kind == "another hash":
        files[name]["hash"] = files[name]["hash"][::-1]
    elif kind == "a file that is not there":
        files["more-00000-of-00001.safetensors"] = files[name]
    elif kind == "an absolute path":
        files["/etc/hostname"] = files[name]
    elif kind == "a path upwards":
        files["../newest"] = files[name]
    elif kind == "unlisted":
        del files[name]
    if kind == "body is a list":
        body = [body]
    elif kind == "body is null":
        body = None
    path.write_bytes(render_json_with_hash(body))


MANIFESTS = (
    "no step",
    "no files",
    "another step",
    "step as text",
    "step is null",
    "files is null",
    "files is a list",
    "files is empty",
    "entry is null",
    "entry without size",
    "entry without hash",
    "size as text",
    "another size",
    "another hash",
    "a file that is not there",
    "an absolute path",
    "a path upwards",
    "body is a list",
    "body is null",
    "unlisted",
)


def of_text(kind: str, newer: Path, chance: random.Random) -> None:
    """Faults of the manifest's bytes."""
    path = newer / NAME
    data = path.read_bytes()
    path.write_bytes(
        {
            "a blank": lambda: data.replace(b" ", b"  ", 1),
            "line ends of Windows": lambda: data.replace(b"\n", b"\r\n"),
            "a byte order mark": lambda: b"\xef\xbb\xbf" + data,
            "UTF-16": lambda: data.decode().encode("utf-16"),
            "other JSON": lambda: b"{}",
            "a list": lambda: b"[]",
            "a number": lambda: b"1",
            "null": lambda: b"null",
            "nested deeply": lambda: b"[" * 100_000 + b"]" * 100_000,
            "a huge number": lambda: b"1" * 100_000,
            "NaN": lambda: data.replace(b'"step": 4', b'"step": NaN'),
            "HTML": lambda: b"<html>503</html>",
            "a seal alone": lambda: json.dumps({"hash": data[10:74].decode()}).encode(),
        }[kind]()
    )


TEXTS = (
    "a blank",
    "line ends of Windows",
    "a byte order mark",
    "UTF-16",
    "other JSON",
    "a list",
    "a number",
    "null",
    "nested deeply",
    "a huge number",
    "NaN",
    "HTML",
    "a seal alone",
)


def of_contents(kind: str, newer: Path, chance: random.Random) -> None:
    """Other contents than this program writes, hashed and sealed as if they were its own."""
    common = newer / "common.safetensors"
    path = common if kind.startswith("common") else chance.choice(sorted(newer.glob("tiny-*.safetensors")))
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    name = chance.choice(sorted(tensors))
    if kind == "common without counters":
        metadata = {"other": "1"}
    elif kind == "common without metadata":
        metadata = None
    elif kind == "a tensor is missing":
        del tensors[name]
    elif kind == "a tensor is renamed":
        tensors[f"{name}_"] = tensors.pop(name)
    elif kind == "a tensor of another shape":
        tensors[name] = tensors[name].repeat(2)
    elif kind == "a tensor of another type":
        tensors[name] = tensors[name].double()
    save_file(tensors, path, metadata)
    body = parse_json_if_hash_matches((newer / NAME).read_bytes())
    body["files"] |= hash_files(newer, [path.name])
    (newer / NAME).write_bytes(render_json_with_hash(body))


def corrupt(folder: Path, older: int, newer: int, chance: random.Random, skip: set[str]) -> tuple[str, str]:
    """Ruins the newer of two checkpoints; the kind of the fault, and the file."""
    old, new = (folder / f"step_{step:08d}" for step in (older, newer))
    while True:
        kinds = chance.choice((BYTES, BYTES, BYTES, ENTRIES, ENTRIES, FOLDERS, MANIFESTS, TEXTS, CONTENTS))
        kind = chance.choice(kinds)
        path = chance.choice(sorted(path for path in new.iterdir()))
        # The same fault of the manifest and of another file may end differently.
        if f"{kind}{'/manifest' * (path.name == NAME)}".replace(" ", "_") not in skip:
            break
    if kinds is BYTES:
        of_bytes(kind, path, chance)
    elif kinds is ENTRIES:
        of_entry(kind, path, chance)
    elif kinds is FOLDERS:
        of_folder(kind, folder, old, new, chance)
    elif kinds is MANIFESTS:
        of_manifest(kind, new, chance)
    elif kinds is TEXTS:
        of_text(kind, new, chance)
    else:
        of_contents(kind, new, chance)
    return kind, path.name if kinds in (BYTES, ENTRIES) else ""
