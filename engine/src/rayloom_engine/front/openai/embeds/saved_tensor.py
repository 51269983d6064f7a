"""Reads the rows of a tensor that was saved with torch.save. Uses neither torch nor pickle. Pure.

Memory: at most a copy of the file's elements. Time: linear in the file.
"""

from __future__ import annotations

from rayloom_engine.core.embeds import ELEMENT_BYTES, Embeds, EmbedsType
from rayloom_engine.front.openai.embeds.archive import Archive, BadTensor
from rayloom_engine.front.openai.embeds.tensor_pickle import MAX_PICKLE_BYTES, SavedTensor, read_tensor_pickle

# Elements must be smaller in magnitude. Embeddings of models are far smaller. Larger ones would overflow float16, in
# which an engine may compute: it rounds them first, and some models then multiply them (Granite by 12).
ELEMENT_LIMIT = 1024
_MAX_KEY_CHARS = 8
# A byte -> 1 if the condition holds, else 0: tables for bytes.translate.
_SIGN = 0x7F  # mask of all bits but the sign
_IS_LARGE_HALF = bytes((byte & _SIGN) >= 0x64 for byte in range(256))  # 5 bits of exponent: 25 = 15 + 10 and above
_IS_AT_LEAST_2_11 = bytes((byte & _SIGN) > 0x44 for byte in range(256))  # exponent 138 and above
_IS_2_9_OR_2_10 = bytes((byte & _SIGN) == 0x44 for byte in range(256))  # exponent 136 or 137
_HAS_TOP_BIT = bytes(byte >= 0x80 for byte in range(256))


def read_embeds(file: bytes, hidden_size: int) -> Embeds:
    """Returns the rows of the tensor in a file of torch.save. Raises BadTensor.

    The tensor must have the shape [rows, hidden_size], or [1, rows, hidden_size], with one row or more.
    """
    archive = Archive(file)
    if archive.has("byteorder") and archive.read("byteorder", most_bytes=16) != b"little":
        raise BadTensor("its byte order is not little-endian; save it on a little-endian machine")
    tensor = read_tensor_pickle(archive.read("data.pkl", MAX_PICKLE_BYTES))
    sizes, strides = _two_dimensions(tensor, hidden_size)
    num_rows = sizes[0]
    storage = tensor.storage
    row_stride = strides[0] if num_rows > 1 else hidden_size
    if (hidden_size > 1 and strides[1] != 1) or row_stride < hidden_size:
        raise BadTensor("its rows are not contiguous; save tensor.contiguous()")
    last = tensor.offset + (num_rows - 1) * row_stride + hidden_size
    if tensor.offset < 0 or last > storage.num_elements:
        raise BadTensor(
            f"its rows end at element {last} of a storage of {storage.num_elements} elements, so the file is damaged"
        )
    if not (storage.key.isascii() and storage.key.isdigit() and len(storage.key) <= _MAX_KEY_CHARS):
        raise BadTensor("the name of its storage is not a number")
    element_bytes = ELEMENT_BYTES[storage.dtype]
    content = archive.read(f"data/{storage.key}", len(file))
    if len(content) != storage.num_elements * element_bytes:
        raise BadTensor(
            f"its storage has {len(content)} bytes for {storage.num_elements} elements of {element_bytes} bytes"
        )
    step = row_stride * element_bytes
    begin = tensor.offset * element_bytes
    row_bytes = hidden_size * element_bytes
    if step == row_bytes:
        data = content[begin : begin + num_rows * row_bytes]
    else:
        data = b"".join(content[start : start + row_bytes] for start in range(begin, begin + num_rows * step, step))
    if has_large_elements(data, storage.dtype):
        raise BadTensor(f"it has an element that is NaN, infinite or at least {ELEMENT_LIMIT} in magnitude")
    return Embeds(storage.dtype, hidden_size, data)


def has_large_elements(data: bytes, dtype: EmbedsType) -> bool:
    """True if a little-endian element is NaN, infinite or at least ELEMENT_LIMIT in magnitude.

    The last byte of a float16 has its whole exponent. The other types have 8 bits of exponent after the sign: 7 in an
    element's last byte, and one in the byte before it. 2**10 has the exponent 127 + 10 = 137 = 2 * 0x44 + 1.
    """
    size = ELEMENT_BYTES[dtype]
    high = data[size - 1 :: size]
    if dtype == "float16":
        return 1 in high.translate(_IS_LARGE_HALF)
    if 1 in high.translate(_IS_AT_LEAST_2_11):
        return True
    # bytes as digits of two long numbers: `&` compares all elements in one call
    candidates = int.from_bytes(high.translate(_IS_2_9_OR_2_10), "little")
    return bool(candidates & int.from_bytes(data[size - 2 :: size].translate(_HAS_TOP_BIT), "little"))


def _two_dimensions(tensor: SavedTensor, hidden_size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns sizes and strides of rows and elements. Raises BadTensor for another shape."""
    sizes, strides = tensor.sizes, tensor.strides
    if len(sizes) == len(strides) == 3 and sizes[0] == 1:
        sizes, strides = sizes[1:], strides[1:]
    if len(sizes) != 2 or len(strides) != 2 or sizes[0] < 1 or sizes[1] != hidden_size:
        shape = ", ".join(str(size)[:20] for size in tensor.sizes[:8])
        raise BadTensor(
            f"its shape is [{shape}]; the model needs [positions, {hidden_size}], with one position or more"
        )
    return (sizes[0], sizes[1]), (strides[0], strides[1])
