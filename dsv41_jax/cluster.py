"""Which processes a run has, and which of them this one is. From the first of these that says so:

    the arguments (on the command line --coordinator, --processes, --process), all three
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID (or JOB_COMPLETION_INDEX, of an Indexed Job)
    jax's own detection of Slurm, of TPUs on GKE and of Cloud TPU VMs

Otherwise this process is the only one.
"""

from __future__ import annotations

import dataclasses
import os

_INDEX_VARIABLES = ("JAX_PROCESS_ID", "JOB_COMPLETION_INDEX")
_HOST_SECONDS = 300  # to wait for the name of a coordinator that jax has found to be known


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Which processes there are.

    Attributes:
        coordinator: "host:port" of process 0. processes, process: how many, and which one this is.
        local_device_ids: devices of the host that are this process's; None for all.
    """

    coordinator: str
    processes: int
    process: int
    local_device_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65535:
            raise ValueError(f"coordinator {self.coordinator!r}: host:port is needed, with a port below 65535")
        if self.processes < 1 or not 0 <= self.process < self.processes:
            raise ValueError(f"process {self.process} of {self.processes}: processes are numbered from 0")

    @property
    def host(self) -> str:
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.coordinator.rpartition(":")[2])


def find_cluster(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> Cluster | None:
    """Which processes there are; None for this one alone. ValueError as `initialize`."""
    if processes == 1 and coordinator is None and process in (None, 0):
        return None
    given = (coordinator, processes, process)
    if any(x is not None for x in given):
        if None in given:
            raise ValueError(
                f"--coordinator={coordinator} --processes={processes} --process={process}: give all three, or none "
                "to look for them"
            )
        return Cluster(coordinator, processes, process)
    return _from_environment() or _detected_by_jax()


def _from_environment() -> Cluster | None:
    """From the variables that `launch/` scripts set."""
    address, count = os.environ.get("JAX_COORDINATOR_ADDRESS"), os.environ.get("JAX_NUM_PROCESSES")
    if not address or not count:
        return None
    index = next((os.environ[name] for name in _INDEX_VARIABLES if os.environ.get(name)), None)
    if index is None:
        raise ValueError(
            "JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES are set, and neither of " + ", ".join(_INDEX_VARIABLES)
        )
    for name, value in (("JAX_NUM_PROCESSES", count), ("the process's index", index)):
        if not value.isdecimal():
            raise ValueError(f"{name} is {value!r}, not a number")
    return Cluster(address, int(count), int(index))


def _detected_by_jax() -> Cluster | None:
    """What jax finds out by itself about Slurm and Cloud TPUs."""
    from jax._src import clusters  # no public name tells what was found

    for kind in (clusters.SlurmCluster, clusters.GkeTpuCluster, clusters.GceTpuCluster):
        if not kind.is_env_present():
            continue
        count = kind.get_process_count()
        if count == 1:
            return None
        port = os.environ.get("JAX_COORDINATOR_PORT")
        if port is None and kind is clusters.SlurmCluster:
            port = str(10000 + 2 * (int(os.environ["SLURM_JOB_ID"]) % 10000))  # jobs may share a node
        address = kind.get_coordinator_address(timeout_secs=_HOST_SECONDS, override_coordinator_port=port)
        return Cluster(
            address, count, kind.get_process_id(), _slurm_devices() if kind is clusters.SlurmCluster else None
        )
    return None


def _slurm_devices() -> tuple[int, ...] | None:
    """With several tasks on a node each has one device, the one with its local number; else all are this task's."""
    tasks, nodes = int(os.environ["SLURM_NTASKS"]), int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
    # Where Slurm has bound devices to tasks (--gpus-per-task), each task sees its own only.
    bound = os.environ.get("SLURM_GPUS_PER_TASK") is not None
    return (int(os.environ["SLURM_LOCALID"]),) if tasks > nodes and not bound else None
