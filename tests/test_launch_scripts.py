"""The scripts that start a command on many hosts, with stand-ins for gcloud and srun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dsv41_jax.cluster import find_cluster
from processes import ROOT

FLAGS = ['--prompt=it\'s "here" $HOME', "--seed=3"]


def tool(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


def script(name: str, *arguments: str, path: Path, root: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}", **variables}
    command = ["bash", str(root / "launch" / name), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=ROOT)


@pytest.fixture
def gcloud(tmp_path):
    """Notes its arguments, one a line, and fails where a file `fail` is."""
    tool(tmp_path, "gcloud", f'#!/bin/sh\nprintf "%s\\n" "$@" "" >> {tmp_path}/calls\ntest ! -e {tmp_path}/fail\n')
    return tmp_path


def test_tpu_vm_runs_the_command_on_every_host(gcloud):
    done = script(
        "tpu_vm.sh", "slice", "zone-a", "run", "generate.py", *FLAGS, path=gcloud, GCLOUD_FLAGS="--project=p -q"
    )
    assert done.returncode == 0, done.stderr
    calls = (gcloud / "calls").read_text().splitlines()
    assert calls[:8] == ["compute", "tpus", "tpu-vm", "ssh", "slice", "--zone=zone-a", "--worker=all", "--project=p"]
    assert calls[8] == "-q"
    remote = calls[9].removeprefix("--command=")
    # What the host's shell makes of it: the flags as they were given.
    parsed = subprocess.run(
        ["bash", "-c", remote.replace("cd dsv41-jax && exec .venv/bin/python", "printf '%s\\n'")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert parsed.stdout.splitlines() == ["launch/generate.py", *FLAGS]
    (gcloud / "fail").touch()
    assert script("tpu_vm.sh", "slice", "zone-a", "run", "generate.py", path=gcloud).returncode != 0


def test_tpu_vm_sets_up_what_is_committed(gcloud):
    checkout = gcloud / "checkout"
    (checkout / "launch").mkdir(parents=True)
    shutil.copy(ROOT / "launch" / "tpu_vm.sh", checkout / "launch")
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for step in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *step], check=True)
    done = script("tpu_vm.sh", "slice", "zone-a", "setup", path=gcloud, root=checkout)
    assert done.returncode == 0, done.stderr
    calls = (gcloud / "calls").read_text()
    assert "scp" in calls and "slice:dsv41-jax.tar.gz" in calls and "pip install" in calls
    assert calls.count("--worker=all") == 2


@pytest.mark.parametrize("arguments", [[], ["slice", "zone"], ["slice", "zone", "fly"], ["slice", "zone", "run"]])
def test_tpu_vm_says_how_it_is_used(gcloud, arguments):
    done = script("tpu_vm.sh", *arguments, path=gcloud)
    assert done.returncode == 2 and "run COMMAND.py [FLAG...]" in done.stderr and "set -euo" not in done.stderr
    assert not (gcloud / "calls").exists()


SRUN = """#!/bin/bash
# Starts what follows the flags once for each node, as srun does.
while [[ $1 == --* ]]; do shift; done
for i in 0 1; do
    SLURM_STEP_NODELIST=localhost SLURM_STEP_NUM_NODES=2 SLURM_NTASKS=2 SLURM_PROCID=$i SLURM_LOCALID=0 "$@" &
    started+=($!)
done
code=0
for each in "${started[@]}"; do wait "$each" || code=$?; done
exit $code
"""


def test_slurm_processes_find_each_other(tmp_path):
    tool(tmp_path, "srun", SRUN)
    variables = {"PYTHON": sys.executable, "SLURM_JOB_ID": str(os.getpid()), "SLURM_SUBMIT_DIR": str(ROOT)}
    done = script("slurm.sh", "generate.py", *FLAGS, "--mesh=1x1x2", "--model=/nowhere", path=tmp_path, **variables)
    assert done.returncode == 1
    for i in range(2):
        assert f"process {i} (" in done.stderr
    assert done.stderr.count("all 2 processes are here") == 2
    assert done.stderr.count("generate: /nowhere: no such folder") >= 2
    assert script("slurm.sh", path=tmp_path).returncode == 2


def test_the_pods_of_the_job_are_the_processes(monkeypatch):
    service, job = yaml.safe_load_all((ROOT / "launch/gke_indexed_job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(variables["JAX_NUM_PROCESSES"])
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert (ROOT / container["args"][0]).is_file()
    for name, value in {**variables, "JOB_COMPLETION_INDEX": "3"}.items():
        monkeypatch.setenv(name, value)
    found = find_cluster()
    assert (found.processes, found.process) == (4, 3)
    assert found.host == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert [each["containerPort"] for each in container["ports"]] == [found.port, found.port + 1]
