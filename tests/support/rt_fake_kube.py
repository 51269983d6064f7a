"""A Kube whose cluster is a dictionary: objects, watches, and the refusals that a test asks for.

It collects no garbage and runs no pod: a test does both with `put` and `remove`.
"""

import asyncio
import copy

from rayloom_operator.kube import CONFLICT, NOT_FOUND, KubeError
from rayloom_operator.names import path_of


class FakeKube:
    def __init__(self):
        self.objects = {}  # path -> object
        self.calls = []  # (verb, path) of everything that was asked to change
        self.refusals = {}  # (verb, end of a path) -> KubeError
        self.statuses = []  # what was written as status
        self.lists = []  # paths
        self.version = 100
        self._watches = []  # (path of the collection, params, queue)

    def put(self, manifest):
        """The object is there, with a uid and a version, and those who watch hear of it."""
        path = path_of(manifest)
        self.version += 1
        found = copy.deepcopy(manifest)
        old = self.objects.get(path, {"metadata": {}})["metadata"]
        found["metadata"].setdefault("uid", old.get("uid", f"uid-{self.version}"))
        found["metadata"]["resourceVersion"] = str(self.version)
        self.objects[path] = found
        self._tell("MODIFIED" if old else "ADDED", path, found)
        return copy.deepcopy(found)

    def remove(self, path):
        self._tell("DELETED", path, self.objects.pop(path))

    def named(self, kind):
        """Names of the objects of a kind."""
        return [each["metadata"]["name"] for each in self.objects.values() if each["kind"] == kind]

    def path(self, kind):
        (path,) = [path for path, each in self.objects.items() if each["kind"] == kind]
        return path

    async def apply(self, manifest, subresource="", *, force=True):
        path = path_of(manifest)
        self._note("apply", path + subresource)
        if not subresource:
            if not force and path in self.objects:
                raise KubeError(CONFLICT, "conflict")
            return self.put(manifest)
        known = self.objects.get(path)
        if known is None:
            raise KubeError(NOT_FOUND, "not found")
        if known["metadata"]["uid"] != manifest["metadata"]["uid"]:
            raise KubeError(CONFLICT, "Precondition failed: UID in precondition: 1, UID in object meta: 2")
        self.statuses.append(manifest["status"])
        return self.put(known | {"status": manifest["status"]})

    async def patch(self, path, body):
        self._note("patch", path)
        return {}

    async def get(self, path):
        if path not in self.objects:
            raise KubeError(NOT_FOUND, "not found")
        return copy.deepcopy(self.objects[path])

    async def create(self, manifest):
        path = path_of(manifest)
        self._note("create", path)
        if path in self.objects:
            return False
        self.put(manifest)
        return True

    async def delete(self, path, uid=""):
        self._note("delete", path)
        if path in self.objects and uid in ("", self.objects[path]["metadata"]["uid"]):
            self.remove(path)

    async def list(self, path, params):
        self.lists.append(path)
        found = [each for at, each in self.objects.items() if _is_of(at, path) and _is_chosen(each, params)]
        return copy.deepcopy(found), str(self.version)

    async def watch(self, path, params, version):
        queue = asyncio.Queue()
        self._watches.append((path, params, queue))
        while True:
            yield await queue.get()

    def _note(self, verb, path):
        self.calls.append((verb, path))
        for (refused, end), error in self.refusals.items():
            if verb == refused and path.endswith(end):
                raise error

    def _tell(self, kind, path, found):
        for collection, params, queue in self._watches:
            if _is_of(path, collection) and _is_chosen(found, params):
                queue.put_nowait((kind, copy.deepcopy(found)))


def _is_of(path, collection):
    """Whether the object at `path` is of a cluster's or a namespace's collection."""
    plural = path.split("/")[-2]
    start = collection.removesuffix(f"/{plural}")
    return collection.endswith(f"/{plural}") and path.startswith(start + "/")


def _is_chosen(found, params):
    return params.get("labelSelector", "") in ("", *found["metadata"].get("labels", ()))
