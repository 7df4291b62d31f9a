"""The wire frame: `[msgpack header][array frame]*`, and the typed messages that travel in it.

A message is a frozen dataclass that inherits `Message`; its annotations are its schema. Scalars and plain
containers go into the msgpack header, numpy arrays follow as raw little-endian frames without a copy.
The last four bytes of the header are a CRC-32 (little-endian) over the header before them and all array frames.
Whatever a peer sends is checked (checksum, types, dtypes, shapes, sizes, finite limits) before anything uses it;
nothing is ever unpickled or evaluated.

    Example:
        frames = encode(Ack(pass_=0, index=7, attempt=1, status="accepted"), run_id="r1", sequence=3)
        envelope = decode(frames, registry)      # Envelope(run_id="r1", sequence=3, message=Ack(...))
"""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast, get_args, get_origin

import msgpack
import numpy as np
from numpy.typing import NDArray

from configs.errors import SlipstreamError, kind_of
from replay.channel.fields import Field, fields_of, shown

SCHEMA_VERSION = 8
"""Of the messages here and in the weight bus, and of the journal, which holds some of them: one for each release."""
MAX_HEADER_BYTES = 64 * 1024 * 1024
MAX_ARRAYS = 64
MAX_ITEMS = 1 << 20
"""Entries of one list or map of a header, and of all of them together with their number: one byte can announce an
object of 70, so the size of the frame alone does not bound the memory that it takes."""
MAX_SEQUENCE = 2**62
DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "int32", "int64", "float32")}
HEADER = {"schema": int, "run": str, "kind": str, "seq": int, "fields": dict, "arrays": list, "crc": bytes}
"""Keys of the header map, in order."""
CRC_BYTES = 4
CRC_MARK = b"\xa3crc\xc4\x04"
"""How msgpack ends a map whose last key is "crc" with a value of four bytes, before that value."""


class WireError(SlipstreamError, ValueError, code="SLIP-NET-05"):
    """A message that cannot be used. The text says what was wrong with it, `symptom` of which class that is."""

    symptom = "corrupt"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of everything on a ZeroMQ socket. Subclasses are found by their class name."""

    ARRAYS: ClassVar[dict[str, str]] = {}
    """Fields that are annotated as NDArray: name to dtype, every array one-dimensional."""

    def __init_subclass__(cls) -> None:
        found = {name: dtype_of(hint) for name, hint in cls.__annotations__.items()}
        cls.ARRAYS = {name: dtype for name, dtype in found.items() if dtype}


def dtype_of(hint: Any) -> str:
    """The dtype of an annotation NDArray[dtype]; empty for other annotations.

    NDArray[int32] is ndarray[shape, dtype[int32]] up to numpy 2.4, and an alias that keeps its name from 2.5 on.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is NDArray:
        return str(np.dtype(*arguments).name)
    if origin is np.ndarray:
        return str(np.dtype(*get_args(arguments[1])).name)
    return ""


@dataclasses.dataclass(frozen=True, slots=True)
class Envelope:
    """A decoded message with what its header said about it."""

    run_id: str
    sequence: int
    message: Message
    sender: str = ""
    """Name of the key that its connection has proven; empty without keys, and for what a server sent."""
    frames: Sequence[bytes | memoryview] = ()
    """The message as it came: what the journal keeps."""


Registry = dict[str, type[Message]]


def registry(*messages: type[Message]) -> Registry:
    """The allow-list of kinds that a socket accepts, by name."""
    return {message.__name__: message for message in messages}


def encode(message: Message, run_id: str, sequence: int) -> list[bytes | memoryview]:
    """Frames of one message. Arrays are sent from their own memory, so do not change them afterwards."""
    kind = type(message)
    arrays: list[bytes | memoryview] = []
    described = []
    for name, dtype in kind.ARRAYS.items():
        array = np.ascontiguousarray(getattr(message, name), dtype=DTYPES[dtype])
        if not array.size and _may_lack(kind, name):
            continue
        described.append((name, dtype, array.shape))
        arrays.append(memoryview(cast(Any, array)).cast("B") if array.size else b"")
    header = {
        "schema": SCHEMA_VERSION,
        "run": run_id,
        "kind": kind.__name__,
        "seq": sequence,
        "fields": {field.name: getattr(message, field.name) for field in _schema(kind)},
        "arrays": described,
        "crc": bytes(CRC_BYTES),
    }
    body = memoryview(cast(bytes, msgpack.packb(header)))[:-CRC_BYTES]
    return [b"".join((body, checksum(body, arrays))), *arrays]


def checksum(body: bytes | memoryview, arrays: Sequence[bytes | memoryview]) -> bytes:
    """Last bytes of a header frame: the checksum of what comes before them and of the array frames."""
    value = zlib.crc32(body)
    for array in arrays:
        value = zlib.crc32(array, value)
    return value.to_bytes(CRC_BYTES, "little")


