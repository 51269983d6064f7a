"""Messages between API server processes ("fronts") and the EngineCore ("core"), in version 4.

Each message is msgpack, preceded by its length as 4 big-endian bytes. A front sends Hello and gets Welcome. If the core
refuses the Hello, the core closes the connection. On the Unix socket the Hello has the token. Over TCP the core first
sends a FrontChallenge, and both sides prove that they have the service's key (front_auth.py).

A Submit has one sequence. A request with n > 1 has n sequences with the same prompt, so their Submits are sent in one
SubmitChoices. When the core dies, the front reconnects and resumes every unfinished sequence. To resume a sequence, the
front submits it again, in the same kinds of messages, with the token ids that the front has received. Sequence ids are
random, so they are unique on a server. A sequence that is submitted again keeps its id and gets a higher attempt
number: outputs of earlier attempts are dropped.

A new version only adds messages, and fields with defaults. Decoders ignore unknown fields. A side sends a new message
only to a peer whose version has this message. So each version can also speak the version before.

A front that chooses between engines sends WantCache to get the core's prefix index and load.
"""

from __future__ import annotations

import msgspec

from rayloom_engine.core.adapter import AdapterReport, NeededAdapter, ServedAdapter
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.embeds import EmbeddedPrompt, Embeds
from rayloom_engine.core.load import SchedulerLoad
from rayloom_engine.core.output import SequenceOutput as SequenceOutput
from rayloom_engine.core.stats import SchedulerStats
from rayloom_engine.protocol.fingerprint import Fingerprint
from rayloom_engine.protocol.gateway_requests import GatewayRequests

PROTOCOL_VERSION = 4
# the oldest version that a peer may speak; at least 4, because version 3 had no port for gateways
OLDEST_VERSION = max(4, PROTOCOL_VERSION - 1)
HASH_BYTES = 8  # CacheChanges has only this many bytes of a block's 16-byte hash


class FrontChallenge(msgspec.Struct, frozen=True, tag="challenge", kw_only=True):
    """The core's first message over TCP."""

    nonce: str
    version: int = PROTOCOL_VERSION
    # "offered": the front may send StartTls; "required": the front must do so; empty: the core has no certificate
    tls: str = ""


class StartTls(msgspec.Struct, frozen=True, tag="start_tls", kw_only=True):
    """A front's answer to a FrontChallenge that offers TLS. After the handshake, the core sends another challenge."""


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True):
    token: str = ""  # given only on the Unix socket
    front_id: str
    version: int = PROTOCOL_VERSION
    nonce: str = ""  # given over TCP
    proof: str = ""  # given over TCP: front_auth.front_proof


class Submit(msgspec.Struct, frozen=True, tag="submit", kw_only=True):
    sequence_id: str
    prompt_ids: tuple[int, ...]
    params: DecodingParams
    generated_ids: tuple[int, ...] = ()  # ids that the front has received; they are kept, and count towards max_tokens
    priority: int = 0  # lower runs first, as in vLLM
    arrival: float = 0.0  # Unix time when the sequence was first accepted; decides the order within a priority
    fork_of: str | None = None  # id of a sequence with the same prompt (n > 1), whose KV blocks may be shared
    is_resume: bool = False  # the sequence was accepted before, so it is never refused for a full queue
    tenant: str = ""  # the tenant whose share of slots and queue is used; empty unless there are several API keys
    cache_key: bytes = b""  # only sequences with equal keys share cached prefixes; at most 64 bytes
    attempt: int = 0  # how often the sequence was submitted before; outputs and refusals contain this number
    # Embeddings of all positions of the prompt; `prompt_ids` has placeholders. Sent only to a core whose ServedModel
    # has a hidden_size, because an older core would compute the placeholders.
    embeds: Embeds | None = None
    # A choice of a prompt after the first. Also true if `fork_of` is left out because the first choice is finished.
    # False in messages of fronts that lack this field.
    is_further_choice: bool = False

    def prompt(self) -> tuple[int, ...]:
        """Returns the prompt: `prompt_ids`, or an EmbeddedPrompt."""
        return self.prompt_ids if self.embeds is None else EmbeddedPrompt(self.embeds)


