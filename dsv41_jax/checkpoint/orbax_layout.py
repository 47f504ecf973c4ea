"""How the parameter pytree lies in an Orbax checkpoint whose tensors can be written, and read, alone.

A leaf is a zarr array in a folder of its own, named by the leaf's dotted path. Its stacked axes (layer, expert) are cut
into chunks of one, and the rows of a tensor into its `pieces`; a chunk is a file. So no file is shared by two tensors:
any process writes any tensor at any time, a killed one leaves whole chunks behind (TensorStore gives a chunk its name
when it is complete), and a reader opens exactly the chunks it wants rows of. Chunks are not compressed: FP8 and FP4
codes hardly shrink, and so the size is known beforehand and a chunk of another size is damaged.

Orbax calls this form "zarr without OCDBT" and restores it like any other; `_METADATA` names the leaves. Arrays in
Orbax's other forms (OCDBT, zarr 3) can be read too.
"""

import itertools
import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tensorstore as ts

from dsv41_jax.checkpoint.manifest import TensorSpec
from dsv41_jax.checkpoint.names import LeafPath, NameMap
from dsv41_jax.checkpoint.pieces import piece_rows
from dsv41_jax.checkpoint.released import is_table
from dsv41_jax.checkpoint.storage import Storage, param_leaves

_DICT_KEY = 2  # Orbax's number for a key of a dict
_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_CACHE_BYTES = 16 << 20  # chunks of which only some rows were wanted so far, and the nodes of an OCDBT tree

Form = tuple[tuple[int, ...], np.dtype]  # shape and dtype


def stored_leaves(names: NameMap) -> dict[LeafPath, Form]:
    """(shape, dtype) of every leaf of the checkpoint: all but the Engram tables, in the forms the release stores."""
    return {path: form for path, form in param_leaves(names, Storage()).items() if not is_table(path)}


def chunk_shape(names: NameMap, path: LeafPath) -> tuple[int, ...]:
    """Shape of a leaf's chunks."""
    leaf = names.leaves[path]
    rows = piece_rows(TensorSpec(".".join(path), leaf.kind, leaf.shape))
    return (*(1 for _ in leaf.stack), rows, *leaf.shape[1:])


def create_array(params: Path, names: NameMap, path: LeafPath, form: Form) -> ts.TensorStore:
    """The array of a leaf for writing; it is made if it is not there."""
    shape, dtype = form
    metadata = {
        "shape": shape,
        "chunks": chunk_shape(names, path),
        "dtype": dtype.str if dtype.isbuiltin == 1 else dtype.name,
        "compressor": None,
        "fill_value": None,
        "dimension_separator": ".",
    }
    # A chunk of zeros is written too, so that a chunk that is not there is always damage.
    spec = {**_spec(params, path), "metadata": metadata, "store_data_equal_to_fill_value": True}
    return ts.open(spec, create=True, open=True).result()


def check_chunks(params: Path, names: NameMap, path: LeafPath, form: Form) -> list[str]:
    """What is wrong with the chunks of a leaf that was written here: absent ones, or of a wrong size.

    Removes the files that a killed writer left beside them.
    """
    chunk = chunk_shape(names, path)
    nbytes = int(np.prod(chunk, dtype=np.int64)) * form[1].itemsize
    counts = (range(-(-n // c)) for n, c in zip(form[0], chunk, strict=True))
    wanted = {".".join(map(str, index)) for index in itertools.product(*counts)}
    folder, problems = params / ".".join(path), []
    with os.scandir(folder) as files:
        for file in files:
            if file.name in wanted:
                wanted.remove(file.name)
                if file.stat().st_size != nbytes:
                    problems.append(f"{file.path}: {file.stat().st_size} bytes instead of {nbytes}")
            elif file.name != ".zarray":
                os.unlink(file)
    return problems + [f"{folder / name}: missing" for name in sorted(wanted)]


def write_metadata(params: Path, paths: Iterable[LeafPath]) -> None:
    """Orbax's own files: which leaves there are, restored as numpy arrays unless something else is asked for."""
    leaves = {
        str(path): {
            "key_metadata": [{"key": key, "key_type": _DICT_KEY} for key in path],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        for path in paths
    }
    tree = {
        "tree_metadata": leaves,
        "use_ocdbt": False,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    checkpoint = {"item_handlers": _HANDLER, "metrics": {}, "performance_metrics": {}, "custom_metadata": {}}
    (params / "_METADATA").write_text(json.dumps(tree), encoding="utf-8")
    (params / "_CHECKPOINT_METADATA").write_text(json.dumps(checkpoint), encoding="utf-8")


class ArrayReader:
    """Opens the leaves of any Orbax checkpoint for reading, each when it is first wanted; safe for several threads."""

    def __init__(self, params: Path):
        self._params = params
        self._zarr3 = bool(json.loads((params / "_METADATA").read_bytes()).get("use_zarr3"))
        self._ocdbt = (params / "manifest.ocdbt").is_file()
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
        self._arrays: dict[LeafPath, ts.TensorStore] = {}

    def rows(self, path: LeafPath, index: tuple[int, ...], start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of the tensor at stack index `index`. ValueError: a chunk is missing or damaged."""
        if path not in self._arrays:
            spec = _spec(self._params, path, zarr3=self._zarr3, ocdbt=self._ocdbt)
            spec |= {"fill_missing_data_reads": False, "recheck_cached_data": "open"}
            self._arrays[path] = ts.open(spec, read=True, context=self._context).result()
        return self._arrays[path][(*index, slice(start, stop))].read().result()


def _spec(params: Path, path: LeafPath, *, zarr3: bool = False, ocdbt: bool = False) -> dict:
    name = ".".join(path) + "/"
    store = {"driver": "file", "path": f"{params}/{name}"}
    if ocdbt:
        store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{params}/"}, "path": name}
    return {"driver": "zarr3" if zarr3 else "zarr", "kvstore": store}
