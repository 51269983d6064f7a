"""A Hugging Face hub with one repository, on a port of this machine, for tests of downloads and what can fail."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve_hub(repository: str, folder: Path) -> Iterator[str]:
    """The URL of a hub with `folder` as the public `repository`; `gated/model` needs access, nothing else exists."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            files = {entry.name: entry.read_bytes() for entry in sorted(folder.iterdir())}
            if "gated/model" in path:
                self._answer(403, {"X-Error-Code": "GatedRepo"}, b"{}")
            elif repository not in path:
                self._answer(404, {"X-Error-Code": "RepoNotFound"}, b"{}")
            elif path.startswith(f"/api/models/{repository}/revision/"):
                if path.rsplit("/", 1)[-1] not in ("main", COMMIT):
                    self._answer(404, {"X-Error-Code": "RevisionNotFound"}, b"{}")
                    return
                info = {"id": repository, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
                self._answer(200, {"Content-Type": "application/json"}, json.dumps(info).encode())
            elif path.startswith(f"/api/models/{repository}/tree/"):
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in files.items()
                ]
                self._answer(200, {"Content-Type": "application/json"}, json.dumps(tree).encode())
            elif (name := path.rsplit("/", 1)[-1]) in files:
                headers = {"ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"', "X-Repo-Commit": COMMIT}
                self._answer(200, headers, files[name])
            else:
                self._answer(404, {"X-Error-Code": "EntryNotFound"}, b"")

        do_HEAD = do_GET

        def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet: a test's output is its own."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