def decode(frames: Sequence[bytes | memoryview], accepted: Registry, sender: str = "") -> Envelope:
    """Check and rebuild one message. Its arrays are read-only views of the frames.

    `accepted` are the kinds that this side takes.
    Raises WireError: anything about the frames is not as the schema says.
    """
    header = _header(frames)
    kind = accepted.get(header["kind"])
    if kind is None:
        raise WireError(f"message kind {header['kind'][:40]!r} is not accepted here")
    values = _arrays(kind, header["arrays"], frames[1:])
    fields = header["fields"]
    used = 0
    for field in _schema(kind):
        if field.name in fields:
            value = fields[field.name]
            if not field.fits(value):
                expected = field.hint.__name__ if isinstance(field.hint, type) else field.hint
                raise WireError(f"{kind.__name__}.{field.name}: {shown(value)} is no {expected}")
            values[field.name] = value
            used += 1
        elif field.required:
            raise WireError(f"{kind.__name__}.{field.name}: missing")
    if used != len(fields):
        unknown = fields.keys() - {field.name for field in _schema(kind)}
        raise WireError(f"{kind.__name__}: unknown fields {shown(sorted(map(str, unknown))[:5])}")
    return Envelope(header["run"], header["seq"], kind(**values), sender, frames)


def _header(frames: Sequence[bytes | memoryview]) -> dict[str, Any]:
    if not 1 <= len(frames) <= MAX_ARRAYS + 1:
        raise WireError(f"{len(frames)} frames, expected 1 to {MAX_ARRAYS + 1}")
    if len(frames[0]) > MAX_HEADER_BYTES:
        raise WireError(f"header of {len(frames[0])} bytes is above {MAX_HEADER_BYTES}")
    header = _unpack(frames[0])
    if not isinstance(header, dict):
        raise WireError(f"header is {kind_of(header)}, not a map")
    schema = header.get("schema")
    if type(schema) is not int or schema != SCHEMA_VERSION:
        raise WireError(f"schema version {shown(schema)}, this side speaks {SCHEMA_VERSION}; update the older side")
    if header.keys() != HEADER.keys():
        raise WireError(f"header does not have the keys {', '.join(HEADER)}")
    for key, kind in HEADER.items():
        if type(header[key]) is not kind:
            raise WireError(f"header.{key} is {kind_of(header[key])}")
    if not 0 <= header["seq"] <= MAX_SEQUENCE:
        raise WireError(f"header.seq {header['seq']} is not within 0 to 2^62")
    body, crc = memoryview(frames[0])[:-CRC_BYTES], memoryview(frames[0])[-CRC_BYTES:]
    if body[-len(CRC_MARK) :] != CRC_MARK:
        raise WireError("header does not end with its checksum")
    expected = checksum(body, frames[1:])
    if crc != expected:
        size = sum(map(len, frames))
        raise WireError(f"checksum {crc.hex()} of {size} bytes, which have {expected.hex()}: damaged on the way")
    return header


def _unpack(frame: bytes | memoryview) -> Any:
    left = MAX_ITEMS

    def count(items: Any) -> Any:
        nonlocal left
        left -= 1 + len(items)
        if left < 0:
            raise ValueError(f"more than {MAX_ITEMS} entries")
        return items

    try:
        return msgpack.unpackb(
            frame,
            strict_map_key=True,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            list_hook=cast(Callable[[list[Any]], Any], count),
            object_hook=count,
        )
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"header is not msgpack: {str(error)[:80]}") from error


def _arrays(kind: type[Message], described: list[Any], frames: Sequence[bytes | memoryview]) -> dict[str, Any]:
    if len(described) != len(frames):
        raise WireError(f"{kind.__name__}: {len(described)} arrays described, {len(frames)} frames")
    arrays: dict[str, Any] = {}
    for entry, frame in zip(described, frames, strict=True):
        if not (isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], list)):
            raise WireError(f"{kind.__name__}: array description {shown(entry)}")
        name, dtype, shape = entry
        if type(name) is not str or name not in kind.ARRAYS:
            raise WireError(f"{kind.__name__}: unknown array {shown(name)}")
        if name in arrays:
            raise WireError(f"{kind.__name__}.{name}: comes twice")
        if kind.ARRAYS[name] != dtype:
            raise WireError(f"{kind.__name__}.{name}: dtype {shown(dtype)}, expected {kind.ARRAYS[name]!r}")
        if len(shape) != 1 or type(shape[0]) is not int or shape[0] < 0:
            raise WireError(f"{kind.__name__}.{name}: shape {shown(shape)}, expected one dimension")
        if shape[0] * DTYPES[dtype].itemsize != len(frame):
            raise WireError(f"{kind.__name__}.{name}: {len(frame)} bytes for shape {shape} of {dtype}")
        arrays[name] = np.frombuffer(frame, dtype=DTYPES[dtype])
    if missing := {name for name in kind.ARRAYS.keys() - arrays.keys() if not _may_lack(kind, name)}:
        raise WireError(f"{kind.__name__}: arrays {sorted(missing)} are missing")
    return arrays


def _may_lack(kind: type[Message], name: str) -> bool:
    """Whether an array has a default: an empty one does not travel then."""
    return kind.__dataclass_fields__[name].default_factory is not dataclasses.MISSING


_SCHEMAS: dict[type[Message], tuple[Field, ...]] = {}


def _schema(kind: type[Message]) -> tuple[Field, ...]:
    if kind not in _SCHEMAS:
        _SCHEMAS[kind] = fields_of(kind, kind.ARRAYS)
    return _SCHEMAS[kind]
