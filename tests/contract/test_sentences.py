"""The operator recognises these messages of the engine: a missing model, a rank that makes no progress."""

import httpx2
import msgspec
import pytest
from huggingface_hub import errors

from rayloom_engine.errors import ModelError
from rayloom_engine.front.operations.lifecycle import stall_of
from rayloom_engine.front.operations.status_document import NO_CORE
from rayloom_engine.models.checkpoint.hub import _explained
from rayloom_engine.models.checkpoint.source import resolve
from rayloom_engine.protocol.messages import RankReport
from rayloom_operator.api.status import Reason
from rayloom_operator.observe.pods import HUB_SENTENCES, MISSING_MODEL
from rayloom_operator.observe.verdict import STALLED


def sentence(source):
    with pytest.raises(ModelError) as caught:
        resolve(source)
    return str(caught.value)


@pytest.mark.parametrize("source", ["file:///models/not-there", "file:///models/not-there.gguf", "builtin://other"])
def test_a_model_that_is_not_there_is_known_as_one(source):
    assert MISSING_MODEL.search(sentence(source))


def test_a_file_that_is_no_model_is_not_one_that_is_not_there(tmp_path):
    (tmp_path / "model.bin").write_text("")

    assert not MISSING_MODEL.search(sentence(f"file://{tmp_path / 'model.bin'}"))


class Refusal(errors.HfHubHTTPError):
    def __init__(self, code):
        super().__init__("x", response=httpx2.Response(code, request=httpx2.Request("GET", "http://hub")))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.LocalEntryNotFoundError("no route"), Reason.HUB_UNREACHABLE),
        (Refusal(403), Reason.MODEL_NO_ACCESS),
        (type("Gated", (Refusal, errors.GatedRepoError), {})(403), Reason.MODEL_GATED),
    ],
)
def test_what_the_hub_says_is_known(error, reason):
    (known,) = [name for sentence, name in HUB_SENTENCES.items() if sentence in str(_explained("hf://a/b", error))]

    assert known is reason


def test_a_rank_that_stands_still_is_known_as_one():
    rank = RankReport(rank=0, node="n", host="h", pid=1, phase="step", heartbeat_age_s=61.0, step=1, memory_bytes=1)

    serving = msgspec.structs.replace(NO_CORE, state="serving", last_token_age_s=1.0)

    assert STALLED.search(stall_of(msgspec.structs.replace(serving, ranks=(rank,)), 0.0))
    assert STALLED.search(stall_of(msgspec.structs.replace(serving, heartbeat_age_s=61.0), 0.0))
