"""Plain values and arrays in a pickle, read without calling anything that it names.

A pickle is a program. This machine knows the steps that build numbers, texts, lists, tuples and dicts; what a pickle
names and calls stands in the result as a `Call`, inert. Of numpy's arrays that is enough to know where their bytes lie.
Only steps that pickletools splits off are read, which executes nothing.
"""

import io
import pickletools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dstrain.recipe import ConfigError


class Named(NamedTuple):
    """Something that a pickle imports."""

    name: str


@dataclass(eq=False, slots=True)
class Call:
    """Something that a pickle calls, with its arguments, and the state that it sets."""

    function: Any
    arguments: Any
    state: Any = None


class Block(bytes):
    """Bytes, with the place where they stand in the pickle."""

    place: int


class Array(NamedTuple):
    """An array in row-major order, and where its bytes stand in the file."""

    shape: tuple[int, ...]
    dtype: np.dtype
    place: int


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NUMBERS = {"BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT"}
_TEXTS = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"}
_BYTES = {"BINSTRING": 4, "SHORT_BINSTRING": 1, "BINBYTES": 4, "SHORT_BINBYTES": 1, "BINBYTES8": 8, "BYTEARRAY8": 8}


class _Mark:
    """Where a tuple or a list begins on the stack."""


def read_pickle(content: bytes) -> Any:
    """What a pickle holds; texts of Python 2 are bytes. ConfigError: it is damaged, or holds more than plain values."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for opcode, argument, place in pickletools.genops(io.BytesIO(content)):
            if opcode.name == "STOP":
                break
            _step(opcode.name, argument, place, stack, memo)
        (value,) = stack
        return value
    except ConfigError:
        raise
    except Exception as error:  # damaged or hostile bytes: an error of any kind
        raise ConfigError(f"it is no pickle of plain values ({type(error).__name__}: {str(error)[:100]})") from None


def _step(name: str, argument: Any, place: int, stack: list[Any], memo: dict[int, Any]) -> None:
    if name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name in _EMPTY:
        stack.append(_EMPTY[name]())
    elif name in _NUMBERS or name in _TEXTS:
        stack.append(argument)
    elif name in _BYTES:
        # In pickles of Python 2, pickletools gives a text with a character for each byte.
        block = Block(argument.encode("latin-1") if isinstance(argument, str) else argument)
        block.place = place + 1 + _BYTES[name]  # behind the opcode and the length
        stack.append(block)
    elif name == "STRING":
        stack.append(argument.encode("latin-1"))  # written in another way than it is: it has no place
    elif name == "MARK":
        stack.append(_Mark)
    elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
        memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
    elif name in ("GET", "BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif name in _TUPLES:
        stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
    elif name in ("TUPLE", "LIST", "DICT"):
        values = _since_mark(stack)
        stack.append(tuple(values) if name == "TUPLE" else values if name == "LIST" else _pairs(values))
    elif name in ("APPEND", "APPENDS"):
        values = [stack.pop()] if name == "APPEND" else _since_mark(stack)
        _of(list, stack[-1]).extend(values)
    elif name in ("SETITEM", "SETITEMS"):
        values = [stack.pop(-2), stack.pop()] if name == "SETITEM" else _since_mark(stack)
        _of(dict, stack[-1]).update(_pairs(values))
    elif name in ("GLOBAL", "STACK_GLOBAL"):
        words = argument.split(" ") if name == "GLOBAL" else [_of(str, stack.pop(-2)), _of(str, stack.pop())]
        stack.append(Named(".".join(words)))
    elif name == "REDUCE":
        arguments = stack.pop()
        stack[-1] = Call(stack[-1], arguments)
    elif name == "BUILD":
        state = stack.pop()
        _of(Call, stack[-1]).state = state
    elif name not in ("PROTO", "FRAME"):
        raise ConfigError(f"it takes the step {name}, and data do not")


def _since_mark(stack: list[Any]) -> list[Any]:
    start = len(stack) - 1 - next(place for place, value in enumerate(reversed(stack)) if value is _Mark)
    values = stack[start + 1 :]
    del stack[start:]
    return values


def _pairs(values: list[Any]) -> dict[Any, Any]:
    return dict(zip(values[::2], values[1::2], strict=True))


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ConfigError(f"it changes a {type(value).__name__} as if it were a {kind.__name__}")
    return value


def as_array(value: Any) -> Array:
    """Where a pickled numpy array has its bytes. ConfigError: it is none, of objects, or its bytes are not in order."""
    state = value.state if isinstance(value, Call) else None
    if isinstance(state, tuple) and state and isinstance(state[-1], Call):
        raise ConfigError(
            "Python 3 has written its array as text, in a protocol below 3: write it with protocol=4 of pickle.dump"
        )
    try:
        if "_frombuffer" in value.function.name:  # pickle's protocol 5
            block, dtype, shape, order = value.arguments
            fortran = order != "C"
        else:
            _, shape, dtype, fortran, block = value.state
        kind, order = dtype.arguments[0], dtype.state[1]
        kind, order = (_text(word) for word in (kind, order))
        array = Array(tuple(int(side) for side in shape), np.dtype(kind).newbyteorder(order), block.place)
        size = array.dtype.itemsize * int(np.prod([float(side) for side in shape]))
        if array.dtype.hasobject or fortran or len(block) != size or min(array.shape, default=0) < 0:
            raise ValueError(f"{kind} of {array.shape}")
        return array
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        detail = f" ({str(error)[:100]})" if isinstance(error, ValueError) else ""
        raise ConfigError(f"it holds no plain array where one is expected{detail}") from None


def _text(value: Any) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else value
