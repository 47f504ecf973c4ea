"""Runs of several processes: roll call, what differs, and the end of all when one ends."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import socket
import threading
import time

import pytest

from dsv41_jax import distributed
from dsv41_jax.cluster import Cluster, find_cluster
from dsv41_jax.roll_call import EXIT_CODE, RollCall
from processes import ROOT, Run, free_coordinator, start

# --- roll call, in one process: a thread for each member -------------------------------------------------------------


class Member(threading.Thread):
    """A process of a roll call: its `RollCall` or the error, and what it was told about the end of others."""

    def __init__(self, port: int, processes: int, process: int, peer_timeout: float = 5, start_timeout: float = 10):
        super().__init__(daemon=True)
        self._arguments = ("127.0.0.1", port, processes, process, peer_timeout, start_timeout)
        self.call: RollCall | None = None
        self.error: Exception | None = None
        self.ends: list[str] = []
        self.told = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            self.call = RollCall(*self._arguments, ended=self._ended)
        except Exception as error:
            self.error = error

    def _ended(self, text: str) -> None:
        self.ends.append(text)
        self.told.set()

    def done(self) -> Member:
        self.join(20)
        assert not self.is_alive()
        return self


@pytest.fixture
def port() -> int:
    return int(free_coordinator().rpartition(":")[2])


def together(port: int, processes: int, **options: float) -> list[Member]:
    members = [Member(port, processes, i, **options) for i in range(processes)]
    for member in members:
        assert member.done().call is not None, member.error
    return members


def in_threads(*calls) -> list[object]:
    """Results of calls that wait for each other."""
    results: dict[int, object] = {}
    threads = [threading.Thread(target=lambda i=i, f=f: results.update({i: f()})) for i, f in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [results[i] for i in range(len(calls))]


def stranger(port: int, hello: dict | None = None) -> socket.socket:
    """A connection that has said hello as another process would, or something else."""
    for _ in range(200):
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=10)
            break
        except OSError:
            time.sleep(0.02)
    connection.sendall((json.dumps(hello) if hello else "GET / HTTP/1.1").encode() + b"\n")
    return connection


def test_values_are_exchanged_in_order_of_the_processes(port):
    members = together(port, 3)
    for name in ("one", "two"):
        values = in_threads(*(lambda m=m, n=name: m.call.exchange(n, {"mine": m.call.process}) for m in members))
        assert values == [[{"mine": 0}, {"mine": 1}, {"mine": 2}]] * 3
    assert members[1].call.names == members[0].call.names and len(set(members[0].call.names)) == 3
    in_threads(*(m.call.finish for m in members))
    time.sleep(0.2)
    assert not any(m.ends for m in members)


def test_a_process_that_does_not_come_is_named(port):
    members = [Member(port, 4, i, start_timeout=1.5) for i in (0, 2)]
    first, other = (m.done().error for m in members)
    assert isinstance(first, TimeoutError)
    for text in ("processes 1, 3 of 4 did not come", "1.5 s", "here: process 0", "process 2 ("):
        assert text in str(first) and text in str(other)


def test_nobody_at_the_address_of_the_first(port):
    error = Member(port, 2, 1, start_timeout=0.6).done().error
    assert isinstance(error, TimeoutError)
    assert f"process 0 at 127.0.0.1:{port}: Connection refused" in str(error)


@pytest.mark.parametrize(
    ("processes", "process", "message"), [(3, 1, "as one of 3 processes"), (2, 0, "both process 0"), (2, -1, "both")]
)
def test_what_does_not_fit_together_is_refused_at_once(port, processes, process, message):
    first = Member(port, 2 if process >= 0 else 3, 0)
    if process < 0:
        Member(port, 3, 1)
        processes, process = 3, 1
        time.sleep(0.3)
    hello = stranger(port, {"process": process, "processes": processes, "host": "elsewhere", "pid": 7})
    assert message in str(first.done().error)
    assert message in hello.makefile().read()
    hello.close()


def test_strangers_are_ignored_and_a_restarted_process_may_come(port):
    first = Member(port, 3, 0)
    stranger(port).close()
    stranger(port, {"process": "x", "processes": 3}).close()
    gone = stranger(port, {"process": 1, "processes": 3, "host": "gone", "pid": 7})
    time.sleep(0.1)
    gone.close()
    time.sleep(0.8)  # the first looks four times a second
    others = [Member(port, 3, i) for i in (1, 2)]
    assert [m.done().error for m in (first, *others)] == [None] * 3
    assert "gone" not in str(first.call.names)


def test_the_end_of_one_is_told_to_all_and_says_who(port):
    members = together(port, 3)
    members[1].call.close()  # as the system does for a killed process
    for i in (0, 2):
        assert members[i].told.wait(5)
        assert members[i].ends[0].startswith(members[0].call.names[1] + " has ended")
        assert f"{members[0].call.names[i]} ends too" in members[i].ends[0]


def test_the_end_of_the_first_is_noticed_by_all(port):
    members = together(port, 3)
    members[0].call.close()
    for i in (1, 2):
        assert members[i].told.wait(5)
        assert members[i].ends[0].startswith(members[0].call.names[0] + " has ended")


def test_a_silent_process_counts_as_dead(port):
    first = Member(port, 2, 0, peer_timeout=0.6)
    connection = stranger(port, {"process": 1, "processes": 2, "host": "far", "pid": 7})
    first.done()
    before = time.monotonic()
    assert first.told.wait(5) and time.monotonic() - before < 2
    assert first.ends[0].startswith("process 1 (far, pid 7) gave no sign of life for 0.6 s")
    connection.close()


def test_a_process_that_never_comes_to_an_exchange(port):
    members = together(port, 2, start_timeout=0.5)
    with pytest.raises(TimeoutError, match="process 1 .* did not come to 'x' within 0.5 s"):
        members[0].call.exchange("x", 1)
    for member in members:
        member.call.close()


# --- who takes part --------------------------------------------------------------------------------------------------

VARIABLES = (
    "JAX_COORDINATOR_ADDRESS",
    "JAX_COORDINATOR_PORT",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
    "JOB_COMPLETION_INDEX",
)
SLURM = {
    "SLURM_JOB_ID": "4100",
    "SLURM_STEP_NODELIST": "tpu[007-009],gpu1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "4",
}


@pytest.fixture
def environment(monkeypatch):
    for name in (*VARIABLES, *SLURM, "SLURM_GPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    return lambda **variables: [monkeypatch.setenv(*item) for item in variables.items()]


def test_alone_unless_something_says_otherwise(environment):
    assert find_cluster() is None
    assert find_cluster(processes=1) is None
    environment(**SLURM)
    assert find_cluster(processes=1) is None
    with distributed.initialize(processes=1) as here:
        here.check_same({"anything": 1})
        assert (here.count, here.index) == (1, 0)


def test_flags_come_before_variables_and_those_before_detection(environment):
    environment(**SLURM)
    port = 10000 + 2 * 4100
    assert find_cluster() == Cluster(f"tpu007:{port}", 4, 2)
    environment(SLURM_NTASKS="8", SLURM_LOCALID="1")  # two tasks on a node
    assert find_cluster() == Cluster(f"tpu007:{port}", 8, 2, (1,))
    environment(SLURM_GPUS_PER_TASK="1", JAX_COORDINATOR_PORT="77")
    assert find_cluster() == Cluster("tpu007:77", 8, 2)
    environment(JAX_COORDINATOR_ADDRESS="job-0.job:8476", JAX_NUM_PROCESSES="4", JOB_COMPLETION_INDEX="3")
    assert find_cluster() == Cluster("job-0.job:8476", 4, 3)
    environment(JAX_PROCESS_ID="1")
    assert find_cluster() == Cluster("job-0.job:8476", 4, 1)
    assert find_cluster("[::1]:9", 2, 0) == Cluster("[::1]:9", 2, 0)
    assert (find_cluster("[::1]:9", 2, 0).host, find_cluster("[::1]:9", 2, 0).port) == ("::1", 9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("host:1", None, 0), "give all three"),
        ((None, 2, None), "give all three"),
        (("host", 2, 0), "host:port is needed"),
        (("host:x", 2, 0), "host:port is needed"),
        (("host:65535", 2, 0), "below 65535"),
        (("host:1", 2, 2), "process 2 of 2"),
        (("host:1", 0, 0), "process 0 of 0"),
    ],
)
def test_bad_descriptions_are_named(environment, given, message):
    with pytest.raises(ValueError, match=message):
        find_cluster(*given)


def test_bad_variables_are_named(environment):
    environment(JAX_COORDINATOR_ADDRESS="a:1", JAX_NUM_PROCESSES="4")
    with pytest.raises(ValueError, match="neither of JAX_PROCESS_ID, JOB_COMPLETION_INDEX"):
        find_cluster()
    environment(JAX_PROCESS_ID="one")
    with pytest.raises(ValueError, match="'one', not a number"):
        find_cluster()


def test_bad_times_are_named():
    with pytest.raises(ValueError, match="peer_timeout=0"):
        distributed.initialize(peer_timeout=0)


def test_what_differs_is_named():
    facts = [{"--seed": "1", "jax": '"a"'}, {"--seed": "2", "jax": '"a"'}, {"--seed": "1", "jax": '"a"', "--x": "3"}]
    assert distributed.differences(facts, ["p0", "p1", "p2"]) == [
        "--seed is 1 in p0, p2, and 2 in p1",
        "--x is absent in p0, p1, and 3 in p2",
    ]
    assert not distributed.differences(facts[:1] * 4, list("abcd"))


def test_a_command_alone_ends_with_its_message(capsys):
    parser = argparse.ArgumentParser()
    distributed.add_flags(parser)

    def fail(flags):
        raise ValueError("no such thing")

    with pytest.raises(SystemExit, match="name: no such thing"):
        distributed.run_command("name", fail, parser.parse_args(["--processes=1"]))
    with pytest.raises(SystemExit, match="name: .*give all three"):
        distributed.run_command("name", fail, parser.parse_args(["--process=1"]))


# --- real processes --------------------------------------------------------------------------------------------------

# Sums over all devices for ever; says so once, so that the test knows that the processes are inside collectives.
COLLECTIVES = """
import sys, time
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from dsv41_jax import distributed

