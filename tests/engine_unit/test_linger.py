"""The time for which the preStop hook of a pod with ranks waits. e2e/ tests it in Kubernetes."""

import http.server
import json
import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from rayloom_engine.front.http.errors import unavailable
from rayloom_engine.front.operations.lifecycle import Lifecycle
from rayloom_engine.linger import Look, ask, engines, linger


class Story:
    """`look` returns the answers in order, and then repeats the last. Time passes only while the pod sleeps."""

    def __init__(self, *answers):
        self._answers = list(answers)
        self.now = 0.0

    def look(self):
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    def sleep(self, seconds):
        self.now += seconds

    def end(self):
        """Returns (seconds until the end, the reason)."""
        why = linger(self.look, lambda: self.now, self.sleep)
        return round(self.now, 1), why


def test_a_pod_without_an_engine_goes_at_once():
    assert Story("gone").end() == (0.0, "the engine has ended")


def test_a_pod_that_goes_alone_waits_six_seconds_for_its_engine_to_begin_a_drain():
    assert Story("working").end() == (6.0, "the engine does not drain")


def test_a_pod_stays_until_its_engine_has_drained():
    story = Story(*["working"] * 10, *["draining"] * 500, "gone")

    assert story.end() == (102.0, "the engine has ended")


def test_a_pod_goes_when_the_drain_is_taken_back():
    assert Story("draining", "draining", "working").end() == (0.4, "the engine does not drain any more")


def test_an_answer_that_is_late_ends_no_drain():
    story = Story(*["draining", "silent", "silent"] * 20, "gone")

    assert story.end() == (12.0, "the engine has ended")


def test_an_engine_that_does_not_answer_delays_a_pod_only_for_a_while():
    assert Story("draining", "silent").end() == (6.0, "the engine fell silent")


HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def row(remote, state):
    return f"   0: 0302DC0A:D431 {remote} {state} 00000000:00000000 00:00000000 00000000  1000 0 1 1 0 20 4 0 10 -1\n"


def test_the_engine_is_at_the_other_end_of_the_ranks_connections():
    # 8002 is 1F42, 6379 is 18EB; 0402DC0A is 10.220.2.4 in little-endian byte order.
    table = HEADER + row("0402DC0A:1F42", "01") + row("0502DC0A:18EB", "01") + row("0602DC0A:1F42", "06")

    assert list(engines(table, [8002])) == ["10.220.2.4"]
    assert list(engines(table, [8002, 6379])) == ["10.220.2.4", "10.220.2.5"]


def look_at(tables, answers):
    """A Look that reads these tables one after the other, and gets these answers from the addresses."""
    return Look((8002, 6379), answers.__getitem__, lambda: iter([HEADER + tables.pop(0)]))


def test_a_pod_whose_rank_is_not_attached_finds_its_engine_by_its_rays_connection():
    look = look_at([row("0402DC0A:18EB", "01")], {"10.220.2.4": "draining"})

    assert look() == "draining"


def test_connections_are_read_each_time_and_earlier_addresses_are_kept():
    answers = {"10.220.2.4": "working", "10.220.2.5": "draining"}
    look = look_at([row("0402DC0A:18EB", "01"), row("0502DC0A:1F42", "01"), ""], answers)

    assert [look(), look(), look()] == ["working", "draining", "draining"]


def test_there_is_no_engine_where_nothing_is_connected():
    assert look_at([row("0402DC0A:1F42", "06")], {})() == "gone"


def test_an_engine_may_have_an_address_of_version_6():
    table = HEADER + row("B80D0120000000000000000001000000:1F42", "01")

    assert list(engines(table, [8002])) == ["2001:db8::1"]


def test_a_connection_of_this_machine_is_found():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        found = set(engines(Path("/proc/net/tcp").read_text(), [server.getsockname()[1]]))

    assert found == {"127.0.0.1"}


@contextmanager
def front(lifecycle):
    """An HTTP server that answers like the front's /ready. Yields its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.path == "/ready"
            try:
                lifecycle.check_accepts()
                status, body = 200, {"status": "ready"}
            except type(unavailable("", "", 0)) as error:
                status, body = error.status, error.body()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("begin", "answer"),
    [
        (lambda lifecycle: lifecycle.become_ready(), "working"),
        (lambda lifecycle: None, "working"),  # the engine starts
        (lambda lifecycle: lifecycle.stop(), "draining"),
        (lambda lifecycle: lifecycle.drain(True), "draining"),
        (lambda lifecycle: lifecycle.fail("a rank keeps dying"), "working"),
    ],
)
def test_ready_shows_a_drain(begin, answer):
    lifecycle = Lifecycle()
    begin(lifecycle)

    with front(lifecycle) as port:
        assert ask("127.0.0.1", port) == answer


def test_an_engine_whose_port_is_closed_has_ended():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    assert ask("127.0.0.1", port) == "gone"


def test_an_engine_that_does_not_answer_is_silent():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert ask("127.0.0.1", server.getsockname()[1]) == "silent"
