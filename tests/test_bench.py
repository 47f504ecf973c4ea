"""The benchmark: how numbers are put together, and (slow) that it runs."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from dsv41_jax.benchmarks import generate, kernels
from dsv41_jax.benchmarks.machine import machine
from dsv41_jax.kernel_workloads import Workload
from dsv41_jax.kernel_workloads.timing import Roofline
from launch import bench


def test_ratios_are_to_the_first_case_of_a_kind():
    speeds = iter([10, 100, 20, 50, 400, 10, 30, 100, 20])
    cases = [
        generate.Case("prefill", "released", "exact", lambda: (next(speeds), 1.0)),
        generate.Case("decode", "released", "no drafts", lambda: (next(speeds), 2.0)),
        generate.Case("decode", "released", "drafts", lambda: (next(speeds), 1.0), lambda: 1.5),
    ]
    generate.measure(cases, 2)  # the first round is not counted
    rows = generate.results(cases)
    assert [row["tokens_per_second"] for row in rows] == [40, 125, 15]
    assert [row["ratio"] for row in rows] == [1, 1, 15 / 125]
    assert (rows[1]["slowest"], rows[1]["fastest"]) == (50, 200)
    assert [row["accepted"] for row in rows] == [None, None, 1.5]
    assert generate.table(rows).splitlines()[-1] == "| decode | released | drafts | 15.0 (10.0 to 20.0) | 0.12 | 1.50 |"
    assert machine()["cores"] >= 1


@pytest.mark.parametrize("arguments", [[], ["guess"], ["generate", "--numerics", "fp3"]])
def test_flags_are_checked(arguments, capsys):
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert "usage" in capsys.readouterr().err


@pytest.mark.slow
def test_generate_runs(capsys):
    bench.main("generate --numerics float32 --prompt_tokens 80 --new_tokens 8 --repeats 1 --json".split())
    found = json.loads(capsys.readouterr().out)
    rows = found["results"]
    assert [(row["kind"], row["how"]) for row in rows] == [
        ("prefill", "exact"),
        ("prefill", "ced"),
        *[("decode", f"temperature {t}, {drafts}") for t in (0, 1) for drafts in ("no drafts", "drafts")],
    ]
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert all((row["accepted"] is None) == ("no drafts" in row["how"] or row["kind"] == "prefill") for row in rows)
    assert found["machine"]["cpu"] and found["settings"]["prompt_tokens"] == 80


def test_a_kernel_is_timed_beside_its_reference():
    x = jnp.ones((4, 4))
    work = Workload("double", "mhc", lambda key: x, lambda a, how: 2 * a if how == "tpu" else a + a, 1000, 0)
    row = kernels.kernel_row(work, jax.random.key(0), "tpu", Roofline(copy=1e6, matmul=1.0, call=1e-5))
    assert row["ratio"] == pytest.approx(row["reference_ms"] / row["kernel_ms"])
    assert row["of_bound"] == pytest.approx(1e-3 / (row["kernel_ms"] / 1e3)) and not row["reference_of_a_part"]


def test_kernels_on_a_cpu_are_tiny_and_say_so(capsys):
    bench.main(["kernels", "--ops", "mhc"])
    text = capsys.readouterr().out
    assert "the times say nothing about accelerators" in text
    assert "| mhc | connect n=2 |" in text and "measured: copy" in text


def test_engram_lookups_are_counted_in_every_place(capsys):
    bench.main("engram --gigabytes 0.001 --tokens 4 32 --calls 2 --repeats 2 --json".split())
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["table_rows"] == 3787 and found["machine"]["table_bytes"] == 3787 * 264
    places = ("host", "host stored", "mmap cold", "mmap warm", "mmap hot")
    assert [(r["place"], r["tokens"]) for r in found["results"]] == [(p, t) for p in places for t in (4, 32)]
    assert all(0 < r["slowest"] <= r["median"] <= r["fastest"] for r in found["results"])


@pytest.mark.slow
def test_bundles_without_a_tpu():
    """In a process of its own: schedules are dumped by a process that asks for it before it uses libtpu."""
    command = [sys.executable, bench.__file__, "kernels", "--static", "v5e", "--ops", "mhc"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "| mhc | connect n=64 | v5e |" in text and " a token |" in text
    assert "connect n=64, v5e: mhc_connect" in text and "loop x " in text


@pytest.mark.slow
def test_train_runs(capsys):
    bench.main("train --rows 4 --length 64 --parts 2 --repeats 1 --json".split())
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 256 and len(found["results"]) == 5
    assert found["results"][0]["times_plain"] == 1 and all(row["seconds"] > 0 for row in found["results"])
