"""FakeKube: a Kube whose cluster is a dictionary, with watches, and with refusals that a test sets.

FakeKube collects no garbage and runs no pods: tests simulate both with `put` and `remove`. Its only controller writes
the EndpointSlices of pods with the route label.
"""

import asyncio
import copy

import msgspec

from rayloom_operator.kube.client import CONFLICT, INVALID, NOT_FOUND, KubeError, Recreated
from rayloom_operator.names import ROUTE_LABEL, SERVICE_LABEL, path_of

KUBERAY = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/rayclusters.ray.io"


def make_definition(*missing, versions=("v1",)):
    """The part of KubeRay's CRD of RayClusters that the operator reads, without the fields in `missing`."""

    def fields(*names, **parts):
        names = {name: {"type": "string"} for name in names} | parts
        return {"type": "object", "properties": {name: part for name, part in names.items() if name not in missing}}

    pods = fields("groupName", "replicas", "rayStartParams", "template")
    spec = fields(
        "rayVersion",
        "enableInTreeAutoscaling",
        authOptions=fields("mode", "secretName"),
        headGroupSpec=pods,
        workerGroupSpecs={"type": "array", "items": pods},
    )
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "rayclusters.ray.io"},
        "spec": {"versions": [{"name": name, "served": True, "schema": schema} for name in versions]},
    }