how = sys.argv[4]
with distributed.initialize(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), peer_timeout=3) as here:
    mesh = Mesh(np.array(jax.devices()), "x")
    total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))
    ones = jax.make_array_from_callback((jax.device_count(),), NamedSharding(mesh, P("x")), lambda i: np.ones(1))
    assert int(total(ones)[0]) == jax.device_count() == 2 * here.count
    print("running", flush=True)
    if how == "fail" and here.index == 1:
        raise RuntimeError("something broke")
    if how == "wait" and here.index == 1:
        time.sleep(1000)
    while how != "finish":
        jax.block_until_ready(total(ones))
"""


def test_processes_that_finish_end_well(tmp_path):
    with start(COLLECTIVES, 2, tmp_path, devices=2, arguments=["finish"]) as run:
        run.all_well(60)


@pytest.mark.parametrize(
    ("how", "victim", "number", "seconds"),
    [
        ("run", 0, signal.SIGKILL, 5),
        pytest.param("run", 1, signal.SIGKILL, 5, marks=pytest.mark.slow),
        pytest.param("run", 1, signal.SIGTERM, 5, marks=pytest.mark.slow),
        ("wait", 1, signal.SIGKILL, 5),  # the other one waits for it inside a collective
        ("run", 1, signal.SIGSTOP, 12),  # silent, its connections open
    ],
)
def test_a_dead_process_ends_the_others(tmp_path, how, victim, number, seconds):
    with start(COLLECTIVES, 2, tmp_path, devices=2, arguments=[how]) as run:
        for i in range(2):
            run.printed(i, "running")
        time.sleep(0.5)
        run.kill(victim, number)
        ended = run.wait(1 - victim, seconds)
    assert ended.code not in (0, None)
    if victim == 1:
        assert ended.code == EXIT_CODE
        assert "process 1 (" in ended.err
        assert ("gave no sign of life for 3 s" if number == signal.SIGSTOP else "has ended") in ended.err
    else:  # jax's service dies with process 0, and may be quicker to end this one
        assert "process 0 (" in ended.err or "leader task was preempted/died" in ended.err


def test_an_error_in_one_process_ends_the_other(tmp_path):
    with start(COLLECTIVES, 2, tmp_path, devices=2, arguments=["fail"]) as run:
        first, second = run.wait(0, 60), run.wait(1, 60)
    assert second.code == 1 and "Traceback" in second.err and "RuntimeError: something broke" in second.err
    assert first.code == EXIT_CODE
    assert "process 1 (" in first.err and "failed: RuntimeError: something broke" in first.err


def generate(index: int, coordinator: str, *flags: str) -> list[str]:
    command = [str(ROOT / "launch/generate.py"), "--prompt=x", f"--coordinator={coordinator}", "--processes=2"]
    return [*command, f"--process={index}", *flags]


def test_flags_that_differ_are_named_by_every_process(tmp_path):
    where = free_coordinator()
    commands = [generate(0, where, "--seed=3"), generate(1, where, "--seed=4", "--max_new_tokens=2")]
    with Run(commands, tmp_path) as run:
        ended = [run.wait(i, 60) for i in range(2)]
    for each in ended:
        assert each.code == 1
        assert "--seed is 3 in process 0 (" in each.err and "and 4 in process 1 (" in each.err
        assert "--max_new_tokens is 60 in process 0 (" in each.err
        assert "--temperature" not in each.err and "Traceback" not in each.err


LOAD = """
import sys
import dsv41_jax as ds
from dsv41_jax import distributed
with distributed.initialize(*sys.argv[1:2], *map(int, sys.argv[2:4])) as here:
    ds.load(sys.argv[4 + here.index], numerics="float32")
"""


def test_models_that_differ_are_named_before_they_are_loaded(tmp_path, tiny_folder):
    folders = [tmp_path / "one" / "model", tmp_path / "two" / "model"]
    for folder in folders:
        shutil.copytree(tiny_folder, folder)
    config = json.loads((folders[1] / "config.json").read_text())
    config["text_config"]["rms_norm_eps"] = 1e-3
    (folders[1] / "config.json").write_text(json.dumps(config))
    with start(LOAD, 2, tmp_path, arguments=list(map(str, folders))) as run:
        for i in range(2):
            ended = run.wait(i, 60)
            assert ended.code == 1 and "ValueError: the processes differ:" in ended.err
            assert "model/config.json: rms_norm_eps is 1e-20 in process 0 (" in ended.err
            assert "and 0.001 in process 1 (" in ended.err
            assert ended.err.count("model/config.json") == 1


def test_a_command_whose_peer_never_comes(tmp_path):
    with Run([generate(0, free_coordinator(), "--start_timeout=1")], tmp_path) as run:
        ended = run.wait(0, 60)
    assert ended.code == 1
    assert "generate: 1 s have passed and process 1 of 2 did not come to 127.0.0.1:" in ended.err
