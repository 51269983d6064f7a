"""The annotation by which a restarted operator knows that it need not write the Secrets of a service again. Pure.

The operator has no right to read Secrets. So it writes a digest of the Secrets into an annotation of one of its other
objects: of the Service NAME-engines of an LLMService, or of the ServiceAccount of an LLMGateway. It writes the digest
after the Secrets. If the object has the digest, the operator has written these Secrets, and no others since.

The digest does not show whether somebody else has changed or deleted a Secret. So every object is applied again each
half hour, and every 10 s while a pod waits for a volume. The Secret with a service's key is only recreated if it is
deleted, because engines have read the key.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterable

from rayloom_operator.names import Manifest

SECRETS_ANNOTATION = "rayloom.dev/secrets"
# Kinds of the objects that have digests.
HOLDER_KINDS = ("Service", "ServiceAccount")
_DIGITS = 32


def with_digest_of(secrets: Iterable[Manifest], holder: Manifest, operator_key: bytes) -> Manifest:
    """Returns `holder` with the digest of the manifests `secrets`.

    Everyone who may read `holder` may read the digest. It does not help anyone to guess the content of a Secret,
    because it is computed with the operator's key.
    """
    content = {each["metadata"]["name"]: each for each in secrets}
    # "secrets/{" begins no other text for which the operator's key is used: uids have no braces.
    text = f"secrets/{json.dumps(content, sort_keys=True)}"
    return _annotated(holder, hmac.digest(operator_key, text.encode(), "sha256").hex()[:_DIGITS])


def without_digest(holder: Manifest) -> Manifest:
    """Returns `holder` with an empty digest, which a restarted operator does not accept.

    The annotation is emptied and not left out. An apply without the annotation would not remove a digest that another
    client has applied as well, for example from a copy of the object.
    """
    return _annotated(holder, "")


def digest_in(document: Manifest) -> str:
    """Returns the digest in a manifest, or in an object that the API server returned; empty if it has none."""
    return str(document["metadata"].get("annotations", {}).get(SECRETS_ANNOTATION, ""))


def has_digest(document: Manifest) -> bool:
    """Returns whether a manifest, or an object that the API server returned, has a digest that is not empty."""
    return bool(digest_in(document))


def _annotated(holder: Manifest, digest: str) -> Manifest:
    meta = holder["metadata"]
    annotations = {**meta.get("annotations", {}), SECRETS_ANNOTATION: digest}
    return holder | {"metadata": meta | {"annotations": annotations}}
