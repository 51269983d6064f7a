"""The settings of a run, checked before any process is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rayloom_bench.workload import Workload
from rayloom_engine.errors import ConfigError

COMPARE_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """The checked command line of `rayloom-engine bench`."""

    url: str | None  # None: the bench starts an engine
    name: str | None  # name that the server at `url` has in the table
    model: str | None  # the checkpoint; None if there is a URL and no local checkpoint
    revision: str | None
    served_model_name: str | None  # None: the first model in the server's /v1/models
    dtype: str
    serve_flags: tuple[str, ...]  # flags that `rayloom-engine serve` gets unchanged
    workloads: tuple[Workload, ...]
    scale: float
    seed: int
    threads: int
    compares: bool
    compare_dtypes: tuple[str, ...]
    uses_text: bool
    ignores_eos: bool
    vocab_size: int | None
    weight_bytes: int | None
    measures_limit: bool
    json_file: Path | None

    def __post_init__(self) -> None:
        """Raises ConfigError for settings that exclude each other."""
        if self.url is not None and self.serve_flags:
            raise ConfigError(
                f"flags for serve ({' '.join(self.serve_flags)}) have no effect with --url; remove one of the two"
            )
        if self.compares and self.uses_text:
            raise ConfigError("--compare needs prompts of token ids; remove --text-prompts")
        if self.compares and self.model is None:
            raise ConfigError("--compare with --url needs the checkpoint's folder or hub id; add --model")
        if self.json_file is not None and not self.json_file.absolute().parent.is_dir():
            raise ConfigError(f"--json: the folder {self.json_file.absolute().parent} does not exist; make it first")


def page_file(folder: Path | None, name: str) -> Path | None:
    """Makes `folder` and returns the path of a page in it; None without a folder. Raises ConfigError."""
    if folder is None:
        return None
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--page: {folder} cannot be used as a folder ({error.strerror}); name another one"
        ) from error
    return folder / name


def parse_compare_dtypes(names: str, flag: str = "--compare-dtype") -> tuple[str, ...]:
    """The types of a list such as `bfloat16,float32`. Raises ConfigError for an unknown or repeated type."""
    chosen = tuple(name.strip() for name in names.split(",") if name.strip())
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(COMPARE_DTYPES):
        raise ConfigError(
            f"{flag}: {names!r} given; name one or more of {', '.join(COMPARE_DTYPES)}, each once, with commas between"
        )
    return chosen


def positive(flag: str, value: int | None) -> int | None:
    """`value`, unchanged. Raises ConfigError if it is less than 1."""
    if value is not None and value < 1:
        raise ConfigError(f"{flag}: {value} given, it must be 1 or more")
    return value


def without_separator(flags: Sequence[str]) -> tuple[str, ...]:
    """`flags` without a leading `--`, which argparse keeps in some versions of Python."""
    return tuple(flags[1:] if flags[:1] == ["--"] else flags)
