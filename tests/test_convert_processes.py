"""Several processes share a conversion; process 0 completes it, and says who is missing instead of waiting for ever."""

import json
import shutil
import time

import numpy as np
import pytest

from convert_child import Child
from dsv41_jax.checkpoint import conversion
from dsv41_jax.checkpoint.checksum import crc32, read_checksums
from dsv41_jax.checkpoint.conversion import Processes
from dsv41_jax.checkpoint.manifest import TensorSpec
from dsv41_jax.checkpoint.orbax import OrbaxFolder
from dsv41_jax.checkpoint.pieces import Piece, piece_rows, pieces, share, total_bytes
from dsv41_jax.checkpoint.process_lock import hold
from dsv41_jax.checkpoint.released_folder import ReleasedFolder
from launch.convert import main


@pytest.fixture(scope="module")
def released(tiny_folder, golden, tmp_path_factory):
    """Tiny model A with a token map in its folder."""
    path = tmp_path_factory.mktemp("processes") / "tiny"
    shutil.copytree(tiny_folder, path)
    np.save(path / "token_map.npy", np.load(golden / "tinyA_token_map.npz")["token_map"])
    return path


@pytest.fixture(scope="module")
def checksums(released):
    source = ReleasedFolder.open(released)
    return {name: crc32(source.read(name)) for name in source.entries}


def command(released, tmp_path, processes, *flags):
    """The command line of each process."""
    argv = [str(released), str(tmp_path / "model"), "--to=orbax", f"--processes={processes}", *flags]
    return [[*argv, f"--process={i}"] for i in range(processes)]


def assert_complete(tmp_path, checksums):
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    assert read_checksums(tmp_path / "model").tensors == checksums
    opened = OrbaxFolder.open(tmp_path / "model")
    found = {name: crc32(opened.rows(name, 0, opened.entries[name].shape[0])) for name in opened.entries}
    assert found == checksums


def journal(tmp_path, process):
    lines = (tmp_path / f".model.partial/.progress/process-{process}.jsonl").read_text().splitlines()
    return [json.loads(line)[0] for line in lines if line.startswith("[")]


def test_each_process_converts_its_share(released, checksums, tmp_path, capsys):
    argv = command(released, tmp_path, 3)
    for process in (2, 1):
        assert main(argv[process]) == 0
        assert f"process {process}: its share is done" in capsys.readouterr().out
        assert not (tmp_path / "model").exists()
    one, two = (set(journal(tmp_path, process)) for process in (1, 2))
    nbytes = {name: spec.nbytes for name, spec in ReleasedFolder.open(released).entries.items()}
    for names in (one, two):
        assert abs(sum(map(nbytes.get, names)) / sum(nbytes.values()) - 1 / 3) < 0.05
    assert not one & two
    assert main(argv[1]) == 0  # again: nothing to do
    assert "are done already and are skipped" in capsys.readouterr().out
    assert main(argv[0]) == 0
    assert "model: complete" in capsys.readouterr().out
    assert_complete(tmp_path, checksums)
    for process in range(3):
        assert main(argv[process]) == 0
        assert "complete already" in capsys.readouterr().out


def test_at_the_same_time(released, checksums, tmp_path):
    """Process 0 starts first and waits; the others kill nobody's work."""
    (tmp_path / "new").mkdir()
    argv = command(released, tmp_path / "new", 3)
    children = [Child(argv[process], tmp_path / "new") for process in range(3)]
    runs = [child.result() for child in children]
    assert [run.code for run in runs] == [0, 0, 0], [run.shown for run in runs]
    assert_complete(tmp_path / "new", checksums)


def test_a_missing_process_is_an_error(released, checksums, tmp_path, capsys):
    argv = command(released, tmp_path, 3, "--wait=1")
    assert main(argv[2]) == 0
    start = time.monotonic()
    assert main(argv[0]) == 1
    assert time.monotonic() - start < 20
    shown = capsys.readouterr().err
    assert "not done: the shares of process 1 (" in shown and "process 2 (" not in shown
    assert "no process has shown progress for 1 seconds" in shown and "start those processes" in shown
    assert main([*argv[0], "--finish"]) == 1
    assert "not done: the shares of process 1 (" in capsys.readouterr().err
    assert main(argv[1]) == 0
    assert main([*argv[0], "--finish", "--verify"]) == 0
    assert "verified" in capsys.readouterr().out
    assert_complete(tmp_path, checksums)


