"""Proofs by which a front and a core show each other that they have the service's key. The key never crosses the wire.

Over TCP the core speaks first:

    core  -> front  FrontChallenge(nonce, version)
    front -> core   Hello(version, nonce of its own, proof)
    core  -> front  Welcome(version, proof)

A proof is an HMAC over both nonces, so it is invalid on any other connection. The HMAC also covers the version. So an
attacker between front and core cannot make them use an older version.
"""

from __future__ import annotations

import hashlib
import hmac

from rayloom_engine.protocol.messages import OLDEST_VERSION, PROTOCOL_VERSION, Hello, Welcome


def front_proof(key: str, challenge_nonce: str, hello: Hello) -> str:
    """Returns the proof for `hello`, the answer to a challenge."""
    return _proof(key, f"front/{challenge_nonce}/{hello.nonce}/{hello.version}/{hello.front_id}")


def core_proof(key: str, challenge_nonce: str, front_nonce: str, welcome: Welcome) -> str:
    """Returns the proof for `welcome`, the answer to a Hello with `front_nonce`."""
    return _proof(key, f"core/{challenge_nonce}/{front_nonce}/{welcome.version}")


def is_same_proof(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def common_version(theirs: int, ours: int = PROTOCOL_VERSION, oldest: int = OLDEST_VERSION) -> int | None:
    """Returns the newest version that both sides speak, or None if the other side's version is too old.

    Every version also speaks the version before it. So a peer that is newer by one version speaks `ours`.
    """
    return None if theirs < oldest else min(theirs, ours)


def _proof(key: str, text: str) -> str:
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()
