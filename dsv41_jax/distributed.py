"""Runs of several processes, one a host: how they find each other, and how all of them end.

    with distributed.initialize(coordinator="10.0.0.2:8476", processes=4, process=2):
        model = ds.load(path, mesh=...)

The same program runs on every host, and each makes the same calls with the same values. `initialize` must come before
anything touches a device. Which processes there are is an argument, or is found: see `cluster`.

A process that dies ends the run of all: its connection to process 0 closes at once, or it is silent for `peer_timeout`
seconds (see `roll_call`). jax's own service has twice that, as a second guard; it ends a process by SIGABRT.
The port of the coordinator and the next one must be open between the hosts.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from dsv41_jax.cluster import Cluster, find_cluster
from dsv41_jax.roll_call import RollCall

PEER_TIMEOUT = 60.0  # seconds
START_TIMEOUT = 300.0
_SHOWN = 10  # differences spelled out in one message
_VERDICT_SECONDS = 2.0  # an error may be the consequence of another process's end, which is the better message
_OWN_FLAGS = ("coordinator", "processes", "process")

_here: Processes | None = None  # of this process, once it has joined a run


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a command that several hosts may run together."""
    group = parser.add_argument_group("several processes", "the same command on every host; see docs/pods.md")
    group.add_argument("--coordinator", default=None, help="host:port of process 0 (default: found, see docs/pods.md)")
    group.add_argument("--processes", type=int, default=None, help="how many there are; 1 to look for no others")
    group.add_argument("--process", type=int, default=None, help="which one this is, from 0")
    group.add_argument(
        "--peer_timeout",
        type=float,
        default=PEER_TIMEOUT,
        help=f"seconds of silence after which a process counts as dead and the run ends (default: {PEER_TIMEOUT:g})",
    )
    group.add_argument(
        "--start_timeout",
        type=float,
        default=START_TIMEOUT,
        help=f"seconds to wait for all processes to come (default: {START_TIMEOUT:g})",
    )


def run_command(
    name: str, run: Callable[[argparse.Namespace], None], flags: argparse.Namespace, may_differ: Collection[str] = ()
) -> None:
    """Run a command in every process of the run that `add_flags`'s flags describe, or just here. Its ValueErrors and
    OSErrors end the process with their message and the command's name, as a wrong flag does.

    Args:
        may_differ: flags that need not be the same in every process, besides those that say which process it is.
    """
    compared = vars(flags).keys() - {*_OWN_FLAGS, *may_differ}
    try:
        processes = initialize(
            flags.coordinator, flags.processes, flags.process, flags.peer_timeout, flags.start_timeout
        )
        processes.check_same({f"--{key}": vars(flags)[key] for key in sorted(compared)})
    except (ValueError, OSError) as error:
        sys.exit(f"{name}: {error}")
    with processes:
        try:
            run(flags)
        except (ValueError, OSError) as error:
            sys.exit(f"{name}: {error}")


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    peer_timeout: float = PEER_TIMEOUT,
    start_timeout: float = START_TIMEOUT,
) -> Processes:
    """Join the run that this process is part of; use the result in a `with` statement around everything that follows.

    Args:
        coordinator, processes, process: all three, or none to look for them (see above); processes=1 alone looks for
            nothing and starts nothing.
        peer_timeout: seconds of silence after which a process counts as dead.
        start_timeout: seconds for all to come, also to the end of the run.

    Raises:
        ValueError: an incomplete or impossible description, or processes that were started with different ones, or
            with different versions of the code. TimeoutError: not all came. OSError: the port is in use.
        RuntimeError: devices have been used before.
    """
    for name, seconds in (("peer_timeout", peer_timeout), ("start_timeout", start_timeout)):
        if not seconds > 0:
            raise ValueError(f"{name}={seconds}: a number of seconds above 0 is needed")
    cluster = find_cluster(coordinator, processes, process)
    if cluster is None or cluster.processes == 1:
        return Processes(None)
    roll_call = RollCall(cluster.host, cluster.port, cluster.processes, cluster.process, peer_timeout, start_timeout)
    here = Processes(roll_call)
    print(f"{here.names[here.index]}: all {here.count} processes are here", file=sys.stderr)
    here.check_same({"jax": jax.__version__, "jaxlib": jaxlib.__version__, "the code": _digest_of_code()})
    try:
        _start_jax(cluster, peer_timeout, start_timeout)
    except BaseException as error:
        roll_call.fail(str(error))
        roll_call.close()
        raise
    global _here
    _here = here
    return here