class SubmitChoices(msgspec.Struct, frozen=True, tag="submit_choices"):
    """Several Submits with the same prompt and the same grammar. Prompt and grammar are sent only once."""

    prompt_ids: tuple[int, ...]
    submits: tuple[Submit, ...]  # prompt_ids, embeds and grammar of each are empty
    grammar: str = ""
    embeds: Embeds | None = None  # as in Submit

    def with_prompt(self) -> list[Submit]:
        """Returns the Submits, each with the same tuple of prompt ids, the same embeddings and the same grammar."""
        submits = [
            msgspec.structs.replace(submit, prompt_ids=self.prompt_ids, embeds=self.embeds) for submit in self.submits
        ]
        if not self.grammar:
            return submits
        return [
            msgspec.structs.replace(submit, params=msgspec.structs.replace(submit.params, grammar=self.grammar))
            for submit in submits
        ]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    sequence_id: str
    attempt: int = 0
    is_moved: bool = False  # True if the sequence moves to another engine, and may come back from there
    is_complete: bool = False  # the answer ends at a stop string, which only the front sees


class Draining(msgspec.Struct, frozen=True, tag="draining"):
    """Reports to the core whether the engine drains. The core's status repeats the report for gateways.

    Sent only by the engine's own front, on the Unix socket.
    """

    is_draining: bool


class EngineAdapters(msgspec.Struct, frozen=True, tag="adapters"):
    """Reports the engine's LoRA adapters to the core. The core's status repeats the report for gateways.

    Sent only by the engine's own front, on the Unix socket.
    """

    adapters: tuple[ServedAdapter, ...]


class NeedAdapters(msgspec.Struct, frozen=True, tag="need_adapters"):
    """The hub adapters whose files must be on every rank's machine: loaded adapters and one that is loading.

    Replaces the list in the previous message. The core's status has a report for an adapter once all ranks have its
    files, or once one rank cannot get them. Sent only by the engine's own front, on the Unix socket.
    """

    adapters: tuple[NeededAdapter, ...]


class WantStatus(msgspec.Struct, frozen=True, tag="want_status"):
    """Requests a status now, before the next one is due. Sent only by the engine's own front, on the Unix socket.

    Sent without a check of the core's version: a front and its core are from the same image, so they have the same
    messages.
    """


class FetchFile(msgspec.Struct, frozen=True, tag="fetch_file"):
    """Requests a part of one of the model's text files. A gateway sends its next request once it has this part."""

    sha256: str
    start: int  # position of the part's first byte


class WantCache(msgspec.Struct, frozen=True, tag="want_cache"):
    """Requests the whole prefix index, at the beginning or because changes are missing.

    The core sends the whole index and the load, and from then on the changes of both.
    """


class Welcome(msgspec.Struct, frozen=True, tag="welcome", kw_only=True):
    epoch: int
    pid: int
    version: int  # the version that the core speaks on this connection
    proof: str = ""  # given over TCP: front_auth.core_proof


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    outputs: tuple[SequenceOutput, ...]


class Refused(msgspec.Struct, frozen=True, tag="refused", kw_only=True):
    """A sequence that was not accepted, or an accepted sequence that cannot continue.

    An accepted sequence is refused for `poison`, `corrupt`, `adapter` and, if its grammar fails, `invalid`. A front
    reads a reason that its version does not know as `invalid`.
    """

    sequence_id: str
    # "queue_full" | "too_long" | "invalid" | "poison" (crashes the engine) | "corrupt" (NaN logits) | "adapter" (a rank
    # cannot load the sequence's adapter)
    reason: str
    message: str
    retry_after_s: int = 1
    attempt: int = 0


class FilePart(msgspec.Struct, frozen=True, tag="file_part"):
    """A part of a text file. Empty if the core cannot read the file."""

    sha256: str
    start: int
    data: bytes


class PhaseProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of one phase of a start or a rebuild. If `total` is 0, the progress cannot be counted."""

    name: str  # "resolve" | "convert" | "discover" | "reserve" | "start_ranks" | "import" | "load" | "warm_up" | ...
    seconds: float
    done: int = 0
    total: int = 0
    unit: str = ""
    is_finished: bool = False


class TextFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that a front needs to convert text to ids and back: name in the model's folder, size and hash."""

    name: str
    num_bytes: int
    sha256: str


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model's properties that a front must know before it accepts requests. Known once the engine is built."""

    path: str  # folder with config.json and tokenizer.json
    architecture: str
    num_parameters: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str  # type of the weights; for quantised weights, the type before the quantisation
    compute_dtype: str  # type of the arithmetic
    quantization: str = "none"  # form of the weights in memory: none, int8, or the checkpoint's scheme
    weight_bytes: int
    commit: str | None = None
    fingerprint: Fingerprint | None = None  # None: the engine has no port for gateways
    text_files: tuple[TextFile, ...] = ()
    hidden_size: int = 0  # width of the embeddings in prompts; 0: the engine takes no prompts of embeddings


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """State of one rank, from its newest heartbeat."""

    rank: int
    node: str  # the Kubernetes node, or the host's name
    host: str  # the host's name; in Kubernetes the pod's
    pid: int
    phase: str  # a start-up phase, then "idle" | "step"
    heartbeat_age_s: float
    step: int
    memory_bytes: int  # resident memory
    advance: int = 0  # progress: parts of layers computed since the epoch began
    communication_s: float = 0.0  # seconds spent waiting for other ranks since the process started
    weight_bytes_read: int = 0  # bytes read from files since the process started


class CoreStatus(msgspec.Struct, frozen=True, tag="status", kw_only=True):
    """Sent to every front once a second, and more often during a start. WantStatus requests one in between."""

    state: str  # "starting" | "serving" | "recovering" | "failed"
    epoch: int
    executor: str  # "uni" | "mp" | "ray" | "external"
    step: int
    last_token_age_s: float | None  # seconds since a token last passed through all ranks; None before the first
    phases: tuple[PhaseProgress, ...]
    stats: SchedulerStats
    ranks: tuple[RankReport, ...]
    model_folder: str = ""  # folder of config.json and tokenizer.json, as soon as the core has found the model
    model: ServedModel | None = None  # once the engine is built
    message: str = ""  # cause of the failure or recovery; else how the KV cache was sized
    lost: str = ""  # while recovering: the lost rank, as "rank N"
    lost_node: str = ""  # node of the lost rank
    heartbeat_age_s: float = 0.0  # seconds since the core's main thread ended a step or checked its inbox
    # seconds since a computing rank last made progress or used CPU time; None: no rank computes
    last_work_age_s: float | None = None
    is_draining: bool = False  # the engine drains: it accepts no new requests
    # the engine's LoRA adapters; None: the engine's front has not reported them yet. Engines of versions
    # without this field have no adapters.
    adapters: tuple[ServedAdapter, ...] | None = ()
    # False: the engine has no room for LoRA adapters, so it refuses every sequence with one. Engines of versions
    # without this field may have room or not.
    takes_adapters: bool = True
    # one report for each adapter in NeedAdapters whose files are on all ranks' machines, or which a rank cannot get
    adapter_reports: tuple[AdapterReport, ...] = ()
    # requests of gateways, which the engine's own front does not see
    gateway_requests: GatewayRequests = GatewayRequests()


class CacheChanges(msgspec.Struct, frozen=True, tag="cache", kw_only=True):
    """Changes of the core's prefix index, or a part of the whole index (`num_parts` > 0).

    Hashes of blocks are cut to their first HASH_BYTES bytes and joined. After each start of a core, its messages with
    changes have the numbers 1, 2, 3, ... The parts of a whole index have the number of the last message whose changes
    the index includes.
    """

    start: int  # random number of the core's start; the number changes when the core restarts with an empty index
    number: int
    block_size: int  # tokens in a block
    added: bytes = b""
    removed: bytes = b""
    part: int = 0  # 0, 1, ... num_parts - 1
    num_parts: int = 0


class LoadReport(msgspec.Struct, frozen=True, tag="load"):
    load: SchedulerLoad


FrontMessage = (
    Hello
    | StartTls
    | Submit
    | SubmitChoices
    | Abort
    | Draining
    | EngineAdapters
    | NeedAdapters
    | WantStatus
    | FetchFile
    | WantCache
)
CoreMessage = FrontChallenge | Welcome | Outputs | Refused | FilePart | CoreStatus | CacheChanges | LoadReport
