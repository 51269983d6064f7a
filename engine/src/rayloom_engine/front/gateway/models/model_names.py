"""ModelNames: finds the model for the name in a request, and refuses unknown names and keys."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from rayloom_engine.common.json_words import shown
from rayloom_engine.errors import RequestError
from rayloom_engine.front.gate import no_valid_key
from rayloom_engine.front.gateway.adapter_names import AdapterState
from rayloom_engine.front.gateway.models.key_ring import KeyHolder, KeyRing
from rayloom_engine.front.gateway.models.model_field import RoutedFields
from rayloom_engine.front.gateway.models.models_document import AliasEntry, ModelsDocument
from rayloom_engine.front.gateway.models.target_choice import target_by_draw, target_by_key
from rayloom_engine.front.http.errors import ApiError
from rayloom_engine.front.http.tenant import owner_of_key, tenant_of_key


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRoute:
    """The model that answers a request, and the identity of its sender."""

    model: str
    alias: str | None  # the alias in the request; None: the request has the model's name
    tenant: str  # name of the key's owner for fair shares; empty if there is one key (`tenant_of_key`)
    owner: str  # name of the key's owner for cached prefixes (`owner_of_key`)
    adapter: str | None = None  # the LoRA adapter in the request; None: the request has a model's name or an alias


class ModelNames:
    """The models and aliases of a document, by name. Immutable: a new document needs a new object."""

    def __init__(
        self,
        document: ModelsDocument,
        ring: KeyRing,
        draw: Callable[[], float] = random.random,
        adapter_state: Callable[[str, str], AdapterState] = lambda model, name: "unknown",
        check_adapters_known: Callable[[str, str], None] = lambda model, name: None,
    ) -> None:
        """`ring` has the keys of `key_files(document)`. `draw` returns random numbers in [0, 1).

        `adapter_state` returns the present state of a LoRA adapter, by the names of model and adapter.
        `check_adapters_known` raises ApiError 503 if it is not known yet whether the model has the adapter.
        """
        self.document = document
        self._ring = ring
        self._draw = draw
        self._adapter_state = adapter_state
        self._check_adapters_known = check_adapters_known
        self._sources = {name: _sources(document, name) for name in document.models}

    def usable(self, caller: KeyHolder) -> list[str]:
        """Returns the names that `caller` may use: models, then aliases."""
        document = self.document
        models = [name for name in document.models if self._ring.accepts(name, caller)]
        aliases = [name for name, alias in document.aliases.items() if self._may_use_alias(name, alias, caller)]
        return [*models, *aliases]

    def route(self, fields: RoutedFields, caller: KeyHolder, repeat_key: str | None = None) -> ModelRoute:
        """Returns the model for a request. `repeat_key`: the request's Idempotency-Key, else its X-Request-Id.

        Raises ApiError 401, 404 or 503, and RequestError if the request must name a model. To a caller with an unknown
        key, a name that needs a key and a name that does not exist look the same.
        """
        document = self.document
        name = fields.model
        if name is None:
            name = self._only_model(caller)
        alias = document.aliases.get(name)
        if alias is not None:
            target = self._target(name, alias, fields.user, repeat_key)
            source = target if alias.api_key_file is None else name
            return self._checked(target, name, source, caller)
        if name in document.models:
            return self._checked(name, None, name, caller)
        if (owner := self._owner_of_adapter(name, caller)) is not None:
            return self._checked(owner, None, owner, caller, adapter=name)
        if not caller.names and not self._ring.is_open:
            raise no_valid_key()
        for each in document.models:
            if self._ring.accepts(each, caller):
                self._check_adapters_known(each, name)
        raise ApiError(
            404,
            f"the model {shown(name)} does not exist; {self._advice(caller, 'this server has')}",
            param="model",
            code="model_not_found",
        )

    def _owner_of_adapter(self, name: str, caller: KeyHolder) -> str | None:
        """Returns the model that has the LoRA adapter `name` and that the caller may use; None if there is none.

        A model whose engines have reported the adapter precedes models that only declare it. Raises RequestError if
        several models have such an adapter.
        """
        found = {
            each: self._adapter_state(each, name) for each in self.document.models if self._ring.accepts(each, caller)
        }
        owners = [each for each, state in found.items() if state == "reported"]
        owners = owners or [each for each, state in found.items() if state == "declared"]
        if len(owners) > 1:
            raise RequestError(
                f"{shown(name)} is the name of a LoRA adapter of each of the models {', '.join(map(shown, owners))}; "
                "rename the adapter in spec.model.adapters of all but one of them, or use an API key that only one of "
                "them accepts",
                "model",
            )
        return owners[0] if owners else None

    def num_keys(self, model: str) -> int:
        """Returns the number of different keys with which requests reach `model`."""
        return self._ring.count(self._sources[model])

    def key_problem(self, model: str) -> str:
        """Returns why a key file of `model` or of an alias for it cannot be used; empty if all files can be used."""
        problems = (self._ring.problem(name) for name in sorted(self._sources[model]))
        return "; ".join(problem for problem in problems if problem)

    def reachable(self, caller: KeyHolder) -> set[str]:
        """Returns the models that requests of `caller` may reach, under their own names or by an alias."""
        names = self.usable(caller)
        by_alias = (self.document.aliases[name] for name in names if name not in self.document.models)
        # An alias without a key file adds no model: its targets need the models' own keys.
        with_own_keys = (alias for alias in by_alias if alias.api_key_file is not None)
        targets = {name for alias in with_own_keys for name, weight in alias.weights if weight}
        return targets | {name for name in names if name in self.document.models}

    def _only_model(self, caller: KeyHolder) -> str:
        names = list(self.document.models)
        if len(names) == 1:
            return names[0]
        raise RequestError(f"model is missing; {self._advice(caller, 'set it to one of')}", "model")

    def _advice(self, caller: KeyHolder, before_names: str) -> str:
        names = [shown(name) for name in self.usable(caller)]
        if not names:
            return "no model may be used with this API key; ask the operator of this server for another key"
        return f"{before_names} {', '.join(names)}"

    def _target(self, name: str, alias: AliasEntry, user: str | None, repeat_key: str | None) -> str:
        # The hashed key does not contain the alias's name. So two aliases with equal targets send a user to the same
        # model.
        if alias.sticky_by == "user" and user:
            return target_by_key(alias.weights, f"user {user}")
        if repeat_key is not None:
            return target_by_key(alias.weights, f"repeat {repeat_key}")
        return target_by_draw(alias.weights, self._draw())

    def _checked(
        self, model: str, alias: str | None, source: str, caller: KeyHolder, *, adapter: str | None = None
    ) -> ModelRoute:
        """Returns the route to `model`. Raises ApiError 401 unless the caller has a key that is valid for `source`."""
        if not self._ring.accepts(source, caller):
            raise no_valid_key()
        num_keys = self.num_keys(model) if self._ring.needs_key(source) else 0
        return ModelRoute(
            model=model,
            alias=alias,
            tenant=tenant_of_key(caller.key, num_keys),
            owner=owner_of_key(caller.key, num_keys),
            adapter=adapter,
        )

    def _may_use_alias(self, name: str, alias: AliasEntry, caller: KeyHolder) -> bool:
        if alias.api_key_file is not None:
            return self._ring.accepts(name, caller)
        return any(self._ring.accepts(model, caller) for model, weight in alias.weights if weight)


def key_files(document: ModelsDocument) -> dict[str, str | None]:
    """Returns the names with keys of their own, and their files: all models, and the aliases that name a file."""
    models = {name: entry.api_key_file for name, entry in document.models.items()}
    aliases = {name: alias.api_key_file for name, alias in document.aliases.items() if alias.api_key_file is not None}
    return {**models, **aliases}


def _sources(document: ModelsDocument, model: str) -> frozenset[str]:
    """Returns the names that have their own keys and lead to `model`: the model itself, and aliases."""
    aliases = (
        name
        for name, alias in document.aliases.items()
        if alias.api_key_file is not None and any(target.model == model for target in alias.targets)
    )
    return frozenset((model, *aliases))
