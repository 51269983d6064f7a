"""The client for /status and a chat stream, with a server that has fixed answers."""

import http.server
import json
import threading

import pytest

from rayloom_operator.api.rollout.state import RequestCounts
from rayloom_operator.errors import EngineUnavailable
from rayloom_operator.local.client import base_url, read_status, stream_chat
from rt_poller import GOOD

HOST = "127.0.0.1"


@pytest.fixture
def answer():
    """Serves one fixed answer to all requests. Yields a function that sets the answer and returns the port."""
    servers = []

    def serve(body, code=200):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(code)
                self.end_headers()
                self.wfile.write(body.encode())

            do_POST = do_GET

            def log_message(self, *args):
                pass

        server = http.server.HTTPServer((HOST, 0), Handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return server.server_address[1]

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def chat(port):
    return list(stream_chat(HOST, port, model="m", prompt="p", max_tokens=4, api_key=None))


def chunk(content):
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": content}}]}) + "\n\n"


def test_pieces_arrive_in_order_without_comments(answer):
    port = answer(": ping\n\n" + chunk("Par") + ": ping\n\n" + chunk("") + chunk("is") + "data: [DONE]\n\n")

    assert chat(port) == ["Par", "is"]


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (chunk("Par"), 200, "the stream ended before [DONE]"),
        ('data: {"error": {"message": "no"}}\n\n', 200, "the engine sent an error: no"),
        ("data: {\n\n", 200, "the engine sent an event that is not a chat chunk: {"),
        (
            '{"error":\n {"message": "unknown model"}}',
            404,
            'the engine answered 404: {"error": {"message": "unknown model"}}',
        ),
    ],
)
def test_an_incomplete_stream_is_an_error(answer, body, code, message):
    port = answer(body, code)

    with pytest.raises(EngineUnavailable) as caught:
        chat(port)
    assert str(caught.value) == message


def test_no_server_means_no_status_yet(answer):
    with http.server.HTTPServer((HOST, 0), http.server.BaseHTTPRequestHandler) as server:
        port = server.server_address[1]

    assert read_status(HOST, port) is None


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("{}", 200, "/status has version None; this operator reads v1. Install an engine of its version"),
        ("[]", 200, "/status answered with a list; a JSON object was expected"),
        (
            '{"version": "v1", "model": null}',
            200,
            "/status does not have the schema of version v1: state: Field required",
        ),
        ("no", 401, "/status answered 401: no"),
    ],
)
def test_an_invalid_status_is_an_error(answer, body, code, message):
    port = answer(body, code)

    with pytest.raises(EngineUnavailable) as caught:
        read_status(HOST, port)
    assert str(caught.value) == message


def test_the_figures_of_the_analysis_come_from_the_requests(answer):
    first = {"0.5": 4, "1": 6, "2.5": 7, "+Inf": 7}
    requests = {"in_flight": 2, "running": 1, "waiting": 1, "finished": 9, "failed": 3, "first_token_seconds": first}
    said = read_status(HOST, answer(json.dumps(GOOD | {"requests": requests})))

    assert said.requests.in_flight == 2
    assert said.request_counts == RequestCounts(requests=9, errors=3, first_token_seconds=first)


@pytest.mark.parametrize("requests", [{}, {"requests": {"in_flight": 2, "running": 1, "waiting": 1}}])
def test_an_older_engine_has_no_figures(answer, requests):
    said = read_status(HOST, answer(json.dumps(GOOD | requests)))

    assert said.requests.in_flight == (2 if requests else 0)
    assert said.request_counts == RequestCounts()


@pytest.mark.parametrize("edge", ["soon", "", "nan"])
def test_an_edge_that_is_not_a_number_is_an_error(answer, edge):
    port = answer(json.dumps(GOOD | {"requests": {"first_token_seconds": {edge: 1}}}))

    with pytest.raises(EngineUnavailable, match=r"requests\.first_token_seconds"):
        read_status(HOST, port)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("example", "http://example:80"),
    ],
)
def test_urls_are_reachable_from_this_machine(host, url):
    assert base_url(host, 80) == url
