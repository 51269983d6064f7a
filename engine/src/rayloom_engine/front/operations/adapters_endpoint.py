"""PUT /adapters at the admin port: the LoRA adapters that the engine must have from now on."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rayloom_engine.common.json_words import shown
from rayloom_engine.front.http.body import read_body
from rayloom_engine.front.http.errors import ApiError
from rayloom_engine.front.operations.adapters import MOST_ADAPTERS
from rayloom_engine.front.operations.managed_adapters import ManagedAdapters

_MAX_BODY_BYTES = 1 << 20


class WantedAdapters(msgspec.Struct, forbid_unknown_fields=True):
    """The body. It has the whole list, so that a repeated request changes nothing."""

    adapters: dict[str, str]  # name -> folder in PEFT's format, or hf://ORG/NAME


async def put_adapters(request: Request, managed: ManagedAdapters | None) -> Response:
    """Returns 202 with the state of each adapter; /status shows later states. Raises ApiError 400, 403 or 413.

    `managed`: None if the setting `managed_adapters` is off.
    """
    if managed is None:
        raise ApiError(
            403,
            "PUT /adapters needs the setting managed_adapters, which is off; start the server with --managed-adapters",
            code="adapters_fixed",
        )
    body = await read_body(request, _MAX_BODY_BYTES, lambda num: None)
    try:
        wanted = msgspec.json.decode(body, type=WantedAdapters).adapters
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ApiError(400, f'{error}; send {{"adapters": {{"NAME": "/FOLDER"}}}}', param="adapters") from error
    if len(wanted) > MOST_ADAPTERS:
        raise ApiError(
            400,
            f"{len(wanted)} adapters given, at most {MOST_ADAPTERS} allowed; send a shorter list",
            param="adapters",
        )
    for name, path in wanted.items():
        if not path.startswith("hf://") and not path.removeprefix("file://").startswith("/"):
            raise ApiError(
                400,
                f"adapters: {shown(name)}: {shown(path)} is not an absolute path; give the whole path of the "
                "adapter's folder, from / on, or hf://ORG/NAME",
                param="adapters",
            )
    managed.want(wanted)
    return JSONResponse({"adapters": [each.model_dump() for each in managed.reports()]}, 202)
