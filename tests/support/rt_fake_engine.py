"""A fake `rayloom-engine` for tests of the operator: `rt_fake_engine.py serve --config FILE`, or `gateway`.

It opens the two ports of its config, and answers /status and one scripted chat stream. The environment variable
FAKE_ENGINE chooses a fault:

    (unset)     three statuses of start-up, then serving; ends on SIGINT
    crash       prints 40 lines and exits with code 3 before it opens a port
    failed      /status says failed, with a reason
    dies        exits with code 7 once it has answered a chat
    killed      kills itself with SIGKILL once it has answered a chat
    stubborn    ignores SIGINT and SIGTERM
    bad_sample  answers a chat with an error event
    silent      answers a chat with its first words only
    hangs       stays in the state `starting` for ever

A gateway behaves in the same way, and reports that all its engines serve.

FAKE_ENGINE_PIDS names a file. The engine appends a line with its process id and the id of a child in the same session.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SCENARIO = os.environ.get("FAKE_ENGINE", "")
CONFIG: dict[str, object] = {}
ANSWER = ("The capital", " of France", " is Paris.")
MODEL = {
    "name": "tiny",
    "source": "builtin://smollm2-135m",
    "commit": None,
    "architecture": "LlamaForCausalLM",
    "num_parameters": 134_515_008,
    "dtype": "bfloat16",
    "compute_dtype": "float32",
    "quantization": "none",
    "weight_bytes": 269_030_016,
    "max_model_len": 8192,
}


def phase(name: str, done: int, total: int, unit: str, finished: bool) -> dict[str, object]:
    return {"name": name, "seconds": 0.5, "done": done, "total": total, "unit": unit, "finished": finished}


STARTUP = (
    [phase("import", 0, 0, "", False)],
    [phase("import", 0, 0, "", True), phase("load", 135_000_000, 270_000_000, "bytes", False)],
    [phase("import", 0, 0, "", True), phase("load", 270_000_000, 270_000_000, "bytes", True)],
)


def status(state: str, startup: list[dict[str, object]], reason: str = "") -> dict[str, object]:
    return {
        "version": "v1",
        "engine_version": "0",
        "state": state,
        "reason": reason,
        "executor": "uni",
        "epoch": 1,
        "step": 0,
        "last_token_age_seconds": None,
        "uptime_seconds": 1.0,
        "model": MODEL if state == "serving" else None,
        "startup": startup,
        "ranks": [],
        "requests": {"in_flight": 0, "running": 0, "waiting": 0, "finished": 0, "failed": 0, "first_token_seconds": {}},
        "kv_cache": {"num_blocks": 1, "num_free_blocks": 1, "block_size": 16, "usage": 0.0},
        "recoveries": [],
        "api_url": "",
    }


class Handler(BaseHTTPRequestHandler):
    num_statuses = 0

    def do_GET(self) -> None:
        if self.path == "/engines":
            engines = [{"name": name, "state": "serving"} for name in CONFIG["engines"]]
            self._send(200, json.dumps({"engines": engines}).encode())
            return
        index = min(Handler.num_statuses, len(STARTUP) - 1)
        is_up = Handler.num_statuses >= len(STARTUP) and SCENARIO != "hangs"
        Handler.num_statuses += 1
        if SCENARIO == "failed":
            document = status("failed", STARTUP[0], "the weights are broken")
        else:
            document = status("serving" if is_up else "starting", STARTUP[index])
        self._send(200, json.dumps(document).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print("asked:", json.dumps(body, sort_keys=True), self.headers.get("Authorization", "-"), flush=True)
        events: list[dict[str, object]] = [{"choices": [{"index": 0, "delta": {"role": "assistant"}}]}]
        events += [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in ANSWER]
        if SCENARIO == "bad_sample":
            events = [{"error": {"message": "out of luck"}}]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b": ping\n\n")
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if SCENARIO == "silent" and event is events[1]:
                self.wfile.flush()
                self.rfile.read()  # lasts until the client disconnects
                return
        self.wfile.write(b"data: [DONE]\n\n")
        self.wfile.flush()
        self.close_connection = True
        if SCENARIO == "dies":
            os._exit(7)
        if SCENARIO == "killed":
            os.kill(os.getpid(), signal.SIGKILL)

    def _send(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing, so that the log has only lines that tests expect."""


def main() -> None:
    config = CONFIG
    config.update(json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text()))
    MODEL["quantization"] = config.get("quantization", "none")
    print("config:", json.dumps(config, sort_keys=True), flush=True)
    if SCENARIO == "crash":
        for number in range(1, 41):
            print(f"line {number}", flush=True)
        sys.exit(3)
    handler = signal.SIG_IGN if SCENARIO == "stubborn" else lambda number, frame: os._exit(0)
    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)
    if "FAKE_ENGINE_PIDS" in os.environ:
        # This child outlives the engine, except if somebody kills the whole process group.
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        with Path(os.environ["FAKE_ENGINE_PIDS"]).open("a") as pids:
            pids.write(f"{os.getpid()} {child.pid}\n")
    for host, port in ((config["host"], config["port"]), (config["admin_host"], config["admin_port"])):
        server = ThreadingHTTPServer((host, port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        signal.pause()  # A signal ends this process or is ignored.


if __name__ == "__main__":
    main()
