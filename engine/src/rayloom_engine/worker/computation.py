"""LoadedPart and RankComputation: a rank's runner computes through these interfaces, and never reads their arrays.

There are two implementations: torch_computation.py with tensors, and library_computation.py with numpy arrays, for the
C library. They do not import each other, and a process imports only one of them. So a rank on the C library imports no
torch.

Legend: T tokens of the step, D model width, N rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rayloom_engine.core.adapter import AdapterLoad
from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.kv.layout import KvLayout
from rayloom_engine.models.largest_step import LargestStep, StepBytes
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.parallel.tensor_group import TensorGroup
from rayloom_engine.worker.batch import InputBatch
from rayloom_engine.worker.slots import Slot

if TYPE_CHECKING:
    from rayloom_engine.worker.host_memory import RankHostMemory

ArrayT = TypeVar("ArrayT")


class RankComputation(Protocol[ArrayT]):
    """A rank's part of a model with its KV cache and its sampler. Only the cache keeps data from step to step."""

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks in the cache."""

    def step(self) -> AbstractContextManager[object]:
        """Returns a context in which one step runs."""

    def clear_blocks(self, block_ids: tuple[int, ...]) -> None:
        """Fills KV blocks with zeros in all layers."""

    def load_adapter(self, load: AdapterLoad) -> None:
        """Loads a LoRA adapter into an adapter slot.

        Raises ModelError if the adapter cannot be used. Then the hidden states of tokens with this adapter become NaN.
        """

    def copy_blocks(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copies whole KV blocks in all layers; each pair is (from, to).

        No block may be both a source and a destination.
        """

    def use_host_memory(self, host: RankHostMemory) -> None:
        """Uses this memory in `store_blocks` and `load_blocks`."""

    def store_blocks(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copies whole KV blocks in all layers to host memory; each pair is (block, host slot)."""

    def load_blocks(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copies whole KV blocks in all layers from host memory; each pair is (host slot, block)."""

    def forward(
        self,
        batch: InputBatch,
        received_TD: ArrayT | None,
        group: TensorGroup[ArrayT],
        wanted_rows: Sequence[int] | None,
    ) -> ArrayT:
        """Returns hidden states [T, D], as `models.model.RankModel.forward` does.

        `received_TD`: the hidden states of the previous stage, which may be overwritten; None in the first stage.
        """

    def logits(self, hidden_ND: ArrayT) -> ArrayT:
        """Returns float32 logits [N, V] of hidden states. V: the part of the vocabulary that this rank computes."""

    def rows(self, array: ArrayT, rows: Sequence[int]) -> ArrayT:
        """Returns a copy of the rows with these indices."""

    def span(self, array: ArrayT, start: int, stop: int) -> ArrayT:
        """Returns the rows from `start` to `stop`, which may share memory with the array."""

    def are_finite(self, hidden_ND: ArrayT) -> bool:
        """True if no element is infinite or NaN."""

    def have_tokens(self, logits_NV: ArrayT) -> bool:
        """True if a token can be chosen from every row. No token can be chosen from a row that has a NaN anywhere."""

    def sample(self, logits_NV: ArrayT, slots: list[Slot]) -> list[int | None]:
        """Returns one token id per row, None for a row that is not finite. May overwrite the logits (float32)."""

    def describe(self, logits_NV: ArrayT, token_ids: list[int], num_tops: list[int]) -> list[TokenLogprobs]:
        """Returns the log-probability of the given token of each row n, with `num_tops[n]` most likely alternatives.

        The entry of a row that is not finite has no meaning.
        """

    def values(self, logits_NV: ArrayT, row: int, token_ids: Sequence[int]) -> list[float]:
        """Returns the logits of these tokens in a row."""


class LoadedPart(Protocol):
    """A rank's part of a model in memory, without KV cache. A rebuild of the engine keeps it.

    Types are names such as "bfloat16".
    """

    @property
    def shape(self) -> ModelShape: ...

    @property
    def part(self) -> ModelPart: ...

    @property
    def device_type(self) -> str:
        """cpu or cuda."""

    @property
    def dtype(self) -> str:
        """Type of the KV cache, and of the weights unless they are quantised."""

    @property
    def quantization(self) -> str:
        """Form of the weights in memory: none, int8, or the checkpoint's scheme."""

    @property
    def compute_dtype(self) -> str:
        """Type in which activations are multiplied."""

    @property
    def hidden_dtype(self) -> str:
        """Type of the hidden states between stages; the residual stream is not rounded when it is sent."""

    @property
    def arithmetic(self) -> str:
        """Names the code that computes, for the fingerprint of an answer."""

    @property
    def has_numpy_arrays(self) -> bool:
        """True if the arrays of a RankComputation are numpy's, False if they are torch's tensors."""

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take in this process."""

    @property
    def num_bytes_read(self) -> int:
        """Bytes of weights read from files, counted in the types in which the files store them."""

    @property
    def kv_layout(self) -> KvLayout: ...

    @property
    def kv_element_bytes(self) -> int: ...

    @property
    def progress(self) -> int:
        """Number of half layers that were computed without a call of the TensorGroup. Any thread may read it."""

    def free_bytes(self, num_sharing: int) -> int:
        """Returns this process's share of the device's free memory, if `num_sharing` processes divide the memory."""

    def step_bytes(self, step: LargestStep) -> StepBytes:
        """Returns the bytes of the largest step, without weights, adapters and KV cache."""

    def adapter_bytes(self, rank: int) -> int:
        """Returns the bytes that a LoRA adapter of this LoRA rank takes at most."""

    def computation(self, num_blocks: int, num_columns: int | None = None) -> RankComputation[Any]:
        """Returns the part with a new KV cache of zeros.

        `num_columns`: number of columns of the logits, and of the token ids that slots may name. If the vocabulary has
        fewer rows, the logits of the others are -infinity; if it has more rows, the last ones are left out. None: the
        number of rows. Only a part with the whole vocabulary may have another number.

        Raises OSError, MemoryError, OverflowError or ValueError if the memory cannot be allocated.
        """
