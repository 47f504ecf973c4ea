"""What clients do wrong: each a clear 4xx in the API's own shape, with a good request after it; and a fuzzer."""

import copy
import json
import random
import socket
from typing import Any

import httpx
import pytest

from dsv41_jax.serving.constraints import Constraints
from scripted_engine import ScriptedEngine, demo_config, demo_tokenizer, serve

CHAT, RESPONSES, MESSAGES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
GOOD = {
    CHAT: {"model": "demo", "messages": USER},
    RESPONSES: {"model": "demo", "input": "hi"},
    MESSAGES: {"model": "demo", "messages": USER, "max_tokens": 9},
    COMPLETIONS: {"model": "demo", "prompt": "hi"},
}
JSON = {"content-type": "application/json"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
LONG = [{"role": "user", "content": "word " * 9000}]
DEEP = "[" * 100_000 + "]" * 100_000
DEEP_SCHEMA: dict = {}
for _ in range(300):
    DEEP_SCHEMA = {"type": "object", "properties": {"a": DEEP_SCHEMA}}


@pytest.fixture(scope="module")
def server():
    config = demo_config()
    constraints = Constraints(demo_tokenizer(), config.vocab_size, config.eos_token_id)
    engine = ScriptedEngine("</think>ok")
    engine.obedient = False  # what the fuzzer asks for may allow none of this
    with serve(engine, constraints) as server:
        yield server


def check_error(response: httpx.Response, path: str) -> dict:
    """The error of a response, after a look at its shape."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    error = body["error"]
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    if path.startswith(MESSAGES):
        assert body["type"] == "error" and set(error) == {"type", "message"}
    else:
        assert set(body) == {"error"} and set(error) == {"message", "type", "param", "code"}
    return error


# Bytes that are no request in any API.
BODIES = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "a number": b"1",
    "null": b"null",
    "two values": b"{}{}",
    "single quotes": b"{'model': 'demo'}",
    "NaN": b'{"model": "demo", "temperature": NaN, "messages": [{"role": "user", "content": "x"}], "prompt": "x"}',
    "infinity": b'{"model": "demo", "temperature": Infinity}',
    "a number beyond floats": b'{"model": "demo", "temperature": 1e999, "prompt": "x"}',
    "no UTF-8": b'{"model": "demo", "prompt": "\xff\xfe"}',
    "UTF-16": '{"model": "demo"}'.encode("utf-16"),
    "a lone surrogate": b'{"model": "demo", "messages": [{"role": "user", "content": "\\ud800"}], "prompt": "\\ud800"}',
    "the mark of images": '{"model": "demo", "prompt": "\ufdd0image\ufdd0"}'.encode(),
    "too deep": b'{"model": "demo", "messages": ' + DEEP.encode() + b"}",
    "a huge integer": b'{"model": "demo", "seed": ' + b"9" * 5000 + b"}",
    "a zero byte": b'{"model": "demo\x00"}',
}


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_are_no_request(server, path, name):
    response = server.http.post(path, content=BODIES[name], headers=JSON)
    assert response.status_code == 400
    assert check_error(response, path)["type"] == "invalid_request_error"
    assert server.http.post(path, json=GOOD[path]).status_code == 200


# Fields that are wrong in every API (as long as it has them).
EVERYWHERE = [
    {"model": None},
    {"model": 5},
    {"model": ""},
    {"temperature": -1},
    {"temperature": 3},
    {"temperature": "hot"},
    {"temperature": [1]},
    {"temperature": True},
    {"top_p": 0},
    {"top_p": 1.5},
    {"top_k": 1.5},
    {"top_k": "all"},
    {"min_p": 2},
    {"repetition_penalty": 0},
    {"presence_penalty": 3},
    {"frequency_penalty": {}},
    {"seed": 1.5},
    {"seed": "x"},
    {"seed": 10**30},
    {"logit_bias": [1]},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"5000": 1}},
    {"logit_bias": {"5": 1000}},
    {"logit_bias": {"5": None}},
    {"logit_bias": {"9" * 5000: 1}},
    {"priority": "high"},
    {"priority": 10**30},
    {"timeout": 0},
    {"timeout": -5},
    {"timeout": "1"},
    {"batch_invariant": 1},
    {"guided_regex": 5},
    {"guided_regex": "("},
    {"guided_grammar": "start: ("},
    {"guided_regex": "a", "guided_grammar": 'start: "a"'},
]
LENGTHS = [0, -1, 1.5, "9", True, [], 10**30]
PER_API = [
    *((CHAT, {"max_tokens": value}) for value in [*LENGTHS, 4097, 393217]),
    *((CHAT, {"max_completion_tokens": value}) for value in [*LENGTHS, 4097]),
    *((RESPONSES, {"max_output_tokens": value}) for value in [*LENGTHS, 4097]),
    *((MESSAGES, {"max_tokens": value}) for value in LENGTHS[:-1]),
    *((COMPLETIONS, {"max_tokens": value}) for value in [*LENGTHS, 4097]),
    *(
        (path, {"messages": value})
        for path in (CHAT, MESSAGES)
        for value in ([], None, "hi", {}, [None], ["hi"], [[]], 5)
    ),
    *(
        (path, {"messages": [{"role": role, "content": "x"}]})
        for path in (CHAT, MESSAGES)
        for role in ("alien", "", None, 5)
    ),
    *(
        (path, {"messages": [{"role": "user", "content": c}]})
        for path in (CHAT, MESSAGES)
        for c in (None, 5, {}, [5], [{}])
    ),
    *((path, {"messages": [{"content": "x"}]}) for path in (CHAT, MESSAGES)),
    (CHAT, {"messages": [{"role": "user"}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "video", "video": "x"}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}),
    (CHAT, {"messages": LONG}),
    (RESPONSES, {"input": LONG}),
    (MESSAGES, {"messages": LONG}),
    (COMPLETIONS, {"prompt": "word " * 9000}),
    *((RESPONSES, {"input": value}) for value in ([], 5, {}, [5], [{"role": "alien", "content": "x"}])),
    *((RESPONSES, {name: "x"}) for name in ("previous_response_id", "conversation", "prompt", "background")),
    *((path, {"stream": "yes"}) for path in GOOD),
    *((CHAT, {"n": value}) for value in (0, -1, 1.5, "2", 10**6)),
    *((CHAT, {"stop": value}) for value in ("", [""], 5, [5], ["x"] * 100)),
    (CHAT, {"logprobs": True, "top_logprobs": 21}),
    (CHAT, {"logprobs": True, "top_logprobs": -1}),
    (CHAT, {"top_logprobs": 2}),
    (CHAT, {"logprobs": "yes"}),
    *((CHAT, {"reasoning_effort": value}) for value in (0, 101, -1, 7.5, "medium-rare", [], True)),
    *((RESPONSES, {"reasoning": {"effort": value}}) for value in (0, 101, 7.5, "much", [])),
    *((MESSAGES, {"output_config": {"effort": value}}) for value in (0, 101, 7.5, "much")),
    (MESSAGES, {"thinking": {"type": "perhaps"}}),
    *(
        (CHAT, {"tools": value})
        for value in ("f", [5], [{}], [{"type": "function"}], [{"type": "function", "function": {}}])
    ),
    (CHAT, {"tool_choice": "required"}),
    (CHAT, {"tool_choice": "sometimes", "tools": [TOOL]}),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}),
    (CHAT, {"tool_choice": {"type": "function", "function": {}}, "tools": [TOOL]}),
    (CHAT, {"tool_choice": "required", "tools": [TOOL], "guided_regex": "a"}),
    (CHAT, {"parallel_tool_calls": False, "tools": [TOOL]}),
    (CHAT, {"modalities": ["text", "audio"]}),
    (CHAT, {"functions": [{"name": "f"}]}),
    *((CHAT, {"response_format": value}) for value in ("json", {}, {"type": "xml"}, {"type": "json_schema"})),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/no"}}}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": DEEP_SCHEMA}}}),
    (MESSAGES, {"tool_choice": {"type": "any"}}),
    (MESSAGES, {"tool_choice": {"type": "tool"}}),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    (MESSAGES, {"mcp_servers": [{"url": "https://x"}]}),
    (MESSAGES, {"system": 5}),
    *(
        (COMPLETIONS, {"prompt": value})
        for value in (None, "", [], [[]], [""], 5, {}, [1, "a"], [None], [True], [[1.5]])
    ),
    *((COMPLETIONS, {"prompt": value}) for value in ([-1], [4096], [10**30], ["x"] * 200)),
    (COMPLETIONS, {"suffix": "end"}),
    (COMPLETIONS, {"best_of": 3}),
    (COMPLETIONS, {"echo": True, "logprobs": 1}),
    (COMPLETIONS, {"logprobs": 21}),
    (COMPLETIONS, {"n": 129}),
]
CASES = [*((path, change) for change in EVERYWHERE for path in GOOD), *PER_API]


@pytest.mark.parametrize("batch", range(0, len(CASES), 20))
def test_requests_that_are_refused(server, batch):
    for path, change in CASES[batch : batch + 20]:
        response = server.http.post(path, json=GOOD[path] | change)
        what = (path, str(change)[:200], response.text[:300])
        assert response.status_code == 400, what
        assert check_error(response, path)["type"] == "invalid_request_error", what
        assert len(response.text) < 2000, what
    assert server.http.post(path, json=GOOD[path]).status_code == 200


@pytest.mark.parametrize("path", GOOD)
def test_statuses(server, path):
    client = server.http
    other = client.post(path, json=GOOD[path] | {"model": "gpt-4"})
    assert other.status_code == 404 and "'demo'" in check_error(other, path)["message"]
    for method in ("GET", "PUT", "DELETE", "PATCH", "HEAD"):
        response = client.request(method, path)
        assert response.status_code == 405 and "POST" in response.headers["allow"]
    check_error(client.get(path), path)
    for unknown in (path + "/", path + "/x", "/v2/chat", "/v1", "/page/../http.py", "/page/%2e%2e%2fhttp.py"):
        assert client.get(unknown).status_code in (404, 405)
    for kind in ("text/plain", "application/xml", "json"):
        response = client.post(path, content=json.dumps(GOOD[path]), headers={"content-type": kind})
        assert response.status_code == 415
        check_error(response, path)
    assert client.post(path, json=GOOD[path]).status_code == 200


def test_other_endpoints(server):
    client = server.http
    for path, body in (
        *(("/tokenize", body) for body in ({}, {"prompt": 5}, {"messages": []}, {"messages": [{"role": "x"}]}, [])),
        *(("/detokenize", {"tokens": tokens}) for tokens in (None, "x", [1.5], [-1], [4096], [True], [10**30])),
        *(("/v1/messages/count_tokens", body) for body in ({}, {"model": "demo"}, {"model": "demo", "messages": [5]})),
    ):
        response = client.post(path, json=body)
        assert response.status_code == 400, (path, body, response.text)
        check_error(response, path)
    assert client.post("/tokenize", json={"prompt": "x", "model": "other"}).status_code == 404
    assert client.post("/tokenize", json={"prompt": ""}).json()["count"] == 1  # the beginning of a sequence
    assert client.post("/tokenize", json={"prompt": "", "add_special_tokens": 1}).status_code == 400


def test_what_is_no_http(server):
    for data in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"\r\n\r\n\x00" * 100):
        with socket.create_connection(("127.0.0.1", server.port), 5) as connection:
            connection.sendall(data)
            assert connection.recv(1000).startswith(b"HTTP/1.1 400")
    assert server.http.post(CHAT, json=GOOD[CHAT]).status_code == 200


# --- a fuzzer --------------------------------------------------------------------------------------------------------

RICH = {
    CHAT: {
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": [{"type": "text", "text": "json"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": "c",
                "reasoning_content": "r",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "result"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
        ],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 1,
        "reasoning_effort": "low",
        "stop": ["a", "b"],
        "n": 2,
        "max_tokens": 5,
    },
    RESPONSES: {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "y"},
        ],
        "instructions": "i",
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "include": ["message.output_text.logprobs"],
        "max_output_tokens": 5,
        "stream": True,
    },
    MESSAGES: {
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "y"}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
        "stop_sequences": ["z"],
        "max_tokens": 5,
        "stream": True,
    },
    COMPLETIONS: {
        "prompt": ["a", "b"],
        "n": 2,
        "echo": False,
        "logprobs": 1,
        "stop": ["z"],
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
}
COMMON = {
    "model": "demo",
    "temperature": 0.5,
    "top_p": 0.5,
    "seed": 1,
    "logit_bias": {"9": 1},
    "timeout": 5,
    "user": "u",
}
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**40, 0.5, -0.0, 1e308, 5e-324),
    *(
        "",
        "x",
        "x" * 5000,
        "\x00",
        "\ud800",
        "\ufdd0",
        "｜DSML｜",
        "data:image/png;base64,AAAA",
        "http://127.0.0.1/",
        "auto",
    ),
    *("function", "json_object", "user", "assistant", "required", "none", "max", "{", "null"),
    *(
        [],
        {},
        [[]],
        [{}],
        [None],
        {"": {}},
        {"type": "function"},
        {"type": "object"},
        ["a"] * 50,
        {"a": {"b": {"c": []}}},
    ),
]


def mutated(rng: random.Random, body: Any) -> Any:
    """A copy of a body with something in it replaced, removed, doubled or renamed."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place = body
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.7:
                place = place[key]
                continue
            action = rng.random()
            if action < 0.7:
                place[key] = copy.deepcopy(rng.choice(VALUES))
            elif action < 0.85:
                del place[key]
            elif isinstance(place, dict):
                place[rng.choice(("type", "content", "x", key.upper()))] = place.pop(key)
            else:
                place += copy.deepcopy(place)
            break
    return body


def fuzz(server, seed: int, rounds: int) -> dict[int, int]:
    """Send mutated bodies; AssertionError for a 5xx. Returns how often each status came."""
    rng, statuses = random.Random(seed), {}
    for _ in range(rounds):
        path = rng.choice(list(GOOD))
        body = json.dumps(mutated(rng, rng.choice((COMMON | RICH[path], GOOD[path]))))
        if rng.random() < 0.05:
            at = rng.randrange(len(body))
            body = body[:at] + rng.choice(('"', "{", "]", "\\", "\x00", "NaN", "")) + body[at + 1 :]
        response = server.http.post(path, content=body.encode(), headers=JSON)
        what = (path, body, response.text)
        if "5e-324" in body and ("timeout_error" in response.text or '"code":"timeout"' in response.text):
            continue  # it asked for no time at all
        assert response.status_code < 500, what
        if response.status_code != 200:
            check_error(response, path)
        else:
            assert not any("error" in line[:20] for line in response.text.split("\n")), what
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
    return statuses


def test_fuzz(server):
    statuses = fuzz(server, 1, 300)
    assert statuses[200] > 20 and statuses[400] > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 18))
def test_fuzz_longer(server, seed):
    statuses = fuzz(server, seed, 4000)
    assert set(statuses) <= {200, 400, 404}
