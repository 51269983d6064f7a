"""The settings of the operator process that decisions depend on."""

from __future__ import annotations

from dataclasses import dataclass, field

from rayloom_operator.api.spec import LLMService
from rayloom_operator.decide.permissions import Permissions
from rayloom_operator.decide.scaling.windows import Windows
from rayloom_operator.objects.companions import admin_token
from rayloom_operator.objects.tls.files import TlsMode
from rayloom_operator.resolve.resolved import Hub


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings. They are read once, at the start of the operator process."""

    engine_image: str  # image of services whose spec names no image
    operator_key: bytes  # the key from which admin tokens are derived
    previous_key: bytes = b""  # the operator key that was used before the present one; empty if there was none
    pod_tls: TlsMode = "off"  # TLS between gateway pods and engines
    namespace: str = ""  # namespace of the operator's own pods; empty for an operator outside the cluster
    hub: Hub = field(default_factory=Hub)
    permissions: Permissions = field(default_factory=Permissions)
    windows: Windows = field(default_factory=Windows)  # windows of the scaler

    def admin_tokens(self, namespace: str, service_uid: str, replica: str) -> tuple[str, str]:
        """Returns the tokens of an engine replica's admin port, derived from the current and from the previous key.

        The second token is "" if there is no previous key.
        """
        token = admin_token(self.operator_key, namespace, service_uid, replica)
        old = admin_token(self.previous_key, namespace, service_uid, replica) if self.previous_key else ""
        return token, old

    def image(self, service: LLMService) -> str:
        """Returns the image of the service's engine pods."""
        return service.spec.engine.image or self.engine_image