def test_a_killed_process_is_an_error_and_goes_on(released, checksums, tmp_path, capsys):
    """And any other number of processes can do the rest."""
    (tmp_path / "new").mkdir()
    argv = command(released, tmp_path / "new", 2, "--wait=1")
    assert Child(argv[1], tmp_path / "new", kill_at=200).result().code == -9
    assert len(journal(tmp_path / "new", 1)) > 50
    assert main(argv[0]) == 1
    assert "not done: the shares of process 1 (" in capsys.readouterr().err
    argv = command(released, tmp_path / "new", 3)
    assert main(argv[2]) == 0
    assert main(command(released, tmp_path / "new", 1)[0]) == 0
    assert "are done already and are skipped" in capsys.readouterr().out
    assert_complete(tmp_path / "new", checksums)


def test_the_folder_is_not_completed_while_another_process_works(released, checksums, tmp_path, capsys):
    with hold(tmp_path / ".model.partial.lock-1"):
        assert main(command(released, tmp_path, 1, "--wait=1")[0]) == 1
    assert "another process is still at work" in capsys.readouterr().err
    assert main(command(released, tmp_path, 1)[0]) == 0
    assert_complete(tmp_path, checksums)


def test_a_share_read_from_a_copy_of_the_source(released, checksums, tmp_path, capsys, monkeypatch):
    """On another machine the files have other times: that is no change, and nothing is compared again."""
    (tmp_path / "new").mkdir()
    copy = shutil.copytree(released, tmp_path / "copy")
    (copy / "model.safetensors").touch()
    assert main(command(copy, tmp_path / "new", 2)[1]) == 0
    monkeypatch.setattr(conversion, "crc32", lambda _: pytest.fail("compared"))
    assert main(command(released, tmp_path / "new", 2)[0]) == 0
    assert_complete(tmp_path / "new", checksums)
    assert main(command(copy, tmp_path / "new", 2)[1]) == 0
    assert "complete already" in capsys.readouterr().out


@pytest.mark.parametrize(
    "variables",
    [
        lambda i: {"JAX_COORDINATOR_ADDRESS": "localhost:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(i)},
        lambda i: {
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": str(i),
            "SLURM_LOCALID": str(i),
        },
    ],
)
def test_the_environment_says_which_process_this_is(variables, released, checksums, tmp_path, capsys, monkeypatch):
    argv = [str(released), str(tmp_path / "model"), "--to=orbax"]
    for i in (1, 0):
        for name, value in variables(i).items():
            monkeypatch.setenv(name, value)
        assert main(argv) == 0
        assert ("process 1: its share is done" if i else "model: complete") in capsys.readouterr().out
    assert_complete(tmp_path, checksums)
    assert main([argv[0], str(tmp_path / "alone"), "--to=orbax", "--processes=1"]) == 0


# --- shares and pieces -----------------------------------------------------------------------------------------------


def test_shares_are_even_and_leave_nothing_out():
    sizes = np.random.default_rng(0).integers(1, 1000, 500).tolist()
    everything = [Piece(f"t{i}", 0, 1, n) for i, n in enumerate(sizes)]
    for processes in (1, 2, 7, 64):
        shares = share(everything, processes)
        assert [piece for part in shares for piece in part] == everything
        assert all(abs(total_bytes(part) - sum(sizes) / processes) <= 1000 for part in shares)
    assert [len(part) for part in share(everything[:2], 4)].count(0) == 2


def test_pieces_are_bounded():
    """Shapes of the released model: embedding, experts, scales, an Engram table, a vector."""
    for kind, shape, chunks in (
        ("bf16", (129280, 5120), 256),
        ("fp8", (32768, 1280), 8),
        ("fp4", (2304, 2560), 1),
        ("fp4_scale", (5120, 72), 1),
        ("table", (384006168, 256), 16384),
        ("f32", (3,), 1),
    ):
        spec = TensorSpec("t", kind, shape)
        rows, cut = piece_rows(spec), list(pieces(spec))
        assert -(-shape[0] // rows) == chunks and rows * spec.nbytes // shape[0] <= 8 << 20, (kind, rows)
        assert (cut[0].start, cut[-1].stop) == (0, shape[0])
        assert [p.stop for p in cut[:-1]] == [p.start for p in cut[1:]]
        assert all(p.start % rows == 0 and p.nbytes <= 8 << 20 for p in cut)
        assert total_bytes(cut) == spec.nbytes


def test_processes_are_numbered_from_zero():
    for wrong in ((1, 1), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="there are processes 0 to"):
            Processes(*wrong)
    with pytest.raises(ValueError, match="must be positive"):
        Processes(0, 2, 0)
