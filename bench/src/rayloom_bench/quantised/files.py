"""The GGUF files of `bench quantised`, made once and kept in the cache.

The built-in model shows the speed of a small model whose width, 576, is no multiple of the K formats' block size. The
wide model has random weights. All its dimensions are multiples of 256, as in usual deployed models. llama.cpp's own
`llama-quantize` quantises both models, and chooses a type for each tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from rayloom_bench.peers.engines import gguf_weights, llama_cpp
from rayloom_bench.peers.engines.installation import Log, installed, run_step

RECIPE = 1  # part of the folder's name; raise it when the files' content changes
BUILTIN = "SmolLM2-135M"
WIDE = "random 0.46B"
_CONTEXT = 8192
_SPREAD = 0.03  # standard deviation of the random weights
_COPIED = "tokenizer."  # prefix of the metadata that is copied from the built-in model to the wide model


@dataclass(frozen=True, slots=True, kw_only=True)
class WideShape:
    """The shape of the wide model, a Llama with a tied head."""

    width: int = 2048
    intermediate: int = 5632
    num_layers: int = 8
    num_heads: int = 32
    num_kv_heads: int = 8

    @property
    def kv_width(self) -> int:
        return self.width // self.num_heads * self.num_kv_heads


@dataclass(frozen=True, slots=True)
class FileChoice:
    """A file to be measured: a model, and a type of `llama-quantize`."""

    model: str  # BUILTIN or WIDE
    kind: str

    @property
    def title(self) -> str:
        return f"{self.model}, {self.kind}"

    @property
    def file_name(self) -> str:
        return f"{'builtin' if self.model == BUILTIN else 'wide'}-{self.kind}.gguf"


CHOICES = (
    FileChoice(BUILTIN, "Q8_0"),
    FileChoice(BUILTIN, "Q4_0"),
    FileChoice(WIDE, "Q8_0"),
    FileChoice(WIDE, "Q4_K_M"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedFile:
    """A file that exists."""

    choice: FileChoice
    path: Path
    weight_bytes: int  # bytes of all tensors; a decode step reads all of them, because the embedding is also the head


def quantised_files(parent: Path, llama: Path, *, num_jobs: int, log: Log) -> tuple[QuantisedFile, ...]:
    """Returns the files of CHOICES below `parent`; makes them first if needed (a minute, 2 GB of disk for that time).

    `llama`: the folder of llama_cpp.install. Raises PeerMissing.
    """
    folder = parent / f"quantised-{llama.name}-recipe-{RECIPE}"

    def make(target: Path) -> None:
        quantise = llama_cpp.build_quantiser(llama, num_jobs=num_jobs, log=log)
        plain = {BUILTIN: gguf_weights.weights(parent, log=log)["bf16"], WIDE: target / "wide-f16.gguf"}
        write_wide(gguf_weights.builtin_file(), plain[WIDE], WideShape())
        for choice in CHOICES:
            run_step([quantise, plain[choice.model], target / choice.file_name, choice.kind, str(num_jobs)], log=log)
        plain[WIDE].unlink()

    installed(folder, make, what="quantised GGUF files (about a minute)", log=log)
    return tuple(
        QuantisedFile(choice=choice, path=path, weight_bytes=tensor_bytes(path))
        for choice in CHOICES
        for path in (folder / choice.file_name,)
    )


def tensor_bytes(path: Path) -> int:
    """Bytes of all tensors of a GGUF file."""
    return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)


def write_wide(builtin: Path, target: Path, shape: WideShape, *, seed: int = 0) -> None:
    """Writes a Llama of random weights in float16, with the tokenizer of the GGUF file `builtin`."""
    reader = gguf.GGUFReader(builtin)
    writer = gguf.GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if name.startswith(_COPIED):
            is_array = field.types[0] is gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if is_array else None)
    vocab_size = len(reader.fields["tokenizer.ggml.tokens"].contents())
    _write_shape(writer, shape, vocab_size)
    rng = np.random.default_rng(seed)
    for name, size in wide_matrices(shape, vocab_size).items():
        values = rng.standard_normal(size, dtype=np.float32) * np.float32(_SPREAD)
        writer.add_tensor(f"{name}.weight", values.astype(np.float16))
    for name in ("output_norm", *(f"blk.{i}.{part}_norm" for i in range(shape.num_layers) for part in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", np.ones(shape.width, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def wide_matrices(shape: WideShape, vocab_size: int) -> dict[str, tuple[int, int]]:
    """Returns name -> outputs and inputs of every matrix of the wide model. Pure."""
    found = {"token_embd": (vocab_size, shape.width)}
    for i in range(shape.num_layers):
        found[f"blk.{i}.attn_q"] = (shape.width, shape.width)
        found[f"blk.{i}.attn_k"] = found[f"blk.{i}.attn_v"] = (shape.kv_width, shape.width)
        found[f"blk.{i}.attn_output"] = (shape.width, shape.width)
        found[f"blk.{i}.ffn_gate"] = found[f"blk.{i}.ffn_up"] = (shape.intermediate, shape.width)
        found[f"blk.{i}.ffn_down"] = (shape.width, shape.intermediate)
    return found


def _write_shape(writer: gguf.GGUFWriter, shape: WideShape, vocab_size: int) -> None:
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_vocab_size(vocab_size)
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_rope_dimension_count(shape.width // shape.num_heads)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
