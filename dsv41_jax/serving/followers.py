"""The other hosts of a pod: they run the steps that process 0 decides on, in its order.

Steps go over a connection of each follower to process 0, on the second port after the coordinator's, each as its
length (8 bytes) and `steps.to_bytes`; a length of 0 is the end. That everybody is alive is the business of `roll_call`.
"""

import json
import socket
import time

import numpy as np
from jax import Array

from dsv41_jax.distributed import Processes
from dsv41_jax.message_line import address, listener_at
from dsv41_jax.serving.executor import Executor
from dsv41_jax.serving.steps import Step, from_bytes, to_bytes

_PORT_AFTER = 2  # the first is the roll call's, the next jax's
_RETRY_SECONDS = 0.2


class Leader:
    """Process 0: runs steps here and on every follower.

    Raises:
        TimeoutError: not all followers have come within `seconds`.
    """

    def __init__(self, processes: Processes, executor: Executor, seconds: float):
        self._executor = executor
        self._connections: dict[int, socket.socket] = {}
        host, port = processes.address
        deadline = time.monotonic() + seconds
        with listener_at(host, port + _PORT_AFTER) as listener:
            while len(self._connections) < processes.count - 1:
                left = deadline - time.monotonic()
                if left <= 0:
                    absent = [processes.names[i] for i in range(1, processes.count) if i not in self._connections]
                    raise TimeoutError(f"{', '.join(absent)} did not ask for steps within {seconds:g} s")
                listener.settimeout(left)
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                self._admit(connection, processes.count)

    def _admit(self, connection: socket.socket, count: int) -> None:
        connection.settimeout(10)
        try:
            index = int(json.loads(_exactly(connection, _length(connection)))["process"])
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()  # a stranger
            return
        if not 0 < index < count or index in self._connections:
            connection.close()
            return
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections[index] = connection

    def run(self, step: Step) -> Array | np.ndarray | None:
        """`Executor.run`, on all hosts."""
        _send(self._connections.values(), to_bytes(step))
        return self._executor.run(step)

    def end(self) -> None:
        """No more steps: the followers end."""
        _send(self._connections.values(), b"")


def follow(processes: Processes, executor: Executor, seconds: float) -> None:
    """Any other process: run the steps of process 0 until it ends. ConnectionError if it ends without a word."""
    host, port = processes.address
    connection = _reach(host, port + _PORT_AFTER, seconds)
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _send([connection], json.dumps({"process": processes.index}).encode())
        while size := _length(connection):
            executor.run(from_bytes(_exactly(connection, size)))


def _reach(host: str, port: int, seconds: float) -> socket.socket:
    deadline = time.monotonic() + seconds
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=5)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"process 0 does not hand out steps at {address(host, port)}: {error.strerror or error}; is that "
                    "port open between the hosts?"
                ) from error
            time.sleep(_RETRY_SECONDS)
            continue
        connection.settimeout(None)
        return connection


def _send(connections, data: bytes) -> None:
    frame = len(data).to_bytes(8, "little") + data
    for connection in connections:
        connection.sendall(frame)


def _length(connection: socket.socket) -> int:
    return int.from_bytes(_exactly(connection, 8), "little")


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        got = connection.recv_into(view[at:])
        if not got:
            raise ConnectionError("process 0 closed the connection without ending the run")
        at += got
    return data
