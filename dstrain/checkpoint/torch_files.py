"""Reads files of torch.save without torch, and without executing anything in them.

Such a file is a zip archive: a pickle, and the uncompressed bytes of each storage as further members. The pickle is
read by an unpickler that knows tensors, sizes and Python's own containers. Every other class or function that the
pickle names becomes an empty *shell*, which accepts all arguments and does nothing; these names are kept. A tensor
becomes a safetensors_io.Stored, so its bytes are not read here.

Source of the layout: torch/serialization.py and torch/_utils.py of torch 2.
"""

import io
import math
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dstrain.checkpoint.safetensors_io import CHUNK, SIZES, Span, Stored
from dstrain.recipe import ConfigError

_TYPES = {
    "Double": "F64",
    "Float": "F32",
    "Half": "F16",
    "BFloat16": "BF16",
    "Long": "I64",
    "Int": "I32",
    "Short": "I16",
    "Char": "I8",
    "Byte": "U8",
    "Bool": "BOOL",
}  # of torch's typed storages
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_PLAIN = {
    "set": set,
    "frozenset": frozenset,
    "list": list,
    "dict": dict,
    "tuple": tuple,
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "complex": complex,
    "bytearray": bytearray,
}
_MAX_PICKLE_BYTES = 1 << 30  # bytes: no checkpoint's structure is larger


class DType(NamedTuple):
    """A torch.dtype, or a class of storages with a dtype."""

    name: str


class Shell:
    """Replaces an object of a class that was not imported; has the `args` and attributes that the pickle holds."""

    def __new__(cls, *args: Any, **_: Any) -> "Shell":
        shell = super().__new__(cls)
        shell.__dict__["args"] = args
        return shell

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2:  # of a class with slots
            state = {**(state[0] or {}), **(state[1] or {})}
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __call__(self, *_: Any, **__: Any) -> "Shell":
        return Shell()

    def __setitem__(self, *_: Any) -> None:
        pass

    append = extend = add = __setitem__


class Content(NamedTuple):
    """The content of a file of torch.save.

    value   the unpickled object, with Stored in place of tensors, and shells in place of other objects
    asked   the names, module.name, of the classes and functions that shells replace
    sums    the CRC-32 of each storage
    """

    value: Any
    asked: frozenset[str]
    sums: dict[Span, int]


def are_bytes_altered(span: Span, crc: int) -> bool:
    """Returns whether the bytes of a span do not match their CRC-32, or the file is too short. Returns False if `crc`
    is 0, which means that torch wrote no checksum.
    """
    actual, left = 0, span.nbytes
    with open(span.path, "rb") as file:
        file.seek(span.offset)
        while left and crc:
            data = file.read(min(left, CHUNK))
            if not data:
                return True
            actual = zlib.crc32(data, actual)
            left -= len(data)
    return actual != crc


