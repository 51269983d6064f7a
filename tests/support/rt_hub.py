"""A Hugging Face hub with a few repositories, on a port of this machine, for tests of downloads and their failures."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve_hub(
    repository: str,
    folder: Path,
    *,
    token: str = "",
    tls: tuple[Path, Path] | None = None,
    seen: list[str] | None = None,
    others: Mapping[str, Path] | None = None,
) -> Iterator[str]:
    """The URL of a hub with `folder` as `repository`. With `token`, the repository is private: requests need the token.

    `others`: further repositories, name -> folder.

    The hub always has these repositories, too: `gated/model` refuses requests until its terms are accepted,
    `forbidden/model` refuses every token, `broken/model` answers with server errors, and `slow/model` answers too late.
    All others are unknown. `tls`: (certificate, key) of the server. `seen`: receives "METHOD path" of each request.
    """
    is_over = threading.Event()
    folders = {repository: folder, **(others or {})}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            given = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if seen is not None:
                seen.append(f"{self.command} {path}")
            named = next((name for name in folders if f"/{name}/" in path), "")
            revision = re.search(rf"/{named}/(?:resolve|revision|tree)/([^/]+)", path)
            files = {entry.name: entry.read_bytes() for entry in sorted(folders[named].iterdir())} if named else {}
            if "gated/model" in path:
                self._answer(403, {"X-Error-Code": "GatedRepo"}, b"{}")
            elif "forbidden/model" in path:
                self._answer(403, {}, b"{}")
            elif "broken/model" in path:
                self._answer(503, {"X-Request-Id": secrets.token_hex(4)}, b"{}")
            elif "slow/model" in path:
                is_over.wait()
            elif token and given and given != token:
                self._answer(401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b"{}")
            elif token and not given:
                self._answer(401, {"X-Error-Code": "RepoNotFound"}, b"{}")
            elif not named:
                self._answer(404, {"X-Error-Code": "RepoNotFound"}, b"{}")
            elif revision is not None and revision[1] not in ("main", COMMIT):
                self._answer(404, {"X-Error-Code": "RevisionNotFound"}, b"{}")
            elif path.startswith(f"/api/models/{named}/revision/"):
                info = {"id": named, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
                self._answer(200, {"Content-Type": "application/json"}, json.dumps(info).encode())
            elif path.startswith(f"/api/models/{named}/tree/"):
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
            """Logs nothing, to keep the output of tests short."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_address[1]}"
    finally:
        is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()
