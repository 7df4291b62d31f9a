"""The wire frame: `[msgpack header][array frame]*`, and the typed messages that travel in it.

A message is a frozen dataclass that inherits `Message`; its annotations are its schema. Scalars and plain
containers go into the msgpack header, numpy arrays follow as raw little-endian frames without a copy.
Whatever a peer sends is checked (types, dtypes, shapes, sizes, finite limits) before anything uses it;
nothing is ever unpickled or evaluated.

    Example:
        frames = encode(Ack(pass_=0, index=7, attempt=1, status="accepted"), run_id="r1", sequence=3)
        envelope = decode(frames, registry)      # Envelope(run_id="r1", sequence=3, message=Ack(...))
"""

import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import msgpack
import numpy as np

SCHEMA_VERSION = 1
MAX_HEADER_BYTES = 64 * 1024 * 1024
MAX_ARRAYS = 64
MAX_DIMENSIONS = 4
DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "int32", "int64", "float32")}


class WireError(ValueError):
    """A frame that breaks the schema (symptom class: corrupt). The message says what was wrong."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of everything on a ZeroMQ socket. Subclasses are found by their class name."""

    ARRAYS: ClassVar[dict[str, str]] = {}
    """Array fields: name to dtype, every array one-dimensional."""


@dataclasses.dataclass(frozen=True, slots=True)
class Envelope:
    """A decoded message with what its header said about it."""

    run_id: str
    sequence: int
    message: Message


Registry = dict[str, type[Message]]


def registry(*messages: type[Message]) -> Registry:
    """The allow-list of kinds that a socket accepts, by name."""
    return {message.__name__: message for message in messages}


def encode(message: Message, run_id: str, sequence: int) -> list[bytes | memoryview]:
    """Frames of one message. Arrays are sent from their own memory, so do not change them afterwards."""
    arrays, described = [], []
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        if field.name in message.ARRAYS:
            dtype = message.ARRAYS[field.name]
            array = np.ascontiguousarray(value, dtype=DTYPES[dtype])
            described.append((field.name, dtype, list(array.shape)))
            arrays.append(memoryview(cast(Any, array)).cast("B") if array.size else memoryview(b""))
        else:
            fields[field.name] = value
    header = {
        "schema": SCHEMA_VERSION,
        "run": run_id,
        "kind": type(message).__name__,
        "seq": sequence,
        "fields": fields,
        "arrays": described,
    }
    return [cast(bytes, msgpack.packb(header)), *arrays]


def decode(frames: Sequence[bytes | memoryview], accepted: Registry) -> Envelope:
    """Check and rebuild one message.

    Raises:
        WireError: anything about the frames is not as the schema says.
    """
    header = _header(frames)
    if header["schema"] != SCHEMA_VERSION:
        raise WireError(
            f"schema version {header['schema']!r}, this side speaks {SCHEMA_VERSION}; update the older side"
        )
    kind = accepted.get(header["kind"])
    if kind is None:
        raise WireError(f"message kind {str(header['kind'])[:40]!r} is not accepted here")
    arrays = _arrays(kind, header["arrays"], frames[1:])
    fields = header["fields"]
    if not isinstance(fields, dict):
        raise WireError("fields is not a map")
    values: dict[str, Any] = {}
    for name, hint, required in _schema(kind):
        if name in kind.ARRAYS:
            values[name] = arrays[name]
        elif name in fields:
            if not _fits(fields[name], hint):
                raise WireError(f"{kind.__name__}.{name}: {str(fields[name])[:60]!r} is not a {hint}")
            values[name] = fields[name]
        elif required:
            raise WireError(f"{kind.__name__}.{name}: missing")
    unknown = fields.keys() - values.keys()
    if unknown:
        raise WireError(f"{kind.__name__}: unknown fields {sorted(map(str, unknown))[:5]}")
    return Envelope(header["run"], header["seq"], kind(**values))


def _header(frames: Sequence[bytes | memoryview]) -> dict[str, Any]:
    if not 1 <= len(frames) <= MAX_ARRAYS + 1:
        raise WireError(f"{len(frames)} frames, expected 1 to {MAX_ARRAYS + 1}")
    if len(frames[0]) > MAX_HEADER_BYTES:
        raise WireError(f"header of {len(frames[0])} bytes is above {MAX_HEADER_BYTES}")
    try:
        header = msgpack.unpackb(frames[0], strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"header is not msgpack: {error}") from error
    wanted = {"schema": int, "run": str, "kind": str, "seq": int, "fields": dict, "arrays": list}
    if not isinstance(header, dict) or header.keys() != wanted.keys():
        raise WireError("header does not have the keys schema, run, kind, seq, fields, arrays")
    for key, kind in wanted.items():
        if type(header[key]) is not kind:
            raise WireError(f"header.{key} is a {type(header[key]).__name__}")
    return header


def _arrays(kind: type[Message], described: list[Any], frames: Sequence[bytes | memoryview]) -> dict[str, Any]:
    if len(described) != len(frames):
        raise WireError(f"{kind.__name__}: {len(described)} arrays described, {len(frames)} frames")
    arrays: dict[str, Any] = {}
    for entry, frame in zip(described, frames, strict=True):
        if not (isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], list)):
            raise WireError(f"{kind.__name__}: array description {str(entry)[:60]!r}")
        name, dtype, shape = entry
        if type(name) is not str or name not in kind.ARRAYS:
            raise WireError(f"{kind.__name__}: unknown array {str(name)[:40]!r}")
        if kind.ARRAYS[name] != dtype:
            raise WireError(f"{kind.__name__}.{name}: dtype {str(dtype)[:40]!r}, expected {kind.ARRAYS[name]!r}")
        if len(shape) != 1 or type(shape[0]) is not int or shape[0] < 0:
            raise WireError(f"{kind.__name__}.{name}: shape {shape!r}, expected one dimension")
        if shape[0] * DTYPES[dtype].itemsize != len(frame):
            raise WireError(f"{kind.__name__}.{name}: {len(frame)} bytes for shape {shape} of {dtype}")
        arrays[name] = np.frombuffer(frame, dtype=DTYPES[dtype])
    missing = kind.ARRAYS.keys() - arrays.keys()
    if missing:
        raise WireError(f"{kind.__name__}: arrays {sorted(missing)} are missing")
    return arrays


_SCHEMAS: dict[type[Message], list[tuple[str, Any, bool]]] = {}


def _schema(kind: type[Message]) -> list[tuple[str, Any, bool]]:
    if kind not in _SCHEMAS:
        hints = typing.get_type_hints(kind)
        _SCHEMAS[kind] = [
            (f.name, hints[f.name], f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING)
            for f in dataclasses.fields(kind)
        ]
    return _SCHEMAS[kind]


def _fits(value: Any, hint: Any) -> bool:
    """Whether a decoded value has the annotated type. An int passes for a float, a bool never for an int."""
    if hint is Any:
        return True
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if origin is list:
        (item,) = typing.get_args(hint)
        return isinstance(value, list) and all(_fits(v, item) for v in value)
    if origin is dict:
        key, item = typing.get_args(hint)
        return isinstance(value, dict) and all(_fits(k, key) and _fits(v, item) for k, v in value.items())
    if hint is float:
        return type(value) in (int, float)
    if hint is None or hint is type(None):
        return value is None
    return type(value) is hint
