"""Frames of any content: each is understood or refused, and nothing else happens."""

from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protos import speculation_pb2 as pb
from workers import limits
from workers.rpc import codec
from workers.rpc.errors import ProtocolError

VOCAB = 100
SMALL = st.integers(0, 12)
VALUES: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_UINT32: st.one_of(SMALL, st.integers(0, 2**32 - 1)),
    FieldDescriptor.TYPE_UINT64: st.one_of(SMALL, st.integers(0, 2**64 - 1)),
    FieldDescriptor.TYPE_FIXED64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_SINT32: st.one_of(st.integers(-2, 8), st.integers(-(2**31), 2**31 - 1)),
    FieldDescriptor.TYPE_FLOAT: st.one_of(st.floats(0, 1, width=32), st.floats(width=32)),
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: st.text(max_size=8),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=32),
    FieldDescriptor.TYPE_ENUM: st.integers(-1, 5),
}
DIRECTIONS = {
    "to target": (pb.ToTarget, lambda: codec.to_target_codec(VOCAB)),
    "from target": (pb.FromTarget, lambda: codec.from_target_codec(VOCAB)),
    "to draft": (pb.ToDraft, codec.to_draft_codec),
    "from draft": (pb.FromDraft, codec.from_draft_codec),
}


def filled(data: st.DataObject, kind: type, depth: int = 0) -> Any:
    """A message with any of its fields set to anything."""
    message = kind()
    for field in message.DESCRIPTOR.fields:
        if not data.draw(st.booleans()):
            continue
        repeated = field.is_repeated
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            if depth > 3:
                continue
            inner = (
                type(getattr(message, field.name).add())
                if repeated
                else type(getattr(message, field.name))
            )
            made = [filled(data, inner, depth + 1) for _ in range(data.draw(st.integers(0, 2)))]
            if repeated:
                del getattr(message, field.name)[:]
                getattr(message, field.name).extend(made)
            elif made:
                getattr(message, field.name).CopyFrom(made[0])
            continue
        values = VALUES[field.type]
        if repeated:
            getattr(message, field.name).extend(data.draw(st.lists(values, max_size=5)))
        else:
            setattr(message, field.name, data.draw(values))
    return message


@pytest.mark.parametrize("direction", DIRECTIONS)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_frame_is_understood_or_refused(direction: str, data: st.DataObject) -> None:
    kind, decoder = DIRECTIONS[direction]
    frame = filled(data, kind)
    try:
        messages = list(decoder().decode(frame))
    except ProtocolError:
        return
    for _, message in messages:
        tree = getattr(message, "tree", None)
        if tree is not None:
            assert len(tree) <= limits.MAX_TREE_NODES
            assert all(-1 <= parent < node for node, parent in enumerate(tree.parents))
            assert all(0 <= score <= 1 for score in tree.scores)


@pytest.mark.parametrize("direction", DIRECTIONS)
@settings(max_examples=150, deadline=None)
@given(noise=st.binary(max_size=200))
def test_noise_is_understood_or_refused(direction: str, noise: bytes) -> None:
    kind, decoder = DIRECTIONS[direction]
    try:
        list(decoder().decode(kind.FromString(noise)))
    except (DecodeError, ProtocolError):
        return
