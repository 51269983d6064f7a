"""Packed documents are unpacked unchanged, are small if others of their kind exist, and have a mark."""

import random
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_operator.kube import packed, shapes
from rayloom_operator.kube.packed import PackedDict, Packer
from rt_operator import crashed, make_pod_document

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(max_examples=50, deadline=None)
@given(st.lists(JSON, max_size=8))
def test_every_document_is_unpacked_unchanged_whatever_was_packed_before_and_after(documents):
    packer = Packer()
    kept = [packer.pack(each) for each in documents]
    assert [packer.unpack(each) for each in reversed(kept)] == documents[::-1]


def kept(document):
    return shapes.pod(msgspec.convert(document, shapes.PodFields))


def test_a_document_takes_little_beside_others_of_its_kind():
    packer = Packer()
    pods = [kept(make_pod_document(f"head{number}", node=f"n{number}")) for number in range(100)]
    first, *others = (packer.pack(each) for each in pods)
    assert len(packer._ends) == 2, "nothing, and the first one"
    assert max(map(len, others)) < 80 < len(repr(pods[0])) / 5
    assert packer.unpack(first) == pods[0]


def test_each_kind_of_documents_gets_its_example_up_to_a_size(monkeypatch):
    packer = Packer()
    workers = [kept(make_pod_document(f"w{number}", is_head=False)) for number in range(2)]
    words = random.Random(7).randbytes(700).hex()
    failed = [kept(make_pod_document(f"f{number}", engine=crashed(70, words))) for number in range(2)]
    sizes = [len(packer.pack(each)) for each in (*workers, *failed)]
    assert len(packer._ends) == 3
    # An example itself is packed as a reference to the example.
    assert max(sizes) < 100
    monkeypatch.setattr(packed, "_MAX_EXAMPLES", len(packer._examples))
    other = random.Random(8).randbytes(700).hex()
    assert packer.unpack(packer.pack(other)) == other
    assert len(packer._ends) == 3


def test_the_examples_take_little_memory_even_if_every_document_is_one():
    packer, words = Packer(), random.Random(9)
    uids = [{"uids": [words.randbytes(16).hex()]} for _ in range(300)]
    kept = [packer.pack(each) for each in uids]
    assert len(packer._ends) > 150
    held = [each for value in vars(packer).values() for each in (value if isinstance(value, list) else [value])]
    assert sum(map(sys.getsizeof, held)) < 3 * packed._MAX_EXAMPLES
    assert [packer.unpack(each) for each in kept] == uids


@pytest.fixture
def pods():
    found = PackedDict(lambda document: document["spec"]["nodeName"])
    for number in range(3):
        found["team", f"p{number}"] = make_pod_document(f"p{number}", node=f"n{number % 2}")
    return found


def test_it_is_a_dictionary(pods):
    assert list(pods) == [("team", "p0"), ("team", "p1"), ("team", "p2")]
    assert pods["team", "p1"] == make_pod_document("p1", node="n1")
    assert pods.pop(("team", "p1"))["metadata"]["name"] == "p1"
    assert ("team", "p1") not in pods
    assert (len(pods), pods.get(("team", "p1"))) == (2, None)


def test_a_document_that_replaces_one_that_was_read_is_read_and_marked(pods):
    assert pods["team", "p0"]["spec"]["nodeName"] == "n0"
    pods["team", "p0"] = make_pod_document("p0", node="n9")
    assert pods["team", "p0"]["spec"]["nodeName"] == "n9"
    assert (pods.marked("n0"), pods.marked("n9")) == ([("team", "p2")], [("team", "p0")])
    del pods["team", "p0"]
    assert pods.marked("n9") == []
    with pytest.raises(KeyError):
        pods["team", "p0"]


def test_marks_are_known_without_unpacking(pods, monkeypatch):
    monkeypatch.setattr(Packer, "unpack", lambda *_: pytest.fail("it was unpacked"))
    assert pods.marked("n0") == [("team", "p0"), ("team", "p2")]
    assert (pods.mark(("team", "p1")), pods.mark(("team", "p7"))) == ("n1", None)
    assert list(pods.marks()) == ["n0", "n1", "n0"]


def test_documents_that_were_read_lately_are_unpacked_once_and_not_all_are_kept(pods, monkeypatch):
    monkeypatch.setattr(packed, "_NUM_READ", 2)
    first = pods["team", "p0"]
    assert pods["team", "p0"] is first
    for name in ("p1", "p2"):
        assert pods["team", name]["metadata"]["name"] == name
    assert len(pods._read) == 2
    assert pods["team", "p0"] is not first
