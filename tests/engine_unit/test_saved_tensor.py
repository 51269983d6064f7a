"""`read_embeds` with files that torch.save has written, with files that it refuses, and with hostile files.

A hostile file must be refused in bounded time and memory, and nothing that it names may be imported or called.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayloom_engine.core.embeds import Embeds, EmbedsType
from rayloom_engine.front.openai.embeds.archive import BadTensor
from rayloom_engine.front.openai.embeds.saved_tensor import has_large_elements, read_embeds
from rayloom_engine.front.openai.embeds.tensor_pickle import MAX_PICKLE_BYTES
from rt_embeds import saved

WIDTH = 6
DTYPES: dict[EmbedsType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
ROWS = torch.arange(5 * WIDTH, dtype=torch.float32).reshape(5, WIDTH) - 8.25
FILE = saved(ROWS)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def _members(file: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def _archive(members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def _changed(**members: bytes) -> bytes:
    """FILE with other members. `data` stands for data.pkl, `storage` for data/0."""
    names = {"data": "archive/data.pkl", "storage": "archive/data/0", "byteorder": "archive/byteorder"}
    return _archive(_members(FILE) | {names[name]: content for name, content in members.items()})


PICKLE = _members(FILE)["archive/data.pkl"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "view",
    [
        lambda rows: rows,
        lambda rows: rows[None],
        lambda rows: rows[1:4],
        lambda rows: rows[::2],
        lambda rows: torch.cat([rows, rows], dim=1)[:, 3 : 3 + WIDTH],
        lambda rows: rows[2:3],
        lambda rows: (rows + 0).requires_grad_() * 1,
    ],
    ids=["whole", "batch of one", "slice", "every second row", "columns", "one row", "with gradient"],
)
def test_the_rows_of_a_saved_tensor(dtype: EmbedsType, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = view(ROWS.to(DTYPES[dtype]))
    for options in ({}, {"pickle_protocol": 4}):
        assert read_embeds(saved(tensor, **options), WIDTH) == Embeds(dtype, WIDTH, _bytes_of(tensor))


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (torch.zeros(2, WIDTH + 1), "its shape is [2, 7]; the model needs [positions, 6]"),
        (torch.zeros(0, WIDTH), "its shape is [0, 6]"),
        (torch.zeros(WIDTH), "its shape is [6]"),
        (torch.zeros(2, 1, WIDTH), "its shape is [2, 1, 6]"),
        (torch.zeros(WIDTH, 3).T, "its rows are not contiguous; save tensor.contiguous()"),
        (torch.zeros(1, WIDTH).expand(4, WIDTH), "its rows are not contiguous"),
        (torch.zeros(2, WIDTH, dtype=torch.float64), 'its pickle has the name "torch.DoubleStorage"; save one dense'),
        (torch.zeros(2, WIDTH, dtype=torch.int64), 'its pickle has the name "torch.LongStorage"'),
        (torch.zeros(2, WIDTH).to_sparse(), 'its pickle has the name "torch._utils._rebuild_sparse_tensor"'),
        (torch.nn.Parameter(torch.zeros(2, WIDTH)), 'its pickle has the name "torch._utils._rebuild_parameter"'),
        ([torch.zeros(2, WIDTH)], "its pickle has the instruction EMPTY_LIST; save one tensor alone"),
        ((ROWS, ROWS), "it does not contain a tensor alone"),
        (7, "it does not contain a tensor alone"),
    ],
)
def test_another_value_is_refused_with_a_sentence(value: object, sentence: str) -> None:
    with pytest.raises(BadTensor) as caught:
        read_embeds(saved(value), WIDTH)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("element", [float("nan"), float("inf"), float("-inf"), 1024.0, -1024.0, -1e30])
def test_elements_that_no_embedding_has_are_refused(dtype: EmbedsType, element: float) -> None:
    rows = ROWS.to(DTYPES[dtype])
    rows[4, 2] = element  # beyond the range of float16, that is infinite
    with pytest.raises(BadTensor, match="an element that is NaN, infinite or at least 1024 in magnitude"):
        read_embeds(saved(rows), WIDTH)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_elements_below_the_limit_are_taken(dtype: EmbedsType) -> None:
    limit = torch.tensor([1024.0, -1024.0], dtype=DTYPES[dtype])
    below = torch.nextafter(limit, torch.zeros_like(limit))
    assert has_large_elements(_bytes_of(limit[1:]), dtype)
    assert not has_large_elements(_bytes_of(below), dtype)
    assert torch.isfinite(below.half() * 12).all(), "Granite's factor, in float16"


@given(st.sampled_from(list(DTYPES)), st.binary(max_size=64))
def test_large_elements_are_found_in_any_bits(dtype: EmbedsType, data: bytes) -> None:
    size = DTYPES[dtype].itemsize
    data = data[: len(data) // size * size]
    elements = torch.frombuffer(bytearray(data), dtype=DTYPES[dtype]).float() if data else torch.zeros(0)
    assert has_large_elements(data, dtype) is not bool((elements.abs() < 1024).all())


def test_a_long_name_of_the_file_is_no_fault() -> None:
    file = _archive({name.replace("archive", "a" * 255): content for name, content in _members(FILE).items()})
    assert read_embeds(file, WIDTH).num_rows == 5
    assert read_embeds(_with_extra_fields(200), WIDTH).num_rows == 5


def test_a_file_in_the_older_format_is_refused() -> None:
    with pytest.raises(BadTensor, match=r"not a file of torch\.save in its zip format"):
        read_embeds(saved(ROWS, _use_new_zipfile_serialization=False), WIDTH)


class _Call:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("called-by-a-pickle",)


def _with_directory_at(offset: int) -> bytes:
    """FILE with another offset of the archive's directory, from which zipfile computes the places of all members."""
    place = FILE.index(b"PK\x06\x06") + 48
    return FILE[:place] + struct.pack("<Q", offset) + FILE[place + 8 :]


