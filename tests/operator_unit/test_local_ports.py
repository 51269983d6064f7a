"""Ports that stay reserved between two starts of a process."""

import socket
import sys

import pytest

from rayloom_operator.errors import EngineUnavailable
from rayloom_operator.local.ports import ReservedPort

HOST = "127.0.0.1"


def listening(port):
    """A socket that listens with the options of an engine's sockets."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((HOST, port))
    server.listen()
    return server


def test_a_server_can_listen_on_a_reserved_port_again_and_again():
    port = ReservedPort(HOST)
    for _ in range(2):
        assert port.is_free()
        with listening(port.number) as server, socket.create_connection((HOST, port.number)) as client:
            server.accept()[0].close()
            client.recv(1)
            assert not port.is_free()
    port.close()


@pytest.mark.skipif(sys.platform != "linux", reason="a bound socket would keep the child from listening there")
def test_a_reserved_port_is_given_to_nobody_else():
    port = ReservedPort(HOST)
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind((HOST, port.number))
    port.close()


def test_a_port_on_which_another_process_listens_cannot_be_reserved():
    with listening(0) as server:
        number = server.getsockname()[1]
        with pytest.raises(EngineUnavailable, match=f"port {number} on 127.0.0.1 cannot be used .* --port PORT"):
            ReservedPort(HOST, number, "--port")
