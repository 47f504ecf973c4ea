"""From a name to a model's folder: the demo in this package, a local folder, or one fetched from the hub."""

import importlib.resources
import os
import re
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.safetensors)(?<!\.json)", re.ASCII)
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json", "tokenizer.json", "tokenizer_config.json"]


def find_folder(path: str | os.PathLike, revision: str | None) -> Path:
    """The local folder of a model, downloaded if `path` is a hub id; errors as `dsv41_jax.load`."""
    if not os.fspath(path):
        raise ValueError('path is empty; give "demo", a folder, or a hub id of the form "owner/name"')
    folder = Path(str(importlib.resources.files("dsv41_jax") / "demo_model")) if path == "demo" else Path(path)
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"revision={revision!r} is for hub ids, but {path} is a local folder; leave it out")
        return folder
    if folder.exists():
        raise FileNotFoundError(f"{path} is a file; give the folder that holds it")
    # A folder "owner" here means that a local path was meant.
    if not (isinstance(path, str) and _HUB_ID.fullmatch(path)) or folder.parent.exists():
        raise FileNotFoundError(f'{path}: no such folder, and not a hub id of the form "owner/name"')
    return _download(path, revision)


def _download(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import errors, snapshot_download  # not needed for local folders

    what = hub_id if revision is None else f"{hub_id} at revision {revision}"
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=_HUB_FILES))
    except errors.GatedRepoError as error:
        raise FileNotFoundError(
            f"{what}: the hub gives it only to those who accepted its terms; accept them on its page and log in "
            "(hf auth login), or give a local folder"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(f"{what}: the model is on the hub, but not that revision; check its name") from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{what}: neither a folder here nor a model on the hub that you may see; check the spelling, or log in "
            "(hf auth login) if it is private"
        ) from error
    except Exception as error:  # offline, time-outs, full disks: the kinds differ by version of the client
        raise ConnectionError(
            f"{what}: no such folder here, and fetching it from the hub failed "
            f"({type(error).__name__}: {next(iter(str(error).splitlines()), '')}); check the network and try again "
            "(what has arrived is kept), or give a local folder"
        ) from error
