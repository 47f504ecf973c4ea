"""`Model.chat` around the model: what it asks of it, and what it makes of scripted answers."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers
from PIL import Image
from tokenizers import AddedToken, decoders, models, pre_tokenizers

import dsv41_jax as ds
from dsv41_jax import text_calls
from dsv41_jax.chat_prompt import MARKERS
from dsv41_jax.completion import GeneratedToken, TokenLogprob
from dsv41_jax.image_input import check_images
from dsv41_jax.image_plan import preprocess_image
from dsv41_jax.tokenizer import Tokenizer
from test_chat import CALL, TOOL, answer_ids

USER = {"role": "user", "content": "Who is the Lord?"}


@pytest.fixture(scope="module")
def demo() -> ds.Model:
    return ds.load("demo")


@pytest.fixture
def answers(monkeypatch):
    """Makes the model give a written answer, control tokens spelled out; the list of requests it was asked."""

    def script(text: str, model: ds.Model) -> list:
        requests = []

        def generated(model_, request, ended):
            requests.append(request)
            check_images(request.images, request.token_ids, request.lengths, model_.config)
            ids = answer_ids(model.tokenizer, text, characters=False)
            for i in ids[: request.options.max_new_tokens]:
                wanted = request.options.logprobs is not None
                yield GeneratedToken(0, i, TokenLogprob(i, -0.5, ()) if wanted else None)

        monkeypatch.setattr(text_calls, "generated", generated)
        return requests

    return script


def test_a_message_comes_back(demo, answers):
    requests = answers("Think.</think>A 🌊 rock.", demo)
    message = demo.chat([USER], "max", temperature=0.3, top_p=0.9, seed=4)
    assert (message.content, message.reasoning, message.tool_calls) == ("A 🌊 rock.", "Think.", [])
    assert message.reasoning_content == message.reasoning and message.role == "assistant"
    assert message.finish_reason == "stop" and message.problems == () and message.logprobs is None
    request = requests[0]
    prompt = demo.tokenizer.decode(request.token_ids[0], keep_control=True)
    assert prompt.startswith("<｜begin▁of▁sentence｜><｜System｜>Reasoning Effort: 100 ")
    assert prompt.endswith("<｜User｜>Who is the Lord?<｜Assistant｜><think>")
    sampling = request.options.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, request.wanted) == (0.3, 0.9, 4, 1)
    thought, said = (len(demo.tokenizer.encode(text)) for text in ("Think.", "A 🌊 rock."))
    assert message.usage == {
        "prompt_tokens": len(request.token_ids[0]),
        "completion_tokens": thought + 1 + said,
        "reasoning_tokens": thought + 1,
        "total_tokens": len(request.token_ids[0]) + thought + 1 + said,
    }
    # It can stand among the next messages, as it is or as a dict.
    answers("More.", demo)
    again = answers("More.", demo)
    for earlier in (message, message.to_dict()):
        assert demo.chat([USER, earlier, USER], None, logprobs=0).content == "More."
    np.testing.assert_array_equal(again[0].token_ids, again[1].token_ids)


def test_streamed_deltas_add_up(demo, answers):
    text = "Think.</think>A 🌊 rock." + CALL
    answers(text, demo)
    deltas = list(demo.chat([USER], tools=[TOOL], stream=True))
    assert len(deltas) > 10 and all(deltas)
    assert all(d.finish_reason is None and d.usage is None for d in deltas[:-1])
    message = demo.chat([USER], tools=[TOOL], logprobs=0)
    assert "".join(d.content for d in deltas) == message.content == "A 🌊 rock."
    assert "".join(d.reasoning for d in deltas) == message.reasoning == "Think."
    assert deltas[-1].finish_reason == message.finish_reason == "tool_calls"
    assert deltas[-1].usage == message.usage
    assert len(message.logprobs) == message.usage["completion_tokens"]
    pieces = [piece for delta in deltas for piece in delta.tool_calls]
    arguments = "".join(piece["function"].get("arguments", "") for piece in pieces)
    (call,) = message.tool_calls
    assert call["function"] == {"name": "run", "arguments": arguments} and call["id"] and call["type"] == "function"
    # The calls go back with their results.
    answers("Two files.", demo)
    result = {"role": "tool", "tool_call_id": call["id"], "content": "a b"}
    assert demo.chat([USER, message, result], None, tools=[TOOL]).content == "Two files."


def test_where_an_answer_ends(demo, answers):
    answers("a STOP b</think>c ST d STOP e", demo)
    for options in ({}, {"stop": ["STOP", "zz"]}):
        message = demo.chat([USER], **options)
        assert message.reasoning == "a STOP b" and message.finish_reason == "stop"
        assert message.content == ("c ST d " if options else "c ST d STOP e")
        pieces = list(demo.chat([USER], stream=True, **options))
        assert "".join(d.content for d in pieces) == message.content
    short = demo.chat([USER], max_new_tokens=2)
    assert short.finish_reason == "length" and short.usage["completion_tokens"] == 2
    assert short.problems == ("the reasoning did not end",)
    answers("c S", demo)
    assert demo.chat([USER], None, stop="STOP").content == "c S"  # held back, and let through at the end


def test_an_answer_is_continued(demo, answers):
    requests = answers(" and more</think> text", demo)
    begun = {"role": "assistant", "content": "", "reasoning_content": "So far", "prefix": True}
    message = demo.chat([USER, begun], "low")
    assert (message.reasoning, message.content) == (" and more", " text")
    assert demo.tokenizer.decode(requests[0].token_ids[0]).endswith("So far")
    answers("\nB", demo)
    assert demo.chat([USER, begun | {"content": "A", "reasoning_content": ""}], None).content == "\nB"
    with pytest.raises(ValueError, match="the last message is an assistant's"):
        demo.chat([USER, {"role": "assistant", "content": "done"}])


def test_options_are_checked_at_the_call(demo, monkeypatch):
    def heavy(*_args, **_kwargs):
        raise AssertionError("the model ran")

    monkeypatch.setattr(ds.Model, "prefill", heavy)
    for options, message in (
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"thinking": "xhigh"}, "thinking='xhigh'"),
        ({"max_new_tokens": 9000}, "exceed max_position_embeddings=8192"),
        ({"stop": ""}, "stop"),
        ({"messages": []}, "at least one message"),
        ({"messages": None}, "messages=None"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "image": np.zeros((9, 9, 3), np.uint8)}]}]},
            "tower",
        ),
    ):
        for stream in (False, True):
            with pytest.raises((ValueError, TypeError), match=message):
                demo.chat(**{"messages": [USER], "stream": stream} | options)


def markup_tokenizer() -> Tokenizer:
    """512 tokens for the tiny model: its special ids, the markers of chat, the bytes, and fillers."""
    names = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<pad>", *MARKERS]
    control = [*names, "<｜deepseek_image｜>"]
    names += sorted(pre_tokenizers.ByteLevel.alphabet())
    names += [f"<filler {i}>" for i in range(len(names), 512)]
    names[500] = "<｜deepseek_image｜>"
    backend = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in control])
    return Tokenizer(backend, 0, 1)


def test_images_reach_the_model(tiny, answers, monkeypatch):
    model = tiny("float32")
    monkeypatch.setattr(model, "tokenizer", markup_tokenizer())
    requests = answers("Grey.", model)
    grey = np.full((60, 90, 3), 90, np.uint8)
    content = [{"type": "text", "text": "<｜deepseek_image｜>?"}, {"type": "image", "image": Image.fromarray(grey)}]
    message = model.chat([{"role": "user", "content": content}], None)
    assert message.content == "Grey."
    (request,) = requests
    ((image,),) = request.images
    patches, grid, types = preprocess_image(grey, model.config)
    np.testing.assert_array_equal(image.patches, patches)
    ids = request.token_ids[0]
    span = np.flatnonzero(ids == model.config.image_token_id)
    np.testing.assert_array_equal(span, image.start + np.arange(len(types)))
    assert image.grid == grid and message.usage["prompt_tokens"] == len(ids)
    assert model.tokenizer.decode(ids).startswith("<｜deepseek_image｜>?\n\n")
