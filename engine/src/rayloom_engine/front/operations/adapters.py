"""AdapterList: the LoRA adapters that requests can name in `model`.

The front owns the list. A sequence carries its adapter, so the scheduler and the ranks need no names. The list is
stored in a file of the run folder, so that the next front has it. Ranks still compute an unloaded adapter for sequences
that have it. The core passes the list on to gateways.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from rayloom_engine.common.json_words import first_of, shown
from rayloom_engine.common.whole_file import write_whole
from rayloom_engine.config import EngineConfig
from rayloom_engine.core.adapter import Adapter, ServedAdapter
from rayloom_engine.errors import ModelError
from rayloom_engine.front.http.errors import ApiError, unavailable
from rayloom_engine.front.operations.rank_files import RankFiles

logger = logging.getLogger(__name__)

MOST_ADAPTERS = 1024
_MOST_NAME = 256  # characters
_RETRY_AFTER_S = 30  # seconds after which a client should retry, if the hub or a rank could not be reached
MOST_NAMES = 10  # in one message


class AdapterNames(Protocol):
    """The adapters that requests to a front can name: an AdapterList, or those of a gateway's engines."""

    @property
    def entries(self) -> list[ServedAdapter]:
        """All adapters."""

    def get(self, name: str) -> ServedAdapter | None:
        """Returns the adapter with this name; None if there is no such adapter."""

    def check_known(self, name: str) -> None:
        """Raises ApiError 503 if `name` is unknown, but may be an adapter that no engine has reported yet."""


