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
    # uid of the LLMService that must own the object; empty if this is known. The object is then read before it is
    # deleted, because another owner's object may have its name.
    owner_uid: str = ""
