"""Who takes part in a run of several processes, and that all of them are still there.

Process 0 listens; every other process holds one connection to it for as long as it runs. Over these connections go the
roll call at the start, values that all processes exchange (`exchange`), and a sign of life every few seconds. The
operating system closes the connections of a process that ends, however it ends, so its end is noticed at once, also
while everybody else waits for it inside a collective; a host that vanishes, or a process that is stopped, is noticed
by its silence. Whoever notices says which process it was and ends its own process: nobody is left waiting.

Messages are JSON objects, one a line.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from dsv41_jax.message_line import Message, MessageLine, address, listener_at

EXIT_CODE = 75  # of a process that ends because another one did; "try again" in sysexits.h
_HELLO_SECONDS = 10.0  # for the first line of a connection
_RETRY_SECONDS = 0.25
_END = "the end of the run"


def end_process(text: str) -> None:
    """Say why on standard error, and end this process at once: other threads may be blocked for ever."""
    os.write(2, f"\n{text}\n".encode())
    os._exit(EXIT_CODE)


class RollCall:
    """All processes of a run, seen from one of them.

    Args:
        host, port: where process 0 listens.
        processes, process: how many there are, and which one this is.
        peer_timeout: seconds of silence after which a process counts as dead.
        start_timeout: seconds for all to come, to the start and to each `exchange`.
        ended: what to do when another process has ended; for tests.

    Attributes:
        names: what each process is called in messages. address: (host, port) where process 0 listens.

    Raises:
        ValueError: the processes were not started with the same number, or two with the same index. TimeoutError: not
            all have come. OSError: the port cannot be listened at.
    """

    def __init__(
        self,
        host: str,
        port: int,
        processes: int,
        process: int,
        peer_timeout: float,
        start_timeout: float,
        ended: Callable[[str], None] = end_process,
    ):
        self.processes, self.process = processes, process
        self.address, self._ended = (host, port), ended
        self._peer_timeout, self._start_timeout = peer_timeout, start_timeout
        self._self = {"process": process, "processes": processes, "host": socket.gethostname(), "pid": os.getpid()}
        self.names: list[str] = []
        self._lines: dict[int, MessageLine] = {}
        self._changed = threading.Condition()
        self._collected: dict[str, dict[int, Any]] = {}
        self._result: dict[str, list[Any]] = {}
        self._over = self._failing = False
        deadline = time.monotonic() + start_timeout
        if process == 0:
            self._call(deadline)
        else:
            self._answer(deadline)
        for other, line in self._lines.items():
            line.silence(peer_timeout)
            threading.Thread(target=self._listen, args=(other, line), name=f"roll call {other}", daemon=True).start()
        threading.Thread(target=self._beat, name="roll call", daemon=True).start()

    # --- the start ---------------------------------------------------------------------------------------------------

    def _call(self, deadline: float) -> None:
        """Process 0: wait until all the others have come."""
        here = {0: self._self}
        try:
            with listener_at(*self.address) as listener:
                while len(here) < self.processes:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise TimeoutError(self._missing(here))
                    listener.settimeout(min(left, _RETRY_SECONDS))
                    try:
                        connection, _ = listener.accept()
                    except TimeoutError:
                        self._forget_gone(here)
                        continue
                    self._admit(MessageLine(connection), here)
                    self._forget_gone(here)
            self.names = [_name(here[i]) for i in range(self.processes)]
            for line in self._lines.values():
                line.send({"names": self.names})
        except Exception as error:
            self._tell_all({"end": f"{_name(self._self)}: {error}"})
            raise

    def _admit(self, line: MessageLine, here: dict[int, Message]) -> None:
        line.silence(_HELLO_SECONDS)
        try:
            hello = line.read()
            index, count = int(hello["process"]), int(hello["processes"])
            name = _name(hello)
        except (OSError, ValueError, KeyError, TypeError):
            line.close()  # a stranger, or one that ended already
            return
        problem = None
        if count != self.processes:
            problem = f"{name} was started as one of {count} processes, {_name(self._self)} as one of {self.processes}"
        elif index in here:
            problem = f"both {_name(here[index])} and {name} were started as process {index}"
        if problem is not None:
            line.send({"end": problem})
            line.close()
            raise ValueError(problem)
        self._lines[index], here[index] = line, hello

    def _forget_gone(self, here: dict[int, Message]) -> None:
        """A process that ended before the start may be started again."""
        for index, line in list(self._lines.items()):
            try:
                line.send({})
            except OSError:
                line.close()
                del self._lines[index], here[index]

    def _missing(self, here: dict[int, Message]) -> str:
        absent = [str(i) for i in range(self.processes) if i not in here]
        came = ", ".join(_name(here[i]) for i in sorted(here))
        return (
            f"{self._start_timeout:g} s have passed and {_plural(absent)} {', '.join(absent)} of {self.processes} "
            f"did not come to {address(*self.address)}; here: {came}. Is the same command running on every host, and "
            "can they reach that address?"
        )

    def _answer(self, deadline: float) -> None:
        """Another process: come to process 0, and wait until it says that all are there."""
        where = address(*self.address)
        reason = "nothing listens there"
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"{_name(self._self)} has waited {self._start_timeout:g} s for process 0 at {where}: {reason}. Is "
                    "process 0 running, is that its address, and is the port open between the hosts?"
                )
            try:
                line = MessageLine(socket.create_connection(self.address, timeout=min(left, 5.0)))
            except OSError as error:
                reason = error.strerror or str(error)
                time.sleep(min(_RETRY_SECONDS, max(left, 0.0)))
                continue
            try:
                line.send(self._self)
                line.silence(max(left, 0.1) + _HELLO_SECONDS)  # process 0 says so first if somebody is missing
                while "names" not in (message := line.read()):
                    if "end" in message:
                        raise ValueError(message["end"])
            except (OSError, json.JSONDecodeError) as error:
                reason = f"it closed the connection ({error})"
                line.close()
                time.sleep(_RETRY_SECONDS)
                continue
            self.names, self._lines = message["names"], {0: line}
            return

    # --- while it runs -----------------------------------------------------------------------------------------------

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Give a JSON value, and get those of all processes, by index. All must call it, with the same names in the
        same order.

        Raises:
            TimeoutError: not all have come to it within `start_timeout`.
        """
        if self.process == 0:
            self._collect(name, 0, value)
        else:
            self._send(0, {"exchange": name, "value": value})
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._result, self._start_timeout):
                came = self._collected.get(name, {})
                absent = [self.names[i] for i in range(self.processes) if i not in came]
                who = ", ".join(absent) if self.process == 0 else "another process"
                raise TimeoutError(f"{who} did not come to {name!r} within {self._start_timeout:g} s")
            return self._result.pop(name)

    def finish(self) -> None:
        """Wait until all processes have finished, and close the connections. TimeoutError as `exchange`."""
        self.exchange(_END, None)
        self.close()

    def close(self) -> None:
        """Close the connections without a word: to a run that goes on, this process has ended."""
        self._over = True
        for line in self._lines.values():
            line.close()

    def failing(self) -> None:
        """This process has an error of its own: errors of others, most likely the same, no longer end it."""
        self._failing = True

    def fail(self, reason: str) -> None:
        """Tell the others that this process ends, and why."""
        self._over = True
        self._tell_all({"end": f"{self.names[self.process]} failed: {reason}", "error": True})

    def _tell_all(self, message: Message) -> None:
        for other in self._lines:
            self._send(other, message)

    def _send(self, other: int, message: Message) -> None:
        try:
            self._lines[other].send(message)
        except OSError:
            pass  # whoever listens to that line notices, and says so

    def _collect(self, name: str, process: int, value: Any) -> None:
        """Process 0: note a value, and send all of them round once they are complete."""
        with self._changed:
            values = self._collected.setdefault(name, {})
            values[process] = value
            if len(values) < self.processes:
                return
            del self._collected[name]
            result = [values[i] for i in range(self.processes)]
        self._over = self._over or name == _END  # before the others know, and close their connections
        self._tell_all({"exchanged": name, "values": result})
        self._deliver(name, result)

    def _deliver(self, name: str, result: list[Any]) -> None:
        with self._changed:
            self._over = self._over or name == _END
            self._result[name] = result
            self._changed.notify_all()

    def _listen(self, other: int, line: MessageLine) -> None:
        while True:
            try:
                message = line.read()
            except TimeoutError:
                why = f"gave no sign of life for {self._peer_timeout:g} s"
            except (OSError, ValueError) as error:
                why = f"has ended, or its host has ({error})"
            else:
                if "exchange" in message:
                    self._collect(message["exchange"], other, message["value"])
                elif "exchanged" in message:
                    self._deliver(message["exchanged"], message["values"])
                elif "end" in message:
                    if self._failing and "error" in message:
                        return
                    self._end(message["end"], "error" in message)
                continue
            self._end(f"{self.names[other]} {why}")
            return

    def _end(self, what: str, error: bool = False) -> None:
        if self._over:
            return
        if self.process == 0:
            self._tell_all({"end": what} | ({"error": True} if error else {}))
        self._over = True
        self._ended(f"{what}. {self.names[self.process]} ends too.")

    def _beat(self) -> None:
        while not self._over:
            self._tell_all({})
            time.sleep(self._peer_timeout / 6)


def _name(of: Mapping[str, Any]) -> str:
    return f"process {of['process']} ({of['host']}, pid {of['pid']})"


def _plural(items: list[str]) -> str:
    return "process" if len(items) == 1 else "processes"