def connect(mesh: Mesh) -> None:
    """Check that all processes have the same mesh, and let CPUs connect now, while the processes are at one point.

    They would connect at the first exchange between the same devices and wait only 30 s for each other, less than one
    process may compile longer than another. Nothing happens in a process that is alone.
    """
    if jax.process_count() == 1:
        return
    check_same({"the mesh": [dict(mesh.shape), [device.id for device in mesh.devices.flat]]})
    if mesh.devices.flat[0].platform != "cpu":
        return
    names = mesh.axis_names
    several = [name for name in names if mesh.shape[name] > 1]
    groups = [axes for n in range(1, len(several) + 1) for axes in itertools.combinations(several, n)]
    step = jax.shard_map(
        lambda x: [jax.lax.psum(x, axes) for axes in groups], mesh=mesh, in_specs=Spec(names), out_specs=Spec(names)
    )
    where = NamedSharding(mesh, Spec(names))
    ones = jax.make_array_from_callback((mesh.size,), where, lambda _: np.ones(1, np.float32))
    jax.block_until_ready(jax.jit(step)(ones))


def here() -> Processes:
    """The run that this process is part of: alone where it joined none."""
    return Processes(None) if _here is None else _here


def check_same(facts: Mapping[str, Any]) -> None:
    """`Processes.check_same` of the run that this process is part of; nothing where it is alone."""
    if _here is not None:
        _here.check_same(facts)


def _start_jax(cluster: Cluster, peer_timeout: float, start_timeout: float) -> None:
    """Start jax's coordination service, on the port after the coordinator's."""
    host = f"[{cluster.host}]" if ":" in cluster.host else cluster.host
    local = cluster.host in ("localhost", "127.0.0.1", "::1")
    # Without these jax would take SIGTERM for a notice of preemption, and the process would go on.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"{host}:{cluster.port + 1}",
        cluster.processes,
        cluster.process,
        local_device_ids=cluster.local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, round(start_timeout)),
        heartbeat_timeout_seconds=max(2, round(2 * peer_timeout)),
        shutdown_timeout_seconds=max(2, round(2 * peer_timeout)),
        coordinator_bind_address=f"{host}:{cluster.port + 1}" if local else None,
    )


class Processes:
    """The processes of a run. As a context manager it ends the run: well, when all leave it well; otherwise for all.

    Attributes:
        count, index: how many there are, and which one this is. names: what each is called in messages.
        address: (host, port) of process 0; None where it is alone. The next two ports are jax's and the server's.
    """

    def __init__(self, roll_call: RollCall | None):
        self._roll_call = roll_call
        self.count = 1 if roll_call is None else roll_call.processes
        self.index = 0 if roll_call is None else roll_call.process
        self.names = ["this process"] if roll_call is None else roll_call.names
        self.address = None if roll_call is None else roll_call.address
        self._checks = 0

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Compare facts {what: value} with those of the other processes; every process must call this.

        Raises:
            ValueError: in every process, naming what differs and where.
        """
        if self._roll_call is None:
            return
        self._checks += 1
        shown = {name: json.dumps(value, sort_keys=True, default=str) for name, value in facts.items()}
        problems = differences(self._roll_call.exchange(f"check {self._checks}", shown), self.names)
        if problems:
            self._roll_call.finish()  # all have found the same: nobody is to be told
            more = f"\n  ... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise ValueError("the processes differ:\n  " + "\n  ".join(problems[:_SHOWN]) + more)

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._roll_call is None:
            return
        if kind is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self._roll_call.finish()
            jax.distributed.shutdown()
            return
        self._roll_call.failing()
        if isinstance(error, SystemExit):
            reason, code = str(error.code), error.code if isinstance(error.code, int) else 1
            print(error.code, file=sys.stderr)
        else:
            reason, code = f"{kind.__name__}: {error}", 1
            traceback.print_exception(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_VERDICT_SECONDS)
        self._roll_call.fail(reason)
        os._exit(code)  # the end of the interpreter would wait for the other processes


def differences(facts: list[dict[str, str]], names: list[str]) -> list[str]:
    """One line for each fact that is not the same in all processes."""
    problems = []
    for what in dict.fromkeys(key for own in facts for key in own):
        by_value: dict[str, list[str]] = {}
        for name, own in zip(names, facts, strict=True):
            by_value.setdefault(own.get(what, "absent"), []).append(name)
        if len(by_value) > 1:
            problems.append(f"{what} is " + ", and ".join(f"{v} in {_listed(who)}" for v, who in by_value.items()))
    return problems


def _listed(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _digest_of_code() -> str:
    """Of every Python file of the two packages: another checkout on one host would compute something else."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for package in ("dsv41_jax", "pallas_kernels"):
        for file in sorted((root / package).rglob("*.py")):
            digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]