def load_torch_file(path: Path) -> Content:
    """Returns the content of a file of torch.save. Executes nothing that the file names, and does not read the values
    of tensors yet.

    Raises ConfigError if the file cannot be read, is damaged, has another format, or holds a tensor that safetensors
    cannot represent.
    """
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            return _load_archive(path, archive, file)
    except zipfile.BadZipFile:
        raise ConfigError(
            f"{path} is truncated, damaged, or not of torch.save's zip format (torch < 1.6 wrote "
            "another: save it again with a newer torch)"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except Exception as error:  # hostile or damaged bytes: the unpickler may raise anything
        raise ConfigError(
            f"{path} cannot be read ({type(error).__name__}: {error}): it is damaged, or holds more than "
            "tensors and plain values"
        ) from None


def _load_archive(path: Path, archive: zipfile.ZipFile, file: Any) -> Content:
    """Returns the content of an open zip archive of torch.save. Raises ConfigError for another kind of archive. Damaged
    bytes may raise any error.

    file: the file of the archive, opened once more to read bytes
    """
    length = file.seek(0, 2)
    members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if "data.pkl" not in members or "constants.pkl" in members:
        raise ConfigError(
            "it holds a program (TorchScript) and no plain data"
            if "constants.pkl" in members
            else "it holds no data.pkl: torch.save did not write it"
        )

    def find_member_span(info: zipfile.ZipInfo) -> Span:
        """Returns the byte range of a member of the archive. Raises ConfigError if the member is compressed or reaches
        beyond the end of the file.
        """
        if info.compress_type != zipfile.ZIP_STORED:
            raise ConfigError("its storages are compressed: save it again with torch.save")
        file.seek(info.header_offset + 26)  # of 30 bytes, then name and extra
        first = info.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
        if first + info.file_size > length:
            raise ConfigError("it is truncated")
        return Span(path, first, info.file_size)

    def read_member(name: str) -> bytes:
        span = find_member_span(members[name])
        if are_bytes_altered(span, members[name].CRC):
            raise ConfigError(f"its {name} has altered bytes: it is damaged")
        file.seek(span.offset)
        return file.read(span.nbytes)

    if "byteorder" in members and read_member("byteorder") != b"little":
        raise ConfigError("its numbers are big-endian: save it again on this kind of machine")
    if members["data.pkl"].file_size > _MAX_PICKLE_BYTES:
        raise ConfigError(f"a pickle of {members['data.pkl'].file_size} bytes is no checkpoint's")
    unpickler = _Unpickler(io.BytesIO(read_member("data.pkl")), lambda key: members[f"data/{key}"], find_member_span)
    return Content(unpickler.load(), frozenset(unpickler.asked), unpickler.sums)


class _Storage(NamedTuple):
    dtype: str  # "" if the tensor has it instead
    span: Span


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, member: Callable[[str], zipfile.ZipInfo], place: Callable[[zipfile.ZipInfo], Span]):
        super().__init__(file, encoding="utf-8")
        self._member, self._place = member, place
        self.asked: set[str] = set()
        self.sums: dict[Span, int] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Returns a harmless substitute for the class or function that a pickle names. Knows tensors, dtypes and plain
        containers. For any other name returns a new subclass of Shell, and adds the name to `asked`.
        """
        if module in ("torch._utils", "torch._tensor") and name in _REBUILDS:
            return _REBUILDS[name]()
        if module == "builtins" and name in _PLAIN:
            return _PLAIN[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and (name == "Size" or name in _DTYPES):
            return tuple if name == "Size" else DType(_DTYPES[name])
        if (module, name) in (("torch", "Tensor"), ("torch.nn.parameter", "Parameter")):
            return DType("a tensor")
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            kind = name.removesuffix("Storage")
            if kind in _TYPES or kind == "Untyped":
                return DType(_TYPES.get(kind, ""))
        module = "builtins" if module == "__builtin__" else module  # protocol 2 has Python 2's name of it
        self.asked.add(f"{module}.{name}")
        return type("Shell", (Shell,), {})  # whose attributes a pickle may set

    def persistent_load(self, pid: Any) -> _Storage:
        """Returns the dtype and byte range of a storage that a pickle refers to. Notes its checksum in `sums`."""
        kind, dtype, key, _, _ = pid
        if kind != "storage" or not isinstance(dtype, DType):
            raise ConfigError(f"it holds a {kind} that is no storage")
        info = self._member(str(key))
        span = self._place(info)
        self.sums[span] = info.CRC
        return _Storage(dtype.name, span)


class _Rebuild:
    """Replaces a function that a pickle may call. It has no attributes, because the pickle's opcode BUILD could alter
    them.
    """

    __slots__ = ()

    def __setattr__(self, *_: Any) -> None:
        raise ConfigError("it alters what reads it: do not load it with any program")

    __setstate__ = __setattr__


class _Tensor(_Rebuild):
    """Replaces torch's function that rebuilds a tensor, and returns a Stored. Offset and strides count elements. `more`
    has the dtype, if the storage has none, and metadata. Raises ConfigError if there are metadata, if safetensors lacks
    the dtype, or if the tensor reaches beyond its storage.
    """

    __slots__ = ()

    def __call__(
        self,
        storage: _Storage,
        offset: int,
        size: tuple[int, ...],
        strides: tuple[int, ...],
        _grad: Any = None,
        _hooks: Any = None,
        *more: Any,
    ) -> Stored:
        dtype = more[0].name if more and isinstance(more[0], DType) else storage.dtype
        metadata = [value for value in more if value and not isinstance(value, DType)]
        if not isinstance(storage, _Storage) or dtype not in SIZES or metadata:
            raise ConfigError("it holds a tensor of a type, or in a form, that safetensors does not know")
        shape, steps = tuple(map(int, size)), tuple(map(int, strides))
        row_major = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        plain = 0 in shape or all(step == usual or n == 1 for step, usual, n in zip(steps, row_major, shape))
        reach = math.prod(shape) if plain else 1 + sum((n - 1) * step for n, step in zip(shape, steps))
        outside = (offset + reach) * SIZES[dtype] > storage.span.nbytes
        if len(shape) != len(steps) or any(value < 0 for value in (offset, *shape, *steps)) or outside:
            raise ConfigError("it holds a tensor that reaches beyond its storage: it is damaged")
        span = Span(storage.span.path, storage.span.offset + offset * SIZES[dtype], reach * SIZES[dtype])
        return Stored(dtype, shape, (span,), None if plain else steps)


class _Parameter(_Rebuild):
    """Replaces torch's function that rebuilds a parameter, and returns the parameter's tensor."""

    __slots__ = ()

    def __call__(self, data: Any, *_: Any) -> Any:
        return data


class _Typed(_Rebuild):
    """Replaces torch's function that rebuilds a tensor with Python attributes. Returns the Stored without them, or a
    shell if the tensor's class is not one of torch's.
    """

    __slots__ = ()

    def __call__(self, build: Any, kind: Any, args: Any, _state: Any) -> Any:
        return build(*args) if kind == DType("a tensor") and isinstance(build, (_Tensor, _Parameter)) else Shell()


_REBUILDS = {
    "_rebuild_tensor_v2": _Tensor,
    "_rebuild_tensor_v3": _Tensor,
    "_rebuild_parameter": _Parameter,
    "_rebuild_parameter_with_state": _Parameter,
    "_rebuild_from_type_v2": _Typed,
}
