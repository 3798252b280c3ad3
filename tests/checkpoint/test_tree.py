"""``pack`` and ``unpack``: values round-trip with their types; unsupported ones are refused with their path."""

import collections
import enum
import json
import math
import pathlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcaccel.checkpoint.tree import pack, unpack
from hpcaccel.errors import CheckpointError

keys = st.one_of(
    st.text(max_size=5), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text(max_size=3))
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(), max_size=20),
    st.binary(max_size=40),
    st.binary(max_size=5).map(bytearray),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(st.sampled_from(["$", "key", "items", "a"]), inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
        st.frozensets(st.integers(), max_size=4),
        st.lists(inner, max_size=3).map(lambda items: collections.deque(items, maxlen=7)),
    ),
    max_leaves=12,
)


def there_and_back(value):
    packed = pack(value, "objects.x")
    return unpack(json.loads(json.dumps(packed.tree)), packed.tensors.__getitem__)


def same(a, b):
    """Whether values are equal, with the same types at every level; floats are compared by their bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes()
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@settings(max_examples=200, deadline=None)
@given(trees)
def test_every_tree_round_trips(value):
    assert same(there_and_back(value), value)


def test_long_and_unusual_values_round_trip():
    value = {
        "int": -(7**5000),
        "bytes": bytes(range(256)) * 20,
        "empty": b"",
        "surrogate": "\ud800",
        "counter": collections.Counter({3: 2}),
        "default": collections.defaultdict(list, {1: [2]}),
        "bare default": collections.defaultdict(None, {1: 2}),
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "set": {1, 2},
        "minus zero": -0.0,
    }
    back = there_and_back(value)
    assert back == value
    assert [type(item) for item in back.values()] == [type(item) for item in value.values()]
    assert math.copysign(1, back["minus zero"]) == -1
    assert back["default"]["new"] == []


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "u8", "c16", "?", "U5", "S3", "M8[ns]", ">i4"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_numpy_arrays_and_scalars_round_trip(dtype, shape):
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    back = there_and_back({"array": array, "scalar": array.reshape(-1)[:1].sum() if dtype == "f4" else np.float32(1.5)})
    assert back["array"].dtype == array.dtype
    assert back["array"].shape == array.shape
    assert back["array"].tobytes() == array.tobytes()
    assert type(back["scalar"]) is np.float32
    back["array"][...] = array  # is writable


def test_pack_extracts_tensors_without_copying_them():
    tensor = torch.ones(3)
    packed = pack({"a": [tensor], "a.b": {"c": tensor}}, "objects.x")
    assert sorted(packed.tensors) == ["objects.x['a'][0]", "objects.x['a.b']['c']"]
    assert all(item.data_ptr() == tensor.data_ptr() for item in packed.tensors.values())


class Odd:
    pass


class Colour(enum.IntEnum):
    red = 1


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (lambda: 0, "function"),
        (Odd(), "Odd"),
        (Colour.red, "Colour"),
        (Point(1, 2), "Point"),
        (pathlib.PurePosixPath("/"), "PurePosixPath"),
        (np.array([Odd()]), "numpy.ndarray"),
        (np.random.default_rng(), "Generator"),
        (collections.defaultdict(lambda: 1), "function"),
    ],
)
def test_unsupported_type_is_refused_with_its_path(value, name):
    with pytest.raises(CheckpointError) as caught:
        pack({"state": [{"fn": value}]}, "objects.sampler")
    assert str(caught.value).startswith("objects.sampler['state'][0]['fn']")
    assert name in str(caught.value)


def test_tensors_without_plain_data_are_refused():
    for tensor in (torch.eye(2).to_sparse(), torch.ones(1, device="meta")):
        with pytest.raises(CheckpointError, match=r"^objects\.x is "):
            pack(tensor, "objects.x")


def test_a_value_that_contains_itself_is_refused():
    value: list[object] = []
    value.append({"again": value})
    with pytest.raises(CheckpointError, match=r"objects\.x\[0\]\['again'\] contains itself"):
        pack(value, "objects.x")
