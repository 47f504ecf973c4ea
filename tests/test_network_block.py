"""The suite itself: tests cannot reach a network, and loopback works (the server's tests need it)."""

from __future__ import annotations

import socket

import pytest


def test_no_name_lookup_and_no_connection():
    with pytest.raises(RuntimeError, match="may not use the network"):
        socket.create_connection(("example.org", 80), timeout=1)
    with pytest.raises(RuntimeError, match="may not use the network"), socket.socket() as client:
        client.connect(("192.0.2.1", 80))


def test_loopback_works():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        connection, _ = server.accept()
        with connection:
            client.sendall(b"x")
            assert connection.recv(1) == b"x"
