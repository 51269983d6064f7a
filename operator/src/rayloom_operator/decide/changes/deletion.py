"""An object to delete."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deletion:
    """An object to delete. If `uid` is given, an object of the same name but with another uid is not deleted."""

    path: str
    uid: str = ""
    grace_s: int | None = None  # None: the object's own grace period
    is_foreground: bool = False  # the object stays, marked as deleted, until its dependents are gone
    # uid of the owner that this object must have. If the uid is given, the operator reads the object's owner before the
    # deletion, because an object of another owner may have the same name. Empty if the owner is known.
    owner_uid: str = ""
