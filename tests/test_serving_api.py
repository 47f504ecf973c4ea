"""The public APIs through a real socket and their own clients; a scripted engine writes the answers."""

import json
import re

import httpx
import numpy as np
import openai
import pytest

from dsv41_jax.serving.constraints import Constraints as RealConstraints
from scripted_engine import (
    Constraints,
    Script,
    ScriptedEngine,
    anthropic_client,
    demo_config,
    demo_tokenizer,
    openai_client,
    serve,
    token_ids,
)

USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = {"name": "weather", "description": "Tells é.", "parameters": SCHEMA}
CHAT_TOOLS = [{"type": "function", "function": TOOL}]
RESPONSES_TOOLS = [{"type": "function", **TOOL}]
MESSAGES_TOOLS = [{"name": "weather", "description": "Tells é.", "input_schema": SCHEMA}]


def call(city: str, days: int) -> str:
    return (
        '<｜DSML｜ invoke name="weather">\n'
        f'<｜DSML｜ parameter name="city" string="true">{city}</｜DSML｜ parameter>\n'
        f'<｜DSML｜ parameter name="days" string="false">{days}</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n"
    )


CALLS = f"\n\n<｜DSML｜ calls>\n{call('2>&1 東京', 3)}{call('Oslo', 1)}</｜DSML｜ calls>"
ARGUMENTS = [{"city": "2>&1 東京", "days": 3}, {"city": "Oslo", "days": 1}]
THOUGHT, TEXT = "Hm,\n東京 \U0001f600.", "Grüße \U0001f600 <b> & 1 < 2 \u2028 end"


def prompt_text(request) -> str:
    return demo_tokenizer().decode(request.token_ids, keep_control=True)


# --- answers, whole and streamed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_bytes", [False, True])
def test_chat_whole_and_streamed(by_bytes):
    engine = ScriptedEngine(Script(f"{THOUGHT}</think>{TEXT}", by_bytes, cached=2))
    with serve(engine) as server:
        client = openai_client(server)
        whole = client.chat.completions.create(model="demo", messages=USER)
        message = whole.choices[0].message
        assert (message.content, message.reasoning_content, message.tool_calls) == (TEXT, THOUGHT, None)
        assert whole.choices[0].finish_reason == "stop" and whole.object == "chat.completion"
        ids = token_ids(f"{THOUGHT}</think>{TEXT}", by_bytes)
        assert whole.usage.prompt_tokens == len(engine.requests[0].token_ids)
        assert whole.usage.completion_tokens == len(ids)
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + len(ids)
        assert whole.usage.prompt_tokens_details.cached_tokens == 2
        thought = whole.usage.completion_tokens_details.reasoning_tokens
        assert thought == ids.index(demo_tokenizer().token_id("</think>")) + 1
        options = {"include_usage": True}
        stream = client.chat.completions.create(model="demo", messages=USER, stream=True, stream_options=options)
        chunks = list(stream)
        *body, last = chunks
        deltas = [chunk.choices[0].delta for chunk in body]
        assert "".join(delta.content or "" for delta in deltas) == TEXT
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == THOUGHT
        assert "\ufffd" not in "".join(delta.content or "" for delta in deltas)
        assert len(body) >= len(THOUGHT + TEXT) if by_bytes else len(body) > 5
        assert [chunk.choices[0].finish_reason for chunk in body][-1] == "stop"
        assert last.choices == [] and last.usage == whole.usage
        assert all(chunk.usage is None for chunk in body) and len({chunk.id for chunk in chunks}) == 1
        plain = list(client.chat.completions.create(model="demo", messages=USER, stream=True))
        assert all(chunk.usage is None and chunk.choices for chunk in plain)


