"""A lock that a process holds while it lives: the kernel gives it back when the process ends, however it ends."""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

_PATIENCE = 1.0  # seconds, because `is_held` holds a lock for a moment


class LockedError(Exception):
    """Another process holds the lock; the message says which, if it is known."""


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Hold the lock file `path` for a block, and remove it at its end. LockedError: another process holds it."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace")
            os.close(descriptor)
            if time.monotonic() > deadline:
                raise LockedError(holder or "another process") from None
            time.sleep(_PATIENCE / 10)
            continue
        except OSError as error:
            os.close(descriptor)
            raise OSError(error.errno, f"this file system has no locks ({error.strerror})", str(path)) from error
        if _is_named(path, descriptor):
            break
        os.close(descriptor)  # its holder has removed it in between
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether a process holds the lock file `path`."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _is_named(path: Path, descriptor: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False
