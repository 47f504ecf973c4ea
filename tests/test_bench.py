"""The benchmark: how numbers are put together, and (slow) that it runs."""

import json

import pytest

from launch import bench


def test_ratios_are_to_the_first_case_of_a_kind():
    speeds = iter([10, 100, 20, 50, 400, 10, 30, 100, 20])
    cases = [
        bench.Case("prefill", "released", "exact", lambda: (next(speeds), 1.0)),
        bench.Case("decode", "released", "no drafts", lambda: (next(speeds), 2.0)),
        bench.Case("decode", "released", "drafts", lambda: (next(speeds), 1.0), lambda: 1.5),
    ]
    bench.measure(cases, 2)  # the first round is not counted
    rows = bench.results(cases)
    assert [row["tokens_per_second"] for row in rows] == [40, 125, 15]
    assert [row["ratio"] for row in rows] == [1, 1, 15 / 125]
    assert (rows[1]["slowest"], rows[1]["fastest"]) == (50, 200)
    assert [row["accepted"] for row in rows] == [None, None, 1.5]
    assert bench.table(rows).splitlines()[-1] == "| decode | released | drafts | 15.0 (10.0 to 20.0) | 0.12 | 1.50 |"
    assert bench.machine()["cores"] >= 1


@pytest.mark.parametrize("arguments", [[], ["train"], ["generate", "--numerics", "fp3"]])
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
