"""A connection between two processes that carries JSON objects, one a line; and where the first of them listens."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

_LONGEST_LINE = 1 << 24

Message = dict[str, Any]


class MessageLine:
    """Any thread may send; one thread reads."""

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._file = connection, connection.makefile("rb")
        self._sending = threading.Lock()

    def silence(self, seconds: float) -> None:
        """Longest that reading and sending may take from now on."""
        self._connection.settimeout(seconds)

    def send(self, message: Message) -> None:
        """OSError if the other side is gone."""
        with self._sending:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> Message:
        """The next message. TimeoutError after too long a silence, ConnectionError at the end, ValueError for what is
        not a message.
        """
        raw = self._file.readline(_LONGEST_LINE)
        if not raw.endswith(b"\n"):
            raise ConnectionError("the connection was closed")
        message = json.loads(raw)
        if not isinstance(message, dict):
            raise ValueError(f"not a message: {raw[:80]!r}")
        return message

    def close(self) -> None:
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._connection.close()


def listener_at(host: str, port: int) -> socket.socket:
    """Listen at a port: of all addresses of this machine, or of the loopback alone where that is the host."""
    try:
        if host in ("localhost", "127.0.0.1", "::1"):
            family = socket.AF_INET6 if host == "::1" else socket.AF_INET
            return socket.create_server((host, port), family=family)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"process 0 cannot listen at port {port}: {reason}; choose another port") from error


def address(host: str, port: int) -> str:
    """host:port as it is written."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