@pytest.mark.parametrize("by_bytes", [False, True])
def test_responses_whole_and_streamed(by_bytes):
    engine = ScriptedEngine(Script(f"{THOUGHT}</think>{TEXT}", by_bytes, cached=3))
    with serve(engine) as server:
        client = openai_client(server)
        whole = client.responses.create(model="demo", input="hi", instructions="Be short.")
        assert whole.output_text == TEXT and whole.status == "completed"
        assert [item.type for item in whole.output] == ["reasoning", "message"]
        assert whole.output[0].content[0].text == THOUGHT
        assert whole.usage.input_tokens_details.cached_tokens == 3
        assert whole.usage.output_tokens_details.reasoning_tokens > 1
        assert "Be short." in prompt_text(engine.requests[0])
        with client.responses.stream(model="demo", input="hi", instructions="Be short.") as stream:
            seen = list(stream)
            final = stream.get_final_response()
        assert "".join(e.delta for e in seen if e.type == "response.output_text.delta") == TEXT
        assert "".join(e.delta for e in seen if e.type == "response.reasoning_text.delta") == THOUGHT
        assert final.output_text == TEXT and final.usage == whole.usage
        assert [event.sequence_number for event in seen] == list(range(len(seen)))


@pytest.mark.parametrize("by_bytes", [False, True])
def test_messages_whole_and_streamed(by_bytes):
    engine = ScriptedEngine(Script(f"{THOUGHT}</think>{TEXT}", by_bytes, cached=3))
    with serve(engine) as server:
        client = anthropic_client(server)
        asked = {"model": "demo", "max_tokens": 200, "messages": USER, "system": "Be short."}
        whole = client.messages.create(**asked)
        assert [block.type for block in whole.content] == ["thinking", "text"]
        assert (whole.content[0].thinking, whole.content[1].text) == (THOUGHT, TEXT)
        assert whole.stop_reason == "end_turn"
        assert whole.usage.cache_read_input_tokens == 3
        assert whole.usage.input_tokens == len(engine.requests[0].token_ids) - 3
        with client.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == TEXT
            final = stream.get_final_message()
        assert final.content == whole.content or [b.type for b in final.content] == ["thinking", "text"]
        assert final.content[0].thinking == THOUGHT and final.usage == whole.usage
        assert client.messages.count_tokens(model="demo", messages=USER, system="Be short.").input_tokens == len(
            engine.requests[0].token_ids
        )


def test_markup_that_the_model_spells_is_text():
    spelled = "x </think> ｜DSML｜ calls> <｜DSML｜ invoke>"
    # Encoded as plain text: none of it is a control token.
    engine = ScriptedEngine(Script("r</think>ok"))
    plain = demo_tokenizer().encode(spelled)
    with serve(engine) as server, pytest.MonkeyPatch.context() as patch:
        ids = [demo_tokenizer().token_id("</think>"), *plain]
        patch.setattr("scripted_engine.token_ids", lambda text, by_bytes: ids)
        client = openai_client(server)
        message = client.chat.completions.create(model="demo", messages=USER, tools=CHAT_TOOLS).choices[0].message
        assert (message.content, message.tool_calls) == (spelled, None)
        assert client.responses.create(model="demo", input="hi", tools=RESPONSES_TOOLS).output_text == spelled
        found = anthropic_client(server).messages.create(
            model="demo", max_tokens=99, messages=USER, tools=MESSAGES_TOOLS
        )
        assert found.content[-1].text == spelled