class AdapterList:
    """The adapters of a front by name, with a copy of the list in a file."""

    def __init__(self, config: EngineConfig, file: Path | None = None, ranks: RankFiles | None = None) -> None:
        """`file`: stores the list; None: the list is not stored. `ranks`: None if every rank has this front's files."""
        self._config = config
        self._file = file
        self._ranks = ranks
        self._entries: dict[str, ServedAdapter] = {}
        # name -> lock: loads and unloads of one name come one after the other; other names do not wait for a slow hub
        self._changes: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._is_writing = asyncio.Lock()  # held while the file is written
        self.on_change: Callable[[], None] = lambda: None  # called after every `load` and `unload`, not by `start`

    @property
    def entries(self) -> list[ServedAdapter]:
        return list(self._entries.values())

    def get(self, name: str) -> ServedAdapter | None:
        return self._entries.get(name)

    def check_known(self, name: str) -> None:
        """Does nothing: a front that accepts requests knows its adapters."""

    def has(self, name: str, path: str) -> bool:
        """True if the adapter with this name was loaded from this folder, or from this place on the hub."""
        entry = self._entries.get(name)
        if entry is None:
            return False
        try:
            return path == entry.source or entry.adapter.path in (path, str(_place(path)))
        except ModelError:
            return False

    def commit(self, name: str) -> str:
        """Returns the commit of an adapter of the hub; empty for any other adapter."""
        entry = self._entries.get(name)
        return "" if entry is None or not entry.source else entry.adapter.path.rpartition("@")[2]

    async def start(self, folder: Path, wanted: Mapping[str, str]) -> None:
        """Reads the list that an earlier front has stored; without a stored list, loads the adapters in `wanted`.

        `folder`: the model's folder. Raises ModelError.
        """
        if self._file is not None and self._file.exists():
            entries = msgspec.json.decode(await asyncio.to_thread(self._file.read_bytes), type=list[ServedAdapter])
            self._entries = {entry.name: entry for entry in entries}
            self._need_files()
        else:
            self._need_files()  # the list is empty; it replaces the list of a front that died during its first load
            for name, path in wanted.items():
                await self._add(name, path, folder)
            if self._entries:
                await self._keep()

    async def load(self, name: str, path: str, folder: Path, *, in_place: bool) -> None:
        """Adds an adapter. Raises ApiError.

        `in_place`: the adapter replaces an adapter of the same name; requests in flight keep the earlier adapter.
        """
        async with self._change_of(name):
            if name in self._entries and not in_place:
                raise ApiError(
                    400,
                    f"the adapter {shown(name)} is loaded already; unload it first, or set load_inplace",
                    param="lora_name",
                    code="adapter_exists",
                )
            try:
                await self._add(name, path, folder)
            except ModelError as error:
                raise _refusal(error) from error
            self.on_change()  # before the file is written, because writing may fail
            await self._keep()

    async def unload(self, name: str) -> None:
        """Removes an adapter. Requests that use it finish. Raises ApiError 404 for an unknown name."""
        async with self._change_of(name):
            if name not in self._entries:
                raise ApiError(
                    404,
                    f"no adapter has the name {shown(name)}; loaded: {first_of(self._entries, MOST_NAMES) or 'none'}",
                    param="lora_name",
                    code="adapter_not_found",
                )
            del self._entries[name]
            self._need_files()
            self.on_change()
            await self._keep()
            logger.info("adapter %s unloaded", shown(name))

    async def _add(self, name: str, path: str, folder: Path) -> None:
        if not 0 < len(name) <= _MOST_NAME or not name.isprintable():
            raise ModelError(f"{shown(name)} is no name of an adapter; works: 1 to {_MOST_NAME} printable characters")
        if name == self._config.api_model_name:
            raise ModelError(f"the adapter {shown(name)} has the name of the model; give it another name")
        self._check_room(name)
        entry = await asyncio.to_thread(self._read, name, path, folder)
        if self._ranks is not None:
            await self._ranks.bring(entry)
        try:
            self._check_room(name)  # again, because other adapters may have been loaded meanwhile
            self._entries[name] = entry
        finally:
            self._need_files()  # if there is no room, the ranks no longer need the files
        logger.info("adapter %s loaded from %s, LoRA rank %d", shown(name), entry.adapter.path, entry.rank)

    def _change_of(self, name: str) -> asyncio.Lock:
        return self._changes.setdefault(name, asyncio.Lock())

    def _check_room(self, name: str) -> None:
        if len(self._entries) >= MOST_ADAPTERS and name not in self._entries:
            raise ModelError(f"there are {MOST_ADAPTERS} adapters already, which is the most; unload one first")

    def _need_files(self) -> None:
        if self._ranks is not None:
            self._ranks.need(self.entries)

    def _read(self, name: str, path: str, folder: Path) -> ServedAdapter:
        # Imported late, because few servers have adapters.
        from rayloom_engine.models.adapters.hub_adapter import download_adapter, hub_adapter
        from rayloom_engine.models.adapters.peft_config import CONFIG
        from rayloom_engine.models.adapters.peft_folder import adapter_of, read_peft_folder
        from rayloom_engine.models.shape import read_shape

        shape = read_shape(folder)
        on_hub = hub_adapter(path)
        if on_hub is None:
            place, commit = _place(path), ""
        else:
            place, commit = download_adapter(on_hub, shape, self._config.max_lora_rank)
        found = read_peft_folder(place, shape, self._config.max_lora_rank)
        entry = ServedAdapter(name=name, adapter=adapter_of(place), rank=found.rank, created=int(time.time()))
        if on_hub is None:
            return entry
        num_bytes = max(file.stat().st_size for file in (found.weights, place / CONFIG))
        adapter = Adapter(path=on_hub.at(commit), digest=entry.adapter.digest)
        return msgspec.structs.replace(entry, adapter=adapter, source=path, num_bytes=num_bytes)

    async def _keep(self) -> None:
        async with self._is_writing:
            if self._file is not None:
                await asyncio.to_thread(write_whole, self._file, msgspec.json.encode(self.entries))


def _refusal(error: ModelError) -> ApiError:
    """Returns the answer to a request for an adapter that cannot be loaded."""
    if error.fault == "Unreachable":
        return unavailable(str(error), "adapter_unreachable", _RETRY_AFTER_S)
    status = 404 if error.fault == "NotFound" else 400
    return ApiError(status, str(error), param="lora_path", code="bad_adapter")


def named_paths(adapters: Iterable[str]) -> dict[str, str]:
    """Returns name -> folder, or place on the hub. `adapters` has the form of the setting `adapters`: NAME=PATH."""
    return {name: path for name, _, path in (given.partition("=") for given in adapters)}


def _place(path: str) -> Path:
    """Returns the folder that a user has named. Raises ModelError."""
    try:
        return Path(path.removeprefix("file://")).expanduser().absolute()
    except RuntimeError as error:
        raise ModelError(f"{shown(path)} names the home of an unknown user", "NotFound") from error
