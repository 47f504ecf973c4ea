"""The names that notebooks, servers and benchmarks call, and what importing the package does not do."""

import inspect
import json
import subprocess
import sys

import numpy as np
import pytest

import dsv41_jax as ds

NOTHING = inspect.Parameter.empty
TEXT_OPTIONS = {
    "top_k": None,
    "top_p": None,
    "min_p": None,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "seed": 0,
    "stop": (),
    "stop_ids": (),
    "logprobs": None,
    "n": 1,
    "prefill_mode": "ced",
    "speculate": False,
}
SIGNATURES = {
    ds.load: {
        "path": NOTHING,
        "mesh": None,
        "numerics": "released",
        "engram": "device",
        "expert_storage": "fp4",
        "token_map": None,
        "implementation": "auto",
        "revision": None,
        "engram_hot_bytes": None,
        "dispatch": None,
    },
    ds.Model.generate: {"prompts": NOTHING, "max_new_tokens": 128, "temperature": 1.0} | TEXT_OPTIONS,
    ds.Model.chat: {
        "messages": NOTHING,
        "thinking": "high",
        "tools": None,
        "tool_choice": "auto",
        "stream": False,
        "max_new_tokens": 512,
        "temperature": 1.0,
    }
    | {name: default for name, default in TEXT_OPTIONS.items() if name != "n"},
    ds.Model.prefill: {
        "token_ids": NOTHING,
        "lengths": None,
        "mode": "exact",
        "images": None,
        "max_len": None,
        "all_logits": False,
    },
    ds.Model.decode: {"cache": NOTHING, "token_ids": NOTHING},
    ds.Model.draft: {"cache": NOTHING, "token_ids": NOTHING, "temperature": 0, "key": None},
    ds.Model.loss: {"token_ids": NOTHING, "segment_ids": None},
    ds.Model.loss_and_grads: {"token_ids": NOTHING, "segment_ids": None},
    ds.Cache.rewind: {"lengths": NOTHING},
    ds.layer_map: {"config": NOTHING},
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__qualname__)
def test_parameters_have_the_documented_names_and_defaults(function):
    parameters = inspect.signature(function).parameters
    found = {name: p.default for name, p in parameters.items() if name != "self"}
    assert found == SIGNATURES[function]
    assert list(found) == list(SIGNATURES[function])  # also when passed by position
    assert inspect.getdoc(function)


def test_stream_takes_what_generate_takes():
    parameters = dict(inspect.signature(ds.Model.stream).parameters)
    assert {name: p.default for name, p in parameters.items() if name not in ("self", "prompt")} == {
        name: default
        for name, default in SIGNATURES[ds.Model.generate].items()
        if name not in ("prompts", "logprobs", "n")
    }
    assert list(parameters)[1] == "prompt"


def test_names_of_the_package():
    for name in ds.__all__:
        assert getattr(ds, name) is not None
    assert {"load", "Model", "ModelConfig", "Cache", "ImageInput", "layer_map", "cache", "compilations"} <= set(
        ds.__all__
    )
    for name in ("config", "layer_map", "params"):
        assert isinstance(getattr(ds.Model, name), property)
    for name, member in vars(ds.Model).items():
        assert name.startswith("_") or inspect.getdoc(member), f"Model.{name} has no docstring"
    assert isinstance(ds.Cache.max_rewind, property)
    assert isinstance(ds.compilations(), int)


def test_an_image_is_patches_a_grid_and_a_start():
    image = ds.ImageInput(patches=np.zeros((36, 3, 14, 14), np.float32), grid=(6, 6), start=4)
    assert (image.grid, image.start) == ((6, 6), 4)


IMPORT = """
import sys, time, json
import jax, flax.linen, numpy, tokenizers

def no_network(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        raise RuntimeError(event)

sys.addaudithook(no_network)
before, start = set(sys.modules), time.process_time()
import dsv41_jax
seconds = time.process_time() - start
print(json.dumps({
    "seconds": seconds,
    "modules": sorted({name.split(".")[0] for name in sys.modules}),
    "backends": len(jax._src.xla_bridge._backends),
}))
"""


def test_importing_is_light():
    """No network, no other framework, no device taken, and not slow (processor time beyond JAX and Flax)."""
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    heavy = {"torch", "tensorflow", "transformers", "pandas", "huggingface_hub", "datasets", "pytest", "hypothesis"}
    assert not heavy & set(found["modules"])
    assert found["backends"] == 0
    assert found["seconds"] < 5