def test_thinking_and_efforts():
    with serve(engine := ScriptedEngine()) as server:

        def asked(path: str, **body) -> str:
            response = server.http.post(path, json={"model": "demo", "max_tokens": 9} | body)
            assert response.status_code == 200, response.text
            return prompt_text(engine.requests[-1])

        chat, messages = "/v1/chat/completions", "/v1/messages"
        responses = {"path": "/v1/responses", "input": "hi"}
        assert "Reasoning Effort: 75 " in asked(chat, messages=USER)
        for effort, number in (("low", 50), ("high", 75), ("max", 100), (1, 1), (42, 42), (100, 100)):
            line = f"Reasoning Effort: {number} (range"
            assert line in asked(chat, messages=USER, reasoning_effort=effort)
            assert line in asked(messages, messages=USER, output_config={"effort": effort})
            assert line in asked(**responses, reasoning={"effort": effort})
        for prompt in (
            asked(chat, messages=USER, reasoning_effort="none"),
            asked(chat, messages=USER, thinking={"type": "disabled"}),
            asked(**responses, reasoning={"effort": "none"}),
            asked(messages, messages=USER, thinking={"type": "disabled"}),
        ):
            assert prompt.endswith("<｜Assistant｜></think>") and "Effort" not in prompt
        developer = [{"role": "developer", "content": "D"}, *USER]
        for prompt in (
            asked(chat, messages=developer),
            asked("/v1/responses", input=developer),
            asked(messages, messages=developer),
        ):
            assert "(range" in prompt and "\n\nD<｜User｜>hi<｜Assistant｜><think>" in prompt


def test_an_answer_that_is_continued():
    with serve(engine := ScriptedEngine("more")) as server:
        begun = [*USER, {"role": "assistant", "content": "So far", "prefix": True}]
        answer = openai_client(server).chat.completions.create(model="demo", messages=begun)
        assert answer.choices[0].message.content == "more"
        assert prompt_text(engine.requests[0]).endswith("</think>So far")


# --- tools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_bytes", [False, True])
def test_chat_tools_there_and_back(by_bytes):
    engine = ScriptedEngine(
        Script(f"r</think>Look:{CALLS}", by_bytes), Script(f"r</think>{CALLS}", by_bytes), Script("</think>Rain.")
    )
    with serve(engine, default_max_tokens=1000) as server:
        client = openai_client(server)
        first = client.chat.completions.create(model="demo", messages=USER, tools=CHAT_TOOLS)
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls" and message.content == "Look:"
        assert [json.loads(c.function.arguments) for c in message.tool_calls] == ARGUMENTS
        pieces = {}
        for chunk in client.chat.completions.create(model="demo", messages=USER, tools=CHAT_TOOLS, stream=True):
            for piece in chunk.choices[0].delta.tool_calls or ():
                assert (piece.id is not None) == (piece.index not in pieces)
                name, arguments = pieces.get(piece.index, (piece.function.name, ""))
                pieces[piece.index] = name, arguments + (piece.function.arguments or "")
        assert [(name, json.loads(text)) for name, text in pieces.values()] == [("weather", a) for a in ARGUMENTS]
        results = [
            {"role": "tool", "tool_call_id": c.id, "content": f"wet {i}"} for i, c in enumerate(message.tool_calls)
        ]
        history = [*USER, message.model_dump(exclude_none=True), *results]
        last = client.chat.completions.create(model="demo", messages=history, tools=CHAT_TOOLS)
        assert last.choices[0].message.content == "Rain."
        prompt = prompt_text(engine.requests[-1])
        assert prompt.endswith(
            f"Look:{CALLS}<｜end▁of▁sentence｜><｜User｜><tool_result>wet 0</tool_result>\n\n"
            "<tool_result>wet 1</tool_result><｜Assistant｜><think>"
        )


