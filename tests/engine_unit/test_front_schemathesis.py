"""Every operation of the OpenAPI document answers generated requests in time, with a documented status.

A status of 5xx is a failure, too. schemathesis generates valid and invalid requests; a fake core answers. `make test`
sends about 200 requests. `RAYLOOM_API_CASES=2000 pytest tests/engine_unit/test_front_schemathesis.py` sends more
requests, which differ from run to run.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from rayloom_engine.front.routes import ROUTES
from rt_fake_core import say
from rt_front import FrontUnderTest, running_front

NUM_CASES = int(os.environ.get("RAYLOOM_API_CASES", "200"))
SECONDS = 20.0  # after this time without a byte the server counts as hung, and httpx fails


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path_factory.mktemp("front")) as front:
        front.do(lambda: setattr(front.core, "script", say("one two")))
        yield front


def check(document: dict[str, Any], operation: dict[str, Any], response: Any) -> None:
    """Fails for a status that is not documented, or a JSON body without the documented form."""
    status = response.status_code
    assert status < 500, response.text
    assert str(status) in operation["responses"], f"{status} is not documented: {response.text}"
    content = operation["responses"][str(status)]["content"]
    media = response.headers["content-type"][0].partition(";")[0]
    assert media in content, f"{media} is not documented for {status}"
    if media == "application/json":
        schema = {**document, **content[media]["schema"]}
        jsonschema.Draft202012Validator(schema).validate(response.json())


def send_cases(operation: Any, num_cases: int, answered: Callable[[Any], None]) -> None:
    """Sends generated requests of one operation, and passes each response to `answered`."""

    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        derandomize=NUM_CASES == 200,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def send(case: Any) -> None:
        answered(case.call(timeout=SECONDS))

    send()


def test_generated_requests_are_answered_as_documented(front: FrontUnderTest) -> None:
    # Imported here, because the import takes half a second. Every process of a test run collects this file, but only
    # one process runs this test.
    import schemathesis
    from schemathesis import GenerationMode

    document = front.http.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=front.api_url)
    schema.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    statuses: Counter[int] = Counter()
    operations = [each.ok() for each in schema.get_all_operations()]
    assert len(operations) == len(ROUTES)
    # Requests without a body vary little.
    weights = [8 if "requestBody" in document["paths"][each.path][each.method] else 1 for each in operations]
    for operation, weight in zip(operations, weights, strict=True):
        described = document["paths"][operation.path][operation.method]

        def answered(response: Any, described: dict[str, Any] = described) -> None:
            statuses[response.status_code] += 1
            check(document, described, response)

        send_cases(operation, max(2, NUM_CASES * weight // sum(weights)), answered)
    print(f"{statuses.total()} requests, by status: {dict(statuses)}")
    assert statuses.total() >= NUM_CASES // 2
    assert statuses[200] and statuses[400]
