"""ModelEndpoints: the handlers of a gateway's API port. Most handlers find a request's model and call its handler.

request                         model
a body                          its field `model`
GET with ?model=NAME            that name: /tokenizer_info, /server_info, /ui/status
/v1/models                      all names that the key may use
/health, /ready, /load, ...     the process: one model that accepts requests is enough
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rayloom_engine.front.document.api_route import ApiRoute, Endpoint, Handler
from rayloom_engine.front.gateway.models.documents import adapter_cards, card
from rayloom_engine.front.gateway.models.key_ring import KeyHolder
from rayloom_engine.front.gateway.models.model_field import RoutedFields, routed_fields
from rayloom_engine.front.gateway.models.running_models import RunningModels
from rayloom_engine.front.http.body import hold_body, parsed
from rayloom_engine.front.http.headers import api_key
from rayloom_engine.front.idempotency.request_name import IDEMPOTENCY_KEY, checked_key
from rayloom_engine.front.model_api import UI_STATUS
from rayloom_engine.front.routes import ROUTES

_BY_QUERY = ("/tokenizer_info", "/server_info")


class ModelEndpoints:
    """The handlers of the API port, by endpoint."""

    def __init__(self, models: RunningModels) -> None:
        self._models = models
        own: dict[str, Handler] = {"/v1/models": self._list_models, "/v1/models/{model:path}": self._get_model}
        self.handlers: dict[Endpoint, Handler] = {
            route.endpoint: own.get(route.path) or self._handler(route) for route in ROUTES
        }
        self.handlers[UI_STATUS] = self._ui_status

    def _handler(self, route: ApiRoute) -> Handler:
        if route.request is not None:
            return self._by_body(route.endpoint)
        if route.path in _BY_QUERY:
            return self._by_query(route.endpoint)
        return route.handler  # handlers find the state of all models as `request.app.state.service`

    def _by_body(self, endpoint: Endpoint) -> Handler:
        async def answer(request: Request) -> Response:
            models = self._models
            models.lifecycle.check_accepts()
            repeat_key = _repeat_key(request)
            body = await hold_body(request, models.max_body_bytes(self._caller(request)))
            try:
                fields = await parsed(body.data, request.state.tenant, routed_fields)
                # The key is looked up again, because it may have been revoked while the body arrived.
                route = models.names.route(fields, self._caller(request), repeat_key)
            except BaseException:
                body.drop()
                raise
            return await models.models[route.model].answer(request, endpoint, route, body)

        return answer

    def _by_query(self, endpoint: Endpoint) -> Handler:
        async def answer(request: Request) -> Response:
            fields = RoutedFields(request.query_params.get("model"))
            route = self._models.names.route(fields, self._caller(request))
            return await self._models.models[route.model].answer(request, endpoint, route)

        return answer

    async def _ui_status(self, request: Request) -> Response:
        """Answers for the model that the page names, or for the first model in the list."""
        caller = self._caller(request)
        usable = self._models.names.usable(caller)
        name = request.query_params.get("model") or next(iter(usable), None)
        route = self._models.names.route(RoutedFields(name), caller)
        return await self._models.models[route.model].answer(request, UI_STATUS, route)

    async def _list_models(self, request: Request) -> Response:
        names = self._models.names
        aliases = names.document.aliases
        models = self._models.models
        usable = names.usable(self._caller(request))
        cards = [card(name, aliases.get(name), models, self._models.created) for name in usable]
        for name in usable:
            if name in models:
                cards += adapter_cards(models[name])
        return JSONResponse({"object": "list", "data": cards})

    async def _get_model(self, request: Request) -> Response:
        names = self._models.names
        name: str = request.path_params["model"]
        caller = self._caller(request)
        if name not in names.usable(caller):
            # raises ApiError for a name that is unknown or needs another key
            owner = self._models.models[names.route(RoutedFields(name), caller).model]
            found = next((each for each in adapter_cards(owner) if each["id"] == name), None)
            if found is None:
                owner.service.adapters.check_known(name)
                raise AssertionError(f"{name} is declared, so check_known raises")
            return JSONResponse(found)
        return JSONResponse(card(name, names.document.aliases.get(name), self._models.models, self._models.created))

    def _caller(self, request: Request) -> KeyHolder:
        return self._models.ring.caller(api_key(request.headers))


def _repeat_key(request: Request) -> str | None:
    """Returns a name that a request and its repeats share: the Idempotency-Key, else the client's X-Request-Id."""
    given = request.headers.get(IDEMPOTENCY_KEY)
    if given is not None:
        return checked_key(given)
    http_id: str = request.state.request_id
    return http_id if request.headers.get("x-request-id") == http_id else None