def test_responses_and_messages_tools_there_and_back():
    engine = ScriptedEngine(*[Script(f"r</think>{CALLS}", True), Script("</think>Rain.")] * 2)
    with serve(engine, default_max_tokens=1000) as server:
        client = openai_client(server)
        with client.responses.stream(model="demo", input="hi", tools=RESPONSES_TOOLS) as stream:
            found = [e for e in stream if e.type == "response.function_call_arguments.done"]
            first = stream.get_final_response()
        assert [json.loads(event.arguments) for event in found] == ARGUMENTS
        calls = [item for item in first.output if item.type == "function_call"]
        assert [json.loads(item.arguments) for item in calls] == ARGUMENTS
        history = [*USER, *(item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output)]
        history += [{"type": "function_call_output", "call_id": c.call_id, "output": f"wet {c.name}"} for c in calls]
        last = client.responses.create(model="demo", input=history, tools=RESPONSES_TOOLS)
        assert last.output_text == "Rain."
        assert prompt_text(engine.requests[-1]).count("<tool_result>wet weather</tool_result>") == 2

        client = anthropic_client(server)
        asked = {"model": "demo", "max_tokens": 500, "tools": MESSAGES_TOOLS}
        with client.messages.stream(**asked, messages=USER) as stream:
            first = stream.get_final_message()
        uses = [block for block in first.content if block.type == "tool_use"]
        assert [use.input for use in uses] == ARGUMENTS and first.stop_reason == "tool_use"
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": "dry"} for use in uses]
        history = [
            *USER,
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
            {"role": "user", "content": results},
        ]
        assert client.messages.create(**asked, messages=history).content[-1].text == "Rain."
        assert prompt_text(engine.requests[-1]).count("<tool_result>dry</tool_result>") == 2


def test_forced_tools_and_formats_ask_for_their_constraints():
    made = (constraints := Constraints()).made
    with serve(engine := ScriptedEngine(f"r</think>{CALLS}"), constraints) as server:

        def asked(path: str, **body) -> tuple:
            response = server.http.post(path, json={"model": "demo", "max_tokens": 900} | body)
            assert response.status_code == 200, response.text
            assert engine.requests[-1].constraint is not None
            return made.pop()

        chat = {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "json"}]}
        named = {"type": "function", "function": {"name": "weather"}}
        for thinking, off in ((True, {}), (False, {"reasoning_effort": "none"})):
            name, tools, thought, only, options = asked(**chat, tools=CHAT_TOOLS, tool_choice="required", **off)
            assert (name, thought, only, options) == ("tool_calls", thinking, None, {"several": True})
            assert tools[0]["function"]["parameters"] == SCHEMA
            assert asked(**chat, tools=CHAT_TOOLS, tool_choice=named, **off)[2:] == (
                thinking,
                "weather",
                {"several": False},
            )
            schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
            assert asked(**chat, response_format=schema, **off) == ("json_schema", SCHEMA, thinking, {})
            assert asked(**chat, response_format={"type": "json_object"}, **off) == ("json_object", thinking, {})
            assert asked(**chat, guided_regex="a+", **off) == ("regex", "a+", thinking, {})
            assert asked(**chat, guided_grammar="start: /a/", **off) == ("grammar", "start: /a/", thinking, {})
        only = asked(
            "/v1/responses", input="x", tools=RESPONSES_TOOLS, tool_choice={"type": "function", "name": "weather"}
        )
        assert only[0] == "tool_calls" and only[3] == "weather"
        text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
        assert asked("/v1/responses", input="x", text=text)[:2] == ("json_schema", SCHEMA)
        several = asked("/v1/messages", messages=USER, tools=MESSAGES_TOOLS, tool_choice={"type": "any"})
        assert (several[0], several[3], several[4]) == ("tool_calls", None, {"several": True})
        tool = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
        assert asked("/v1/messages", messages=USER, tools=MESSAGES_TOOLS, tool_choice=tool)[3] == "weather"
        assert asked("/v1/completions", prompt="x", guided_regex="b")[:3] == ("regex", "b", False)
        assert server.http.post("/v1/completions", json={"model": "demo", "prompt": "x"}).status_code == 200
        assert engine.requests[-1].constraint is None and not made


