"""Images through launch/serve.py: what a client's picture gives is what `Model.chat` gives."""

from __future__ import annotations

import base64
import importlib.resources
import io
import json

import jax
import numpy as np
import openai
import pytest
from PIL import Image

import dsv41_jax as ds
from dsv41_jax.checkpoint.save_released import save_released
from dsv41_jax.training.init import init_params
from serve_process import ServeProcess


def data_url(picture: np.ndarray) -> str:
    encoded = io.BytesIO()
    Image.fromarray(picture).save(encoded, "PNG")
    return "data:image/png;base64," + base64.b64encode(encoded.getvalue()).decode()


@pytest.mark.slow
def test_pictures_are_seen(golden, tmp_path):
    """The demo with a random vision tower: nonsense, and the same nonsense from both. In float32, because the server's
    code is optimised and the test's is not.
    """
    demo = ds.load("demo")
    tower = json.loads((golden / "tinyA_config.json").read_text())["vision_config"]
    config = ds.ModelConfig.from_json(demo.config.to_json() | {"vision_config": tower})
    demo_folder = importlib.resources.files("dsv41_jax") / "demo_model"
    params = init_params(config, jax.random.key(0)) | demo.params
    last = params["aligner"]["w2"]  # zero at the start of a training
    params["aligner"]["w2"] = last | {"weight": jax.random.normal(jax.random.key(1), last["weight"].shape) * 0.1}
    save_released(params, config, str(tmp_path / "seeing"), tokenizer=str(demo_folder))
    seeing = ds.load(tmp_path / "seeing", numerics="float32")
    pictures = np.zeros((2, 84, 126, 3), np.uint8)
    pictures[0, :, :63] = 255, 80, 0
    pictures[1, 20:] = np.random.default_rng(0).integers(0, 255, (64, 126, 3))
    answers = []
    with ServeProcess(tmp_path, f"--model={tmp_path / 'seeing'}", "--numerics=float32") as server:
        client = openai.OpenAI(base_url=f"{server.wait_ready().url}/v1", api_key="none", max_retries=0)
        for picture in pictures:
            content = [{"type": "image_url", "image_url": {"url": data_url(picture)}}, {"type": "text", "text": "And?"}]
            messages = [{"role": "user", "content": content}]
            options = {"max_tokens": 12, "temperature": 0, "reasoning_effort": "none", "logprobs": True}
            got = client.chat.completions.create(model="seeing", messages=messages, **options)
            own = seeing.chat(messages, thinking=None, max_new_tokens=12, temperature=0, logprobs=0)
            assert got.usage.prompt_tokens == own.usage["prompt_tokens"]
            assert got.choices[0].message.content == own.content
            numbers = [each.logprob for each in got.choices[0].logprobs.content]
            assert numbers == pytest.approx([each.logprob for each in own.logprobs], abs=1e-3)
            answers.append(numbers)
        assert server.state()["compilations"] == 0
    assert answers[0] != answers[1]