class FakeKube:
    def __init__(self):
        self.objects = {}  # path -> object
        self.calls = []  # (verb, path) of each write request
        self.refusals = {}  # (verb, end of a path) -> KubeError to raise
        self.statuses = []  # the written statuses
        self.lists = []  # paths
        self.gets = []  # paths
        self.graces = {}  # path -> grace period of the last deletion
        self.page_size = 250  # objects
        self.turn_page = lambda path: None  # called with the path between two pages of a list; may raise
        self.version = 100
        self.may_write = lambda: True
        self.lists_endpoints = True
        # If False, `managedFields` does not name the writer of `replicas`. The real API server omits this writer after
        # an apply that created the object without `replicas`.
        self.records_scale_manager = True
        self._annotated = {}  # path -> names of the annotations in the last apply
        self._watches = []  # (path of the collection, params, queue)
        self._events = []  # (version, kind of event, path, object)
        self.put(make_definition())

    def put(self, manifest):
        """Stores the object with a uid, a version and a generation, and sends an event to the watches."""
        path = path_of(manifest)
        self.version += 1
        found = copy.deepcopy(manifest)
        known = self.objects.get(path, {"metadata": {}})
        old, generation = known["metadata"], found["metadata"].get("generation", 0)
        found["metadata"].setdefault("uid", old.get("uid", f"uid-{self.version}"))
        found["metadata"]["generation"] = max(
            generation, old.get("generation", 0) + (_without_status(found) != _without_status(known))
        )
        found["metadata"]["resourceVersion"] = str(self.version)
        self.objects[path] = found
        self._tell("MODIFIED" if old else "ADDED", path, found)
        self._note_endpoints(found)
        return copy.deepcopy(found)

    def remove(self, path):
        found = self.objects.pop(path)
        self.version += 1
        found = found | {"metadata": found["metadata"] | {"resourceVersion": str(self.version)}}
        self._tell("DELETED", path, found)
        self._note_endpoints(found)

    def _note_endpoints(self, changed):
        """Updates the EndpointSlice of a service after a change of one of its pods."""
        meta = changed["metadata"]
        name = meta.get("labels", {}).get(SERVICE_LABEL)
        if changed["kind"] != "Pod" or name is None or not self.lists_endpoints:
            return
        wanted = {SERVICE_LABEL: name, ROUTE_LABEL: "true"}
        pods = [
            each
            for each in self.objects.values()
            if each["kind"] == "Pod"
            and each["metadata"]["namespace"] == meta["namespace"]
            and wanted.items() <= each["metadata"]["labels"].items()
        ]
        endpoints = [
            {"conditions": {"ready": _is_ready(each)}, "targetRef": {"kind": "Pod", "uid": each["metadata"]["uid"]}}
            for each in pods
            if each["status"].get("podIP")
        ]
        labels = {SERVICE_LABEL: name, "kubernetes.io/service-name": name}
        where = {"name": f"{name}-abc", "namespace": meta["namespace"], "labels": labels}
        slices = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": where}
        known = self.objects.get(path_of(slices), {})
        if known.get("endpoints", []) != endpoints:
            self.put(slices | {"endpoints": endpoints})

    def named(self, kind):
        """Names of the objects of a kind."""
        return [each["metadata"]["name"] for each in self.objects.values() if each["kind"] == kind]

    def path(self, kind):
        (path,) = [path for path, each in self.objects.items() if each["kind"] == kind]
        return path

    async def apply(self, manifest, *, force=True):
        path = path_of(manifest)
        self._note("apply", path)
        if not force and path in self.objects:
            raise KubeError(CONFLICT, "conflict")
        known = self.objects.get(path, {"metadata": {}})
        if manifest["metadata"].get("uid", known["metadata"].get("uid")) != known["metadata"].get("uid"):
            raise KubeError(CONFLICT, "uid mismatch: no object of that name has the uid that was given")
        # An apply does not change the fields of other writers.
        kept = {"status": known["status"]} if "status" in known else {}
        wanted = manifest["metadata"]
        ours, self._annotated[path] = self._annotated.get(path, ()), tuple(wanted.get("annotations", ()))
        theirs = {name: text for name, text in known["metadata"].get("annotations", {}).items() if name not in ours}
        annotations = theirs | wanted.get("annotations", {})
        meta = wanted | ({"annotations": annotations} if annotations else {})
        return self.put(kept | manifest | {"metadata": meta})

    async def replace_status(self, manifest):
        path = path_of(manifest)
        self._note("patch", f"{path}/status")
        known = self.objects.get(path)
        if known is None:
            raise KubeError(NOT_FOUND, "not found")
        if known["metadata"]["uid"] != manifest["metadata"]["uid"]:
            raise Recreated(await self.get(path))
        self.statuses.append(manifest["status"])
        return self.put(known | {"status": manifest["status"]})

    async def scale(self, path, version, replicas, manager):
        self._note("patch", f"{path}/scale")
        known = self.objects[path]
        if known["metadata"]["resourceVersion"] != version:
            raise KubeError(INVALID, "the server rejected our request due to an error in our request")
        fields = {"manager": manager, "time": "2026-01-01T00:00:00Z", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
        known = copy.deepcopy(known)
        if self.records_scale_manager:
            known["metadata"]["managedFields"] = [fields]
        self.put(known | {"spec": known["spec"] | {"replicas": replicas}})

    async def patch(self, path, body):
        """Applies a merge patch to a Lease, or to the labels of a gateway pod. Ignores patches of other objects."""
        self._note("patch", path)
        known = self.objects.get(path)
        if known is not None and "rayloom.dev/llmgateway" in known["metadata"].get("labels", {}):
            labels = known["metadata"]["labels"] | body["metadata"]["labels"]
            return self.put(known | {"metadata": known["metadata"] | {"labels": labels}})
        if known is None or known["kind"] != "Lease":
            return {}
        if body["metadata"]["resourceVersion"] != known["metadata"]["resourceVersion"]:
            raise KubeError(CONFLICT, "the object has been modified")
        return self.put(known | {"spec": body["spec"]})

    async def close(self):
        pass

    async def get(self, path):
        self.gets.append(path)
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

    async def replace(self, manifest):
        self._note("update", path_of(manifest))
        self.put(manifest)

    async def delete(self, path, uid="", *, grace_s=None, is_foreground=False):
        self._note("delete", path)
        self.graces[path] = grace_s
        if path in self.objects and uid in ("", self.objects[path]["metadata"]["uid"]):
            self.remove(path)

    async def list(self, path, params):
        self.lists.append(path)
        self._refuse("list", path)
        found = [each for at, each in self.objects.items() if _is_of(at, path) and _is_chosen(each, params)]
        return copy.deepcopy(found), str(self.version)

    async def pages(self, path, params, shape=dict):
        found, version = await self.list(path, params)
        found = msgspec.convert(found, list[shape])
        yield found[: self.page_size], version
        for first in range(self.page_size, len(found), self.page_size):
            self.turn_page(path)
            yield found[first : first + self.page_size], version

    async def watch(self, path, params, version, shape=dict):
        """Yields the events after `version`, the version of a list. Without `version`, it yields only later events."""
        queue = asyncio.Queue()
        self._watches.append((path, params, queue))
        for at, kind, where, found in self._events:
            if at > int(version or self.version) and _is_of(where, path) and _is_chosen(found, params):
                queue.put_nowait((kind, copy.deepcopy(found)))
        while True:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            kind, document = found
            yield kind, msgspec.convert(document, shape)

    def end_watches(self, end, error):
        """Ends, with `error`, the watches of collections whose paths end with `end`."""
        for path, _, queue in self._watches:
            if path.endswith(end):
                queue.put_nowait(error)

    def _note(self, verb, path):
        self.calls.append((verb, path))
        self._refuse(verb, path)

    def _refuse(self, verb, path):
        for (refused, end), error in self.refusals.items():
            if verb == refused and path.endswith(end):
                raise error

    def _tell(self, kind, path, found):
        self._events.append((self.version, kind, path, found))
        for collection, params, queue in self._watches:
            if _is_of(path, collection) and _is_chosen(found, params):
                queue.put_nowait((kind, copy.deepcopy(found)))


def _is_ready(pod):
    return any((each["type"], each["status"]) == ("Ready", "True") for each in pod["status"].get("conditions", ()))


def _without_status(found):
    return {name: part for name, part in found.items() if name not in ("metadata", "status")}


def _is_of(path, collection):
    """True if the object at `path` is in this collection, of one namespace or of the whole cluster."""
    plural = path.split("/")[-2]
    start = collection.removesuffix(f"/{plural}")
    return collection.endswith(f"/{plural}") and path.startswith(start + "/")


def _is_chosen(found, params):
    labels = found["metadata"].get("labels", {})
    return params.get("labelSelector", "") in ("", *labels, *(f"{name}={text}" for name, text in labels.items()))