class _NoLocalExtra(zipfile.ZipInfo):
    """A member with extra fields only in the archive's directory."""

    def FileHeader(self, zip64: bool | None = None) -> bytes:
        extra, self.extra = self.extra, b""
        header = super().FileHeader(zip64)
        self.extra = extra
        return header


def _with_extra_fields(num: int) -> bytes:
    """FILE with a member of so many empty extra fields, which zipfile reads in square time."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in _members(FILE).items():
            archive.writestr(name, content)
        info = _NoLocalExtra("archive/more")
        info.extra = struct.pack("<HH", 0x9999, 0) * num
        archive.writestr(info, b"")
    return file.getvalue()


HOSTILE = [
    (_with_extra_fields(16383), "the directory of its archive has an entry of more than 1024 bytes"),
    (_changed(data=PICKLE.replace(b"QK\x00", b"Q\x89")), "the sizes of its tensor are no integers"),
    (_changed(data=PICKLE.replace(b"K\x1et", b"\x88t")), "the sizes of its tensor are no integers"),
    (_changed(data=pickle.dumps(_Call(), 2)), 'its pickle has the name "posix.mkdir"'),
    (_changed(data=pickle.dumps(OrderedDict(a=1), 2)), "its pickle has the instruction"),
    (_changed(data=b"cos\nsystem\n."), 'its pickle has the name "os.system"'),
    (_changed(data=b"\x80\x02ctorch\nFloatStorage\n)R."), "its pickle describes no plain tensor"),
    (_changed(data=b"\x80\x02r\xff\xff\xff\x7f."), "its pickle is damaged"),  # a memo of 2**31 entries
    (
        _changed(data=b"\x80\x02)" + b"q\x00h\x00\x86" * 600 + b"K\x01\x93."),
        "its pickle is damaged",
    ),  # 2**600 leaves
    (_changed(data=b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b"."), "its pickle has a number of more than 64 bits"),
    (_changed(data=PICKLE[:-1]), "its pickle is damaged"),
    (_changed(data=bytes(MAX_PICKLE_BYTES + 1)), "the member data.pkl of its archive has 4097 bytes"),
    (_changed(data=PICKLE.replace(b"K\x05K\x06\x86", b"J\xff\xff\xff\x7fK\x06\x86")), "its rows end at element"),
    (_changed(data=PICKLE.replace(b"K\x05K\x06\x86", b"J\xff\xff\xff\xffK\x06\x86")), "its shape is [-1, 6]"),
    (_changed(data=PICKLE.replace(b"QK\x00", b"QK\x01")), "its rows end at element 31 of a storage of 30"),
    (_changed(data=PICKLE.replace(b"QK\x00", b"QJ\xff\xff\xff\xff")), "its rows end at element 29"),
    (_changed(data=PICKLE.replace(b"K\x06K\x01\x86", b"J\xff\xff\xff\xffK\x01\x86")), "its rows are not contig"),
    (_changed(data=PICKLE.replace(b"K\x06K\x01\x86", b"K\x06K\x02\x86")), "its rows are not contiguous"),
    (_changed(data=PICKLE.replace(b"\x01\x00\x00\x000", b"\x07\x00\x00\x00../../0")), "the name of its storage"),
    (_changed(storage=bytes(116)), "its storage has 116 bytes for 30 elements of 4 bytes"),
    (_changed(storage=bytes(124)), "its storage has 124 bytes for 30 elements of 4 bytes"),
    (_changed(byteorder=b"big"), "its byte order is not little-endian"),
    (_archive(_members(FILE), zipfile.ZIP_DEFLATED), "the member byteorder of its archive is compressed"),
    (_archive({"archive/data.pkl": PICKLE}), "its archive has no member data/0"),
    (_archive({"archive/version": b"3"}), "its archive has no data.pkl"),
    (_archive(_members(FILE) | {f"archive/{index}": b"" for index in range(40)}), "its archive has more than 32"),
    (FILE[: len(FILE) // 2], "its archive is damaged"),
    (_with_directory_at(2**64 - 1), "the member byteorder of its archive is damaged"),
    (_with_directory_at(2**63), "the member byteorder of its archive is damaged"),
    (b"", "it is not a file of torch.save"),
]


@pytest.mark.parametrize(("file", "sentence"), HOSTILE, ids=[sentence for _, sentence in HOSTILE])
def test_a_hostile_file_is_refused_with_a_sentence(file: bytes, sentence: str) -> None:
    with pytest.raises(BadTensor) as caught:
        read_embeds(file, WIDTH)
    assert str(caught.value).startswith(sentence)
    assert len(str(caught.value)) < 300
    assert not os.path.exists("called-by-a-pickle")


def _with_claimed_size(file: bytes, size: int) -> bytes:
    """`file` with another size of data/0 in its directory."""
    entry = file.rindex(b"archive/data/0") - 46
    assert file[entry : entry + 4] == b"PK\x01\x02"
    return file[: entry + 20] + struct.pack("<II", size, size) + file[entry + 28 :]


def test_a_claimed_size_and_a_bomb_take_no_memory() -> None:
    members = _members(FILE)
    bomb = _archive(members | {"archive/data/0": bytes(64 * 1024 * 1024)}, zipfile.ZIP_DEFLATED)
    shape = PICKLE.replace(b"K\x05K\x06\x86", b"J\xff\xff\xff\x7fK\x06\x86").replace(b"K\x1et", b"J\xff\xff\xff\x7ft")
    for file in (bomb, _with_claimed_size(_archive(members), 0x7FFFFFFF), _changed(data=shape)):
        tracemalloc.start()
        with pytest.raises(BadTensor):
            read_embeds(file, WIDTH)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1024 * 1024


@given(st.data())
def test_a_damaged_file_gives_rows_of_the_right_size_or_a_sentence(data: st.DataObject) -> None:
    source = data.draw(st.sampled_from([FILE, _changed(), saved(ROWS.bfloat16(), pickle_protocol=4)]))
    file = bytearray(source)
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(file) - 1))
        file[place] = data.draw(st.integers(0, 255))
    _check(bytes(file))


@given(st.data())
def test_a_damaged_pickle_gives_rows_of_the_right_size_or_a_sentence(data: st.DataObject) -> None:
    """The archive and its checksums are valid, so the damage reaches the pickle's instructions."""
    content = bytearray(PICKLE)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        end = place + data.draw(st.integers(0, 3))
        content[place:end] = data.draw(st.binary(max_size=5))
    _check(_changed(data=bytes(content)))


_ELEMENTS = [
    *range(256),
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ctorch\nFloatStorage\n",
    b"ccollections\nOrderedDict\n",
]
_ELEMENTS += [
    b"X\x07\x00\x00\x00storage",
    b"X\x01\x00\x00\x000",
    b"K\x06",
    b"K\x01",
    b"(",
    b"t",
    b"R",
    b"Q",
    b")",
    b"\x86",
]


@given(st.lists(st.sampled_from(_ELEMENTS), max_size=60))
def test_any_instructions_give_rows_of_the_right_size_or_a_sentence(parts: list[int | bytes]) -> None:
    content = b"".join(bytes([part]) if isinstance(part, int) else part for part in parts)
    _check(_changed(data=content + b"."))


def _check(file: bytes) -> None:
    try:
        embeds = read_embeds(file, WIDTH)
    except BadTensor as error:
        assert 10 < len(str(error)) < 300
    else:
        assert embeds.width == WIDTH
        assert embeds.num_rows >= 1
        assert len(embeds.data) == embeds.num_rows * embeds.row_bytes
        assert len(embeds.data) <= len(file)
        assert not has_large_elements(embeds.data, embeds.dtype)