def test_constraints_hold_through_the_api():
    config = demo_config()
    constraints = RealConstraints(demo_tokenizer(), config.vocab_size, config.eos_token_id)
    answer = '{"city": "東京", "days": 3}'
    one = f"\n\n<｜DSML｜ calls>\n{call('東京', 3)}</｜DSML｜ calls>"
    engine = ScriptedEngine(*[f"Free { {} }</think>{answer}"] * 2, f"free</think>{one}")
    with serve(engine, constraints) as server:
        client = openai_client(server)
        schema = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": SCHEMA | {"required": ["city", "days"]}},
        }
        whole = client.chat.completions.create(model="demo", messages=USER, response_format=schema)
        assert json.loads(whole.choices[0].message.content) == {"city": "東京", "days": 3}
        stream = client.chat.completions.create(model="demo", messages=USER, response_format=schema, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer
        forced = client.chat.completions.create(model="demo", messages=USER, tools=CHAT_TOOLS, tool_choice="required")
        assert json.loads(forced.choices[0].message.tool_calls[0].function.arguments) == {"city": "東京", "days": 3}
        bad = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "string", "minLength": 5, "maxLength": 2}},
        }
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="demo", messages=USER, response_format=bad)


# --- options ---------------------------------------------------------------------------------------------------------


def test_what_a_client_asks_reaches_the_engine():
    options = {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "logit_bias": {"9": -100, "12": 3.5},
        "seed": 2**33 + 5,
        "priority": -3,
        "timeout": 5,
    }
    with serve(engine := ScriptedEngine()) as server:
        for path, body in (
            ("/v1/chat/completions", {"messages": USER, "max_completion_tokens": 11}),
            ("/v1/responses", {"input": "hi", "max_output_tokens": 11}),
            ("/v1/messages", {"messages": USER, "max_tokens": 11}),
            ("/v1/completions", {"prompt": "hi", "max_tokens": 11}),
        ):
            response = server.http.post(path, json={"model": "demo"} | body | options)
            assert response.status_code == 200, response.text
            request = engine.requests[-1]
            sampling = request.sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.25, 0.5, 7, 0.125)
            assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -1, 2)
            assert sampling.logit_bias == {9: -100, 12: 3.5} and sampling.seed == 5
            assert (request.priority, request.max_new_tokens, request.batch_invariant) == (-3, 11, True)
            assert request.stop_ids == {1} and request.tenant == "127.0.0.1"
        client = openai_client(server)
        for _ in range(2):
            client.chat.completions.create(model="demo", messages=USER)
        one, other = (request.sampling for request in engine.requests[-2:])
        assert one.seed != other.seed and one.temperature == 1 and one.top_p is None
        assert not engine.requests[-1].batch_invariant and engine.requests[-1].max_new_tokens == 256
        client.chat.completions.create(model="demo", messages=USER, temperature=0, max_tokens=4096)
        last = engine.requests[-1]
        assert last.batch_invariant and last.max_new_tokens == 4096 - len(last.token_ids)
        server.http.post("/v1/messages", json={"model": "demo", "max_tokens": 10**9, "messages": USER})
        assert engine.requests[-1].max_new_tokens == 4096 - len(engine.requests[-1].token_ids)


