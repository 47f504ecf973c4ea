"""What deploys a server: the image, the manifest, the script for TPU VMs. Nothing is built and no cluster is asked."""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dsv41_jax.cluster import find_cluster
from dsv41_jax.distributed import START_TIMEOUT
from dsv41_jax.serving.settings import ServeSettings
from dsv41_jax.topologies import parse
from load_server import scripted
from processes import ROOT
from test_launch_scripts import script, tool

DEFAULTS = ServeSettings()


# The image


def instructions() -> list[tuple[str, str]]:
    """Those of the Dockerfile: name and the rest, lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "launch/Dockerfile").read_text(), flags=re.M)
    joined = re.sub(r"\\\n\s*", "", text)
    return [tuple(line.split(" ", 1)) for line in joined.splitlines() if line.strip()]


def of_image(name: str) -> list[str]:
    """What follows an instruction, wherever it stands."""
    return [rest for each, rest in instructions() if each == name]


def copies() -> list[list[str]]:
    """Sources and target of each COPY."""
    return [shlex.split(rest) for rest in of_image("COPY")]


def test_the_image_copies_what_is_there_and_no_model():
    for *sources, target in copies():
        for source in sources:
            assert (ROOT / source).exists(), source
            if (ROOT / source).is_dir():
                assert target == source
    names = {source for *sources, _ in copies() for source in sources}
    assert {"setup.cfg", "pyproject.toml", "dsv41_jax", "pallas_kernels", "configs", "launch"} <= names
    assert not names & {".", "*", "notebooks", "tests"}
    # What setup.cfg names is copied, or pip fails.
    package = configparser.ConfigParser()
    package.read(ROOT / "setup.cfg")
    assert {
        package["metadata"]["long_description"].removeprefix("file: "),
        package["metadata"]["license_files"],
    } <= names


def test_the_image_installs_extras_that_exist():
    package = configparser.ConfigParser()
    package.read(ROOT / "setup.cfg")
    extras = package["options.extras_require"]
    [install] = of_image("RUN")
    assert '".[serve${ACCELERATOR:+,$ACCELERATOR}]"' in install and {"serve", "tpu", "cuda"} <= extras.keys()
    said = {
        kind: subprocess.run(
            ["sh", "-c", 'echo ".[serve${ACCELERATOR:+,$ACCELERATOR}]"'],
            env={"ACCELERATOR": kind},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for kind in ("", "tpu")
    }
    assert said == {"": ".[serve]", "tpu": ".[serve,tpu]"}
    [base] = of_image("FROM")
    version = tuple(map(int, re.fullmatch(r"python:(\d+)\.(\d+)-slim", base).groups()))
    least = tuple(map(int, package["options"]["python_requires"].removeprefix(">=").split(".")))
    assert version >= least
    constraints = install.split("-c ")[1].split()[0]
    assert [constraints, str(Path(constraints).parent) + "/"] in copies()


def test_the_image_runs_the_server_as_nobody_special():
    names = [name for name, _ in instructions()]
    [user], [cache] = of_image("USER"), of_image("VOLUME")
    assert (
        int(user) > 0 and f"useradd --uid {user}" in of_image("RUN")[0] and f"chown dsv41 {cache}" in of_image("RUN")[0]
    )
    assert names.index("RUN") < names.index("USER") < names.index("ENTRYPOINT")
    assert f"XDG_CACHE_HOME={cache}" in of_image("ENV")[0], "where compile_cache keeps programs"
    assert of_image("EXPOSE") == [str(DEFAULTS.port)]
    [entry], [flags] = of_image("ENTRYPOINT"), of_image("CMD")
    assert json.loads(entry) == ["python", "launch/serve.py"]  # no shell: signals reach the server
    values = dict(flag.removeprefix("--").split("=") for flag in json.loads(flags))
    assert (ROOT / values["config"]).is_file() and values["host"] == "0.0.0.0"


def test_the_image_asks_for_health(tmp_path):
    [check] = of_image("HEALTHCHECK")
    command = json.loads(check[check.index("CMD ") + 4 :])
    assert f"127.0.0.1:{DEFAULTS.port}/health'" in command[-1]
    assert probe(command, {}) != 0


def probe(command: list[str], environment: dict[str, str], url: str = "http://127.0.0.1:1") -> int:
    """The exit code of a probe, its port replaced by that of `url`."""
    assert command[0] == "python"
    command = [sys.executable, *(part.replace(f"http://127.0.0.1:{DEFAULTS.port}", url) for part in command[1:])]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, timeout=60).returncode


# The manifest


@pytest.fixture(scope="module")
def manifest() -> dict[tuple[str, str], dict]:
    found = list(yaml.safe_load_all((ROOT / "launch/gke_serve.yaml").read_text()))
    return {(each["kind"], each["metadata"]["name"]): each["spec"] for each in found}


@pytest.fixture(scope="module")
def pod(manifest) -> dict:
    return manifest["Job", "dsv41-serve"]["template"]["spec"]


@pytest.fixture(scope="module")
def container(pod) -> dict:
    [found] = pod["containers"]
    return found


@pytest.fixture(scope="module")
def flags(container) -> dict[str, str]:
    return dict(flag.removeprefix("--").split("=", 1) for flag in container["args"])


def test_flags_are_settings_that_parse(flags):
    kinds = {"port": int, "drain_seconds": float}
    given = {name: kinds.get(name, str)(value) for name, value in flags.items() if name != "config"}
    settings = ServeSettings.of(given)
    assert settings.host == "0.0.0.0" and (ROOT / flags["config"]).is_file()


def test_a_pod_is_a_process_of_the_slice(manifest, pod, container, flags, monkeypatch):
    job = manifest["Job", "dsv41-serve"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    machine = parse("v6e:" + pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"])
    assert job["completionMode"] == "Indexed" and "v6e16" in flags["config"]
    assert job["completions"] == job["parallelism"] == machine.hosts == int(variables["JAX_NUM_PROCESSES"])
    assert container["resources"]["limits"]["google.com/tpu"] * machine.hosts == machine.chips
    assert job["backoffLimit"] % machine.hosts == 0
    hosts = manifest["Service", pod["subdomain"]]
    assert hosts["clusterIP"] == "None" and hosts["publishNotReadyAddresses"]
    assert hosts["selector"] == {"job-name": "dsv41-serve"}
    for name, value in {**variables, "JOB_COMPLETION_INDEX": "2"}.items():
        monkeypatch.setenv(name, value)
    found = find_cluster()
    assert (found.processes, found.process) == (machine.hosts, 2)
    assert found.host == f"dsv41-serve-0.{pod['subdomain']}"
    assert {found.port, found.port + 1} < {each["containerPort"] for each in container["ports"]}


def test_clients_come_to_host_0_alone(manifest, container, flags):
    service = manifest["Service", "dsv41-serve"]
    index = "batch.kubernetes.io/job-completion-index"
    assert service["selector"] == {"job-name": "dsv41-serve", index: "0"}
    [port] = service["ports"]
    [named] = [each for each in container["ports"] if each.get("name") == port["targetPort"]]
    assert named["containerPort"] == int(flags["port"]) == DEFAULTS.port
    policy = manifest["NetworkPolicy", "dsv41-serve"]
    anyone, hosts = policy["ingress"]
    assert anyone == {"ports": [{"port": int(flags["port"])}]}
    assert hosts["from"] == [{"podSelector": policy["podSelector"]}]


def test_probes_ask_host_0_and_leave_the_others_alone(container):
    for kind, path in (("startupProbe", "health"), ("livenessProbe", "health"), ("readinessProbe", "ready")):
        each = container[kind]
        command = each["exec"]["command"]
        assert f'"http://127.0.0.1:{DEFAULTS.port}/{path}", timeout=5' in command[-1] and each["timeoutSeconds"] > 5
        assert probe(command, {"JOB_COMPLETION_INDEX": "3"}) == 0
        assert probe(command, {"JOB_COMPLETION_INDEX": "0"}) != 0, "no server"
    start = container["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] > 1.5 * START_TIMEOUT, "all hosts have come by then"
    for ready, code in (((200, {}), 0), ((503, {"status": "warming up"}), 1)):
        with scripted(ready=ready) as server:
            assert (probe(command, {"JOB_COMPLETION_INDEX": "0"}, server.url) != 0) == code


def test_a_pod_has_time_to_drain(pod, flags):
    assert pod["terminationGracePeriodSeconds"] >= float(flags["drain_seconds"]) + 15


def test_what_is_mounted_is_what_flags_name(pod, container, flags):
    mounts = {each["name"]: each for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    keys = Path(flags["api_key_file"])
    assert str(keys.parent) == mounts["keys"]["mountPath"] and mounts["keys"]["readOnly"]
    manual = (ROOT / "launch/gke_serve.yaml").read_text()
    secret = volumes["keys"]["secret"]
    assert f"create secret generic {secret['secretName']} --from-file={keys.name}=" in manual
    assert secret["defaultMode"] == 0o440 and "value" not in str(secret)
    assert flags["model"].startswith(mounts["models"]["mountPath"] + "/") and mounts["models"]["readOnly"]
    assert of_image("VOLUME") == [mounts["cache"]["mountPath"]]
    [user] = of_image("USER")
    assert pod["securityContext"] == {"runAsNonRoot": True, "runAsUser": int(user), "fsGroup": int(user)}


# TPU VMs


@pytest.fixture
def gcloud(tmp_path):
    """Notes its arguments, one a line."""
    tool(tmp_path, "gcloud", f'#!/bin/sh\nprintf "%s\\n" "$@" "" >> {tmp_path}/calls\n')
    return tmp_path


def test_a_tunnel_goes_to_the_first_host(gcloud):
    for arguments, port in (((), "8000"), (("9001",), "9001")):
        with contextlib.suppress(FileNotFoundError):
            (gcloud / "calls").unlink()
        done = script("tpu_vm.sh", "slice", "zone-a", "tunnel", *arguments, path=gcloud, GCLOUD_FLAGS="--project=p")
        assert done.returncode == 0, done.stderr
        assert (gcloud / "calls").read_text().split() == [
            *("compute", "tpus", "tpu-vm", "ssh", "slice", "--zone=zone-a", "--worker=0", "--project=p"),
            *("--", "-N", "-L", f"127.0.0.1:{port}:127.0.0.1:{port}"),
        ]


@pytest.mark.parametrize("arguments", [["x"], ["8000", "9000"], ["80 -R 1:1"]])
def test_a_tunnel_takes_a_port(gcloud, arguments):
    done = script("tpu_vm.sh", "slice", "zone-a", "tunnel", *arguments, path=gcloud)
    assert done.returncode == 2 and "tunnel [PORT]" in done.stderr and not (gcloud / "calls").exists()


def test_the_setup_of_a_slice_installs_the_server():
    text = (ROOT / "launch/tpu_vm.sh").read_text()
    assert "-e '.[tpu,serve]'" in text
    assert re.search(r"run serve.py --config=(\S+)", text)[1] == "configs/serve_v6e16.py"
