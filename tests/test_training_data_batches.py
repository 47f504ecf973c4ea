"""Batches: the arrays of packed rows, replay floors, and images whose embeddings are those of the model's prefill."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from dsv41_jax import vision
from dsv41_jax.checkpoint.names import nest
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_hash import EngramHasher
from dsv41_jax.image_input import expand_placeholders
from dsv41_jax.image_plan import preprocess_image
from dsv41_jax.numerics import FLOAT32
from dsv41_jax.training.batches import batch_shapes
from dsv41_jax.training.data_settings import DataSettings
from dsv41_jax.training.image_embeds import image_embeds
from dsv41_jax.training.records import Document, StoredImage
from dsv41_jax.training.replay_floor import drawn_prompt_length, replay_floors
from tiny_training import VOCAB, tiny_training_config
from training_data import BOS, EOS, maker, pipeline, png, random_documents, row_of, write_documents

CONFIG = tiny_training_config()
GOLDEN = Path(__file__).parent / "golden"
PICTURED = ModelConfig.from_json(GOLDEN / "tinyA_config.json")
MAP = np.arange(PICTURED.vocab_size) % PICTURED.engram_compressed_vocab_size


def test_a_row_of_pieces_becomes_arrays():
    whole, cut = Document(np.array([BOS, 5, 6, EOS])), Document(np.array([BOS, 7, 8, 9, 10, EOS]))
    batch = maker()([row_of((whole, 0, 4), (cut, 0, 3), (cut, 3, 6))], [0])
    pad = CONFIG.pad_token_id
    assert batch["token_ids"][0].tolist() == [BOS, 5, 6, EOS, BOS, 7, 8, 9, 10, EOS] + [pad] * 6
    assert batch["targets"][0].tolist() == [5, 6, EOS, pad, 7, 8, 9, 10, EOS, pad] + [pad] * 6
    assert batch["weights"][0].tolist() == [1, 1, 1, 0, 1, 1, 1, 1, 1, 0] + [0] * 6
    assert batch["segment_ids"][0].tolist() == [0] * 4 + [1] * 3 + [2] * 3 + [3] * 6
    dtypes = {name: str(value.dtype) for name, value in batch.items() if name != "memory"}
    assert dtypes == dict.fromkeys(("token_ids", "targets", "segment_ids"), "int32") | {"weights": "float32"}
    hasher = EngramHasher(CONFIG, np.arange(VOCAB))
    alone, _ = hasher(np.array([[9, 10, EOS]]))
    np.testing.assert_array_equal(batch["memory"]["l0"][0, 7:10], alone[0, 0])
    assert batch["memory"]["l0"].dtype == np.int32


def test_floors_follow_the_prompt_and_the_place_in_the_row():
    # A prompt of 6 with a window of 4: from token 2 on nothing below token 2 exists.
    assert replay_floors(9, 20, 6, 4).tolist() == [0, 0] + [22] * 7
    assert replay_floors(5, 20, 3, 4).tolist() == [20] * 5
    assert replay_floors(3, 20, None, 4).tolist() == [0] * 3
    assert replay_floors(3, 20, 9, 4).tolist() == [0] * 3  # the prompt's end lies in a later piece


def test_replay_and_prompt_targets_of_stored_prompts():
    window = CONFIG.sliding_window
    document = Document(np.arange(4, 4 + 14), prompt_length=10)
    batch = maker(replay_prompts=True, prompt_loss=False)([row_of((document, 0, 14))], [0])
    assert batch["replay"][0].tolist() == [0] * (10 - window) + [10 - window] * (4 + window) + [0, 0]
    assert batch["weights"][0].tolist() == [0] * 9 + [1] * 4 + [0] * 3
    batch = maker(replay_prompts=True)([row_of((document, 3, 14))], [0])  # a piece: its prompt is 3 tokens shorter
    assert batch["replay"][0, :11].tolist() == replay_floors(11, 0, 7, window).tolist()
    assert batch["weights"][0, :11].tolist() == [1] * 10 + [0]
    assert "replay" not in maker()([row_of((document, 0, 14))], [0])


def test_random_prompts_depend_on_their_counters_alone():
    drawn = [drawn_prompt_length(50, 0.3, 7, row, sample) for row in range(60) for sample in range(10)]
    assert [drawn_prompt_length(50, 0.3, 7, row, 3) for row in range(60)] == drawn[3::10]
    some = [length for length in drawn if length is not None]
    assert min(some) >= 1 and max(some) <= 49 and len(set(some)) > 30
    assert abs(len(some) / 600 - 0.3) < 0.075  # four standard deviations
    assert drawn != [drawn_prompt_length(50, 0.3, 8, row, sample) for row in range(60) for sample in range(10)]
    assert drawn_prompt_length(1, 1.0, 7, 0, 0) is None


def test_random_replay_of_a_pipeline(tmp_path):
    folder = write_documents(tmp_path / "a", random_documents(40, 30))
    batch = next(pipeline(folder, replay_probability=1.0))
    floors, segments = batch["replay"], batch["segment_ids"]
    assert (floors > 0).any() and (floors <= np.arange(32)).all()
    for row in range(4):
        for sample in np.unique(segments[row]):
            own = np.flatnonzero(segments[row] == sample)
            assert all(floor == 0 or floor >= own[0] for floor in floors[row, own])


# Images


@pytest.fixture(scope="module")
def pictured() -> tuple[Document, list]:
    """A document with the two images of the golden prompt, and the images as prefill takes them."""
    golden = load_file(GOLDEN / "tinyA_image.safetensors")
    encoded = [png(golden[f"image{i}.rgb"]) for i in range(2)]
    ids, inputs = expand_placeholders(golden["raw_ids"], [preprocess_image(e, PICTURED)[:2] for e in encoded], PICTURED)
    images = tuple(StoredImage(i.start, i.grid, e) for i, e in zip(inputs, encoded, strict=True))
    return Document(ids, None, images), inputs


@pytest.fixture(scope="module")
def picture_batch(pictured) -> dict:
    document, _ = pictured
    length = len(document.token_ids)
    text = Document(np.arange(5, 10))
    rows = [row_of((text, 0, 5), (document, 0, length)), row_of((text, 0, 5))]
    return maker(PICTURED, MAP, length=length + 9, images_per_row=3, image_patches=130)(rows, [0, 1])


def test_image_spans_are_masked_and_no_targets(pictured, picture_batch):
    document, inputs = pictured
    mask = np.zeros(picture_batch["token_ids"].shape, bool)
    for image in inputs:
        mask[0, 5 + image.start : 5 + image.end(PICTURED.vision)] = True
    np.testing.assert_array_equal(picture_batch["image_mask"], mask)
    end = 5 + len(document.token_ids)
    targets_in_span = np.append(mask[0, 1:], False)
    expected = ~targets_in_span
    expected[[4, end - 1]] = False  # last tokens of the samples
    expected[end:] = False
    np.testing.assert_array_equal(picture_batch["weights"][0], expected)
    rows, _ = EngramHasher(PICTURED, MAP)(document.token_ids[None], mask[:1, 5:end])
    for i, layer in enumerate(PICTURED.engram_layer_ids):
        np.testing.assert_array_equal(picture_batch["memory"][f"l{layer}"][0, 5:end], rows[i, 0])


def test_embeddings_equal_those_of_prefill_and_have_gradients(pictured, picture_batch):
    with safe_open(GOLDEN / "tinyA_model.safetensors", "numpy") as file:
        names = [name for name in file.keys() if name.split(".")[0] in vision.SPAN_PARAMS]
        flat = {name: file.get_tensor(name).astype(np.float32) for name in names}
    first = {name: value for name, value in flat.items() if ".blocks." not in name or ".blocks.0." in name}
    stacked = {
        tuple(name.replace(".blocks.0.", ".blocks.").split(".")): (
            np.stack([flat[name.replace(".blocks.0.", f".blocks.{i}.")] for i in range(2)])
            if ".blocks." in name
            else value
        )
        for name, value in first.items()
    }
    params = nest(stacked)
    shape = picture_batch["token_ids"].shape
    weights = np.random.default_rng(0).standard_normal((*shape, PICTURED.hidden_size)).astype(np.float32)

    @jax.jit
    def loss(params):
        made = image_embeds(PICTURED, FLOAT32, params, picture_batch["images"], shape)
        return (made * weights).sum(), made

    (_, made), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    _, inputs = pictured
    moved = [[dataclasses.replace(image, start=image.start + 5) for image in inputs], []]
    zero = jnp.zeros((*shape, PICTURED.hidden_size))
    expected = vision.merge_images(params, zero, moved, PICTURED, FLOAT32)
    # Float32 sums over another padding; spans are about 1.
    np.testing.assert_allclose(made, expected, atol=2e-5)
    assert (np.abs(np.asarray(expected)).max(-1)[picture_batch["image_mask"]] > 0).all()

    # A step along the gradient raises the loss by what the gradient says.
    norm = sum(float((g**2).sum()) for g in jax.tree.leaves(gradients))
    step = 1e-3 / np.sqrt(norm)
    up, down = (
        float(loss(jax.tree.map(lambda p, g, s=sign: p + s * step * g, params, gradients))[0]) for sign in (1, -1)
    )
    assert (up - down) / (2 * step) == pytest.approx(norm, rel=0.01)  # float32 differences
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.abs(gradient).max() > 0, path


def test_shapes_are_known_before_there_is_data(tmp_path, picture_batch):
    def forms(tree) -> dict:
        return jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)

    settings = DataSettings.of(
        {
            "sources": [{"path": "-"}],
            "length": picture_batch["weights"].shape[1],
            "images_per_row": 3,
            "image_patches": 130,
        }
    )
    assert forms(batch_shapes(settings, PICTURED, rows=2)) == forms(picture_batch)
    made = next(pipeline(write_documents(tmp_path / "a", random_documents(9, 30)), replay_prompts=True))
    settings = DataSettings.of({"sources": [{"path": "-"}], "batch": 4, "length": 32, "replay_prompts": True})
    assert forms(batch_shapes(settings, CONFIG)) == forms(made)


def test_an_image_for_another_model_is_refused(pictured):
    document, _ = pictured
    wrong = dataclasses.replace(document, images=(dataclasses.replace(document.images[0], grid=(3, 3)),))
    with pytest.raises(ValueError, match=r"tokenised for a grid of \(3, 3\) patches, this model gives it"):
        maker(PICTURED, MAP, length=64, images_per_row=2)([row_of((wrong, 0, len(wrong.token_ids)))], [0])
    with pytest.raises(ValueError, match="no vision tower"):
        maker(images_per_row=1)