def test_several_choices():
    engine = ScriptedEngine("a</think>one", "b</think>two", "c</think>three", "a</think>one", "b</think>two")
    with serve(engine) as server:
        client = openai_client(server)
        whole = client.chat.completions.create(model="demo", messages=USER, n=3)
        assert [(c.index, c.message.content) for c in whole.choices] == [(0, "one"), (1, "two"), (2, "three")]
        assert [request.stream for request in engine.requests] == [0, 1 << 16, 2 << 16]
        assert len({request.request_id for request in engine.requests}) == 3
        assert len({request.sampling.seed for request in engine.requests}) == 1
        assert whole.usage.completion_tokens == sum(ended.completion_tokens for _, ended in engine.ended)
        texts = {0: "", 1: ""}
        for chunk in client.chat.completions.create(model="demo", messages=USER, n=2, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == {0: "one", 1: "two"}


def test_log_probabilities():
    with serve(ScriptedEngine(Script("r</think>aé", by_bytes=True))) as server:
        client = openai_client(server)
        asked = {"model": "demo", "messages": USER, "logprobs": True, "top_logprobs": 2}
        whole = client.chat.completions.create(**asked).choices[0].logprobs
        assert [entry.token for entry in whole.content] == ["a", "\ufffd", "\ufffd"]
        assert bytes(b for entry in whole.content for b in entry.bytes).decode() == "aé"
        assert [entry["token"] for entry in whole.reasoning_content] == ["r", "</think>"]
        assert [(top.token, top.logprob) for top in whole.content[0].top_logprobs] == [
            ("a", -0.25),
            ("｜DSML｜", -9999),
        ]
        chunks = [c.choices[0].logprobs for c in client.chat.completions.create(**asked, stream=True)]
        assert [e.token for part in chunks if part for e in part.content] == [e.token for e in whole.content]
        none = client.chat.completions.create(model="demo", messages=USER, logprobs=True).choices[0].logprobs
        assert none.content[0].top_logprobs == []
        include = ["message.output_text.logprobs"]
        part = client.responses.create(model="demo", input="hi", include=include, top_logprobs=1).output[1].content[0]
        assert [(e.token, len(e.top_logprobs)) for e in part.logprobs] == [("a", 1), ("\ufffd", 1), ("\ufffd", 1)]
        with client.responses.stream(model="demo", input="hi", top_logprobs=1) as stream:
            seen = [e.logprobs for e in stream if e.type == "response.output_text.delta"]
            final = stream.get_final_response().output[1].content[0]
        assert sum(map(len, seen)) == len(final.logprobs) == 3
        legacy = client.completions.create(model="demo", prompt="x", logprobs=1).choices[0].logprobs
        assert legacy.tokens == ["r", "</think>", "a", "bytes:\\xc3", "bytes:\\xa9"]
        assert legacy.text_offset[:2] == [0, 1] and legacy.top_logprobs[0] == {"r": -0.25}


@pytest.mark.parametrize("by_bytes", [False, True])
def test_stop_strings_end_the_content_only(by_bytes):
    engine = ScriptedEngine(Script("STOP é</think>Say éSTO é STOP and more", by_bytes))
    with serve(engine) as server:
        client = openai_client(server)
        for stop, expected in ((["STOP", "zz"], "Say éSTO é "), ("é ST", "Say éSTO "), ("never", None)):
            whole = client.chat.completions.create(model="demo", messages=USER, stop=stop).choices[0]
            assert whole.message.reasoning_content == "STOP é" and whole.finish_reason == "stop"
            assert whole.message.content == ("Say éSTO é STOP and more" if expected is None else expected)
            chunks = list(client.chat.completions.create(model="demo", messages=USER, stop=stop, stream=True))
            assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.message.content
        assert [ended.completion_tokens for _, ended in engine.ended][0] < len(
            token_ids(engine.scripts[0].text, by_bytes)
        )
        found = anthropic_client(server).messages.create(
            model="demo", max_tokens=99, messages=USER, stop_sequences=["STOP"]
        )
        assert (found.content[1].text, found.stop_reason, found.stop_sequence) == (
            "Say éSTO é ",
            "stop_sequence",
            "STOP",
        )
        text = client.completions.create(model="demo", prompt="x", stop=["éSTO"]).choices[0]
        assert (text.text, text.finish_reason) == ("STOP éSay ", "stop")


def test_length():
    with serve(ScriptedEngine("one two three</think>four")) as server:
        client = openai_client(server)
        cut = client.chat.completions.create(model="demo", messages=USER, max_tokens=2)
        assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 2
        cut = client.responses.create(model="demo", input="hi", max_output_tokens=2)
        assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
        assert (
            anthropic_client(server).messages.create(model="demo", max_tokens=2, messages=USER).stop_reason
            == "max_tokens"
        )
        cut = client.completions.create(model="demo", prompt="x", max_tokens=2)
        assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 2


# --- completions and the rest ----------------------------------------------------------------------------------------


def test_completions():
    engine = ScriptedEngine(*["Once é", "Twice"] * 4)
    with serve(engine) as server:
        client = openai_client(server)
        whole = client.completions.create(model="demo", prompt=["ab", "cd"], echo=True, n=2)
        assert [choice.text for choice in whole.choices] == ["abOnce é", "abTwice", "cdOnce é", "cdTwice"]
        assert [request.stream for request in engine.requests] == [0, 1 << 16, 1, 1 + (1 << 16)]
        np.testing.assert_array_equal(engine.requests[2].token_ids, demo_tokenizer().encode("cd", add_bos=True))
        assert whole.usage.prompt_tokens == sum(len(demo_tokenizer().encode(x, add_bos=True)) for x in ("ab", "cd"))
        client.completions.create(model="demo", prompt=[0, 5, 77])
        np.testing.assert_array_equal(engine.requests[-1].token_ids, [0, 5, 77])
        options = {"include_usage": True}
        chunks = list(
            client.completions.create(model="demo", prompt=[[1, 2], [3]], stream=True, stream_options=options)
        )
        texts = {0: "", 1: ""}
        for chunk in chunks[:-1]:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert sorted(texts.values()) == ["Once é", "Twice"] and chunks[-1].usage.prompt_tokens == 3
        prompt = "<｜User｜></think>"  # text, whatever it spells
        client.completions.create(model="demo", prompt=prompt)
        assert demo_tokenizer().control_ids.isdisjoint(engine.requests[-1].token_ids[1:].tolist())


def test_what_a_server_says_of_itself():
    with serve(engine := ScriptedEngine(), model="some/folder/Name-1") as server:

        def get(path: str) -> httpx.Response:
            return server.http.get(path)

        client = openai_client(server)
        assert [model.id for model in client.models.list()] == ["Name-1"]
        assert client.models.retrieve("Name-1").max_model_len == 4096
        with pytest.raises(openai.NotFoundError, match="no model"):
            client.models.retrieve("other")
        with pytest.raises(openai.NotFoundError, match="no model 'DeepSeek-V4.1-Flash'"):
            client.chat.completions.create(model="DeepSeek-V4.1-Flash", messages=USER)
        assert get("/health").status_code == get("/ready").status_code == 200
        assert get("/state").json()["rows"] == 16
        metrics = get("/metrics")
        assert "dsv41_ready 1.0" in metrics.text and metrics.headers["content-type"].startswith("text/plain")
        assert 'dsv41_requests_rejected_total{reason="bad_request"} 2.0' in metrics.text
        text = "Grüße </think> \U0001f600"
        for special in (True, False):
            tokens = server.http.post("/tokenize", json={"prompt": text, "add_special_tokens": special}).json()
            ids = demo_tokenizer().encode(text, add_bos=special)
            assert tokens == {"tokens": ids, "count": len(ids), "max_model_len": 4096}
        assert tokens["count"] == len(tokens["tokens"])
        body = {"tokens": [5, *tokens["tokens"]]}
        assert server.http.post("/detokenize", json=body).json() == {"prompt": "<｜User｜>" + text}
        chat = server.http.post("/tokenize", json={"messages": USER, "tools": CHAT_TOOLS}).json()
        client.chat.completions.create(model="Name-1", messages=USER, tools=CHAT_TOOLS)
        assert chat["tokens"] == engine.requests[-1].token_ids.tolist()
        engine.ready = False
        assert get("/health").status_code == 200 and get("/ready").status_code == 503
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="Name-1", messages=USER)
        assert caught.value.status_code == 503


def test_the_page_is_served():
    with serve(ScriptedEngine()) as server:
        page = server.http.get("/")
        assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'self'" in page.headers["content-security-policy"]
        for name in re.findall(r'page/[^"]+', page.text):
            assert server.http.get("/" + name).status_code == 200
        assert "javascript" in server.http.get("/page/app.js").headers["content-type"]
        for name in ("settings.py", "..%2fsettings.py", "%2e%2e/settings.py", "", "app.js/"):
            assert server.http.get("/page/" + name).status_code == 404
