"""ModelApi: the handlers of all endpoints, for the service of one model.

A handler finds the service as `request.app.state.service`. On a port with one model, `request.app` is the port's
application, which has this state. On a gateway with several models, `request.app` is the ModelApi of the chosen model.
"""

from __future__ import annotations

from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response

from rayloom_engine.front.document.api_route import Endpoint, Handler
from rayloom_engine.front.idempotency.kept_answers import KeptAnswers, keep_limits
from rayloom_engine.front.operations.service import Service
from rayloom_engine.front.routes import ROUTES
from rayloom_engine.front.ui.routes import STATUS_PATH, ui_status

UI_STATUS: Endpoint = ("GET", STATUS_PATH)


class ModelApi:
    """The handlers of one model, with the answers that are kept for repeats."""

    def __init__(self, service: Service) -> None:
        self.state = State({"service": service})
        config = service.config
        self.kept_answers = KeptAnswers(keep_limits(config), config.max_body_bytes, service.lifecycle, service.metrics)
        self.handlers: dict[Endpoint, Handler] = {
            route.endpoint: self._repeatable(_counted(route.handler)) if route.is_generation else route.handler
            for route in ROUTES
        }
        self.handlers[UI_STATUS] = ui_status

    def continue_answers(self, before: ModelApi) -> None:
        """Uses the kept answers of `before`, the handlers of the same model with other settings."""
        service = self.state.service
        config = service.config
        self.kept_answers = before.kept_answers
        self.kept_answers.change(keep_limits(config), config.max_body_bytes, service.lifecycle, service.metrics)

    def _repeatable(self, handler: Handler) -> Handler:
        """Returns `handler` with kept answers: a client may repeat a request after its connection broke."""

        async def answer(request: Request) -> Response:
            return await self.kept_answers.answer(request, handler)

        return answer


def _counted(handler: Handler) -> Handler:
    """Counts errors that `handler` raises before an answer begins. Repeats that read a kept answer do not count.

    `Generation.failed` counts errors in the middle of a stream.
    """

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            request.app.state.service.metrics.observe_failure(error)
            raise

    return handle
