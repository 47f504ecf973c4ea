"""What clients may take: sizes, time, keys; and what happens when they go away."""

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import time

import anthropic
import httpx
import openai
import pytest
import uvicorn
from uvicorn.server import ServerState

from dsv41_jax.serving import outbox
from dsv41_jax.serving.answers import SpelledTokens
from dsv41_jax.serving.auth import load_keys
from dsv41_jax.serving.limits import uvicorn_options
from dsv41_jax.serving.request import NotServing, QueueFull, RequestError
from dsv41_jax.serving.settings import ServeSettings
from scripted_engine import Script, ScriptedEngine, anthropic_client, openai_client, serve

CHAT = "/v1/chat/completions"
BODY = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
PATHS = [
    (CHAT, BODY),
    ("/v1/responses", {"model": "demo", "input": "hi"}),
    ("/v1/messages", BODY | {"max_tokens": 9}),
    ("/v1/completions", {"model": "demo", "prompt": "hi"}),
]


def post(server, path: str = CHAT, body: dict = BODY, **options) -> httpx.Response:
    return server.http.post(path, json=body, timeout=10, **options)


def connect(server, receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(10)
    connection.connect(("127.0.0.1", server.port))
    return connection


def raw_request(body: dict, path: str = CHAT) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def wait_for(condition, seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_a_large_body_is_refused_before_it_is_read():
    with serve(ScriptedEngine()) as server:
        with connect(server) as connection:
            head = raw_request(BODY).partition(b"\r\n\r\n")[0].decode()
            head = head.rpartition(" ")[0] + f" {50 << 20}\r\n\r\n"
            connection.sendall(head.encode() + b"[" * 1000)
            assert b"413" in connection.recv(1000)
        content = b'{"model": "' + b"x" * (50 << 20) + b'"}'
        response = server.http.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 413 and response.json()["error"]["type"] == "invalid_request_error"
        response = server.http.post("/v1/messages", content=content, headers={"content-type": "application/json"})
        assert response.json()["error"]["type"] == "request_too_large"
        assert post(server).is_success


def test_a_large_body_without_a_length_is_refused():
    def pieces():
        for _ in range(100):
            yield b" " * 1000

    with serve(ScriptedEngine(), max_body_bytes=20_000) as server:
        response = server.http.post(CHAT, content=pieces(), headers={"content-type": "application/json"})
        assert response.status_code == 413
        data = json.dumps(BODY).encode()
        headers = {"content-type": "application/json; charset=utf-8"}
        assert server.http.post(CHAT, content=iter([data[:9], data[9:]]), headers=headers).is_success


def test_headers_have_a_limit():
    with serve(ScriptedEngine()) as server, connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000)
        assert b"400" in connection.recv(1000)


# --- slow clients ----------------------------------------------------------------------------------------------------


def test_clients_that_send_nothing_are_disconnected():
    with serve(engine := ScriptedEngine(), idle_seconds=0.2) as server:
        with connect(server) as silent, connect(server) as half, connect(server) as slow:
            half.sendall(b"POST /v1/chat")
            slow.sendall(raw_request(BODY)[:-5])
            assert silent.recv(10) == b""
            assert half.recv(10) == b""
            assert b"408" in slow.recv(1000)
        with connect(server) as twice:  # the limit is for each request of a connection
            for _ in range(3):
                twice.sendall(raw_request(BODY))
                assert b"200" in twice.recv(4000)
                time.sleep(0.1)
        assert len(engine.requests) == 3


def test_a_client_that_does_not_read_is_disconnected():
    text = "</think>" + "long " * 3000
    engine = ScriptedEngine(Script(text, by_bytes=True))
    with serve(engine, idle_seconds=0.3, max_len=8000, default_max_tokens=7000) as server:
        with connect(server, receive_buffer=4096) as connection:
            connection.sendall(raw_request(BODY | {"stream": True, "n": 4}))
            assert connection.recv(100)
            wait_for(lambda: engine.state().writing == 0, 10)
            engine.wait_ended(4)
        assert post(server, body=BODY | {"max_tokens": 3}).is_success


def test_a_stream_that_is_read_too_slowly_ends_with_an_error(monkeypatch):
    take = outbox.Outbox.take

    async def late(self, seconds):
        await asyncio.sleep(0.02)
        return await take(self, seconds)

    monkeypatch.setattr(outbox, "MOST_BEHIND", 3)
    monkeypatch.setattr(outbox.Outbox, "take", late)
    script = Script("</think>" + "x" * 4000, by_bytes=True, before=lambda i: time.sleep(0.001))
    with serve(engine := ScriptedEngine(script), idle_seconds=0.2, default_max_tokens=3900) as server:
        response = post(server, body=BODY | {"stream": True})
        assert "not read fast enough" in response.text.rstrip().split("\n")[-1]
        engine.wait_ended(1)
        assert engine.ended[0][1].reason == "cancelled"


def test_a_long_silence_is_filled(monkeypatch):
    monkeypatch.setattr(outbox, "KEEP_ALIVE_SECONDS", 0.05)
    script = Script("</think>z", before=lambda i: time.sleep(0.12) if i == 0 else None)
    with serve(ScriptedEngine(script)) as server:
        for path, body in PATHS:
            text = post(server, path, body | {"stream": True}).text
            assert text.count(": still working\n\n") >= 1 and "z" in text
            assert ": still working" not in post(server, path, body).text
        client = openai_client(server)
        chunks = client.chat.completions.create(**BODY, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "z"
        with anthropic_client(server).messages.stream(**BODY, max_tokens=9) as stream:
            assert "".join(stream.text_stream) == "z"


# --- going away ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["", "some</think>text"])
def test_a_client_that_goes_away_ends_its_requests(path, body, stream, text):
    with serve(engine := ScriptedEngine(Script(text, ending="hang"))) as server:
        body = body | {"stream": stream} | ({"n": 3} if path.endswith("completions") else {})
        count = body.get("n", 1)
        with connect(server) as connection:
            connection.sendall(raw_request(body, path))
            wait_for(lambda: len(engine.requests) == count)
            if stream and text:
                assert connection.recv(100)
        start = time.monotonic()
        engine.wait_ended(count)
        assert time.monotonic() - start < 3
        assert [ended.reason for _, ended in engine.ended] == ["cancelled"] * count
        assert len(engine.cancelled) == count and engine.state().writing == 0


def test_a_client_that_goes_away_before_its_body_came():
    with serve(engine := ScriptedEngine()) as server:
        with connect(server) as connection:
            connection.sendall(raw_request(BODY)[:-5])
        with connect(server) as connection:  # while the body is read and encoded
            connection.sendall(raw_request(BODY | {"messages": [{"role": "user", "content": "a b " * 1000}]}))
        assert post(server).is_success
        engine.wait_ended(len(engine.requests))
        assert engine.state().writing == 0


# --- the engine says no, or breaks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_an_engine_that_refuses(path, body):
    with serve(engine := ScriptedEngine()) as server:
        for error, status, kinds in (
            (QueueFull("256 requests wait", 7), 429, ("rate_limit_error", "rate_limit_error")),
            (NotServing("the server ends"), 503, ("server_error", "overloaded_error")),
            (RequestError("it needs 99 pages"), 400, ("invalid_request_error", "invalid_request_error")),
        ):
            engine.refuse = error
            for stream in (False, True):
                response = post(server, path, body | {"stream": stream})
                found = response.json()["error"]
                assert response.status_code == status and str(error) == found["message"]
                assert found["type"] == kinds[path == "/v1/messages"]
            if status == 429:
                assert response.headers["retry-after"] == "7"
        engine.refuse = None
        assert post(server, path, body).is_success
        assert 'rejected_total{reason="queue_full"} 2.0' in server.http.get("/metrics").text


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize("text", ["", "Half an</think>ans"])
def test_an_engine_that_fails_is_never_a_silent_end(path, body, text):
    with serve(ScriptedEngine(Script(text, ending="failed"))) as server:
        response = post(server, path, body)
        assert response.status_code == 500 and "a device is on fire" in response.json()["error"]["message"]
        text = post(server, path, body | {"stream": True}).text
        name, data = ("", *text.rstrip().split("\n"))[-2:]
        event = json.loads(data.removeprefix("data: "))
        error = event if path == "/v1/responses" else event["error"]
        assert "a device is on fire" in error["message"]
        if path in ("/v1/messages", "/v1/responses"):
            assert (name, event["type"]) == ("event: error", "error")
        client = openai_client(server)
        if path == CHAT:
            with pytest.raises(openai.APIError, match="on fire"):
                list(client.chat.completions.create(**BODY, stream=True))
        if path == "/v1/messages":
            with pytest.raises(anthropic.APIStatusError, match="on fire"):
                client = anthropic_client(server)
                list(client.messages.create(**body, stream=True))


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_running_out_of_time(path, body):
    """With tokens an answer is cut off; without any it is an error."""
    engine = ScriptedEngine(*[Script("Half", ending="hang")] * 2, Script("", ending="hang"))
    with serve(engine) as server:
        response = post(server, path, body | {"timeout": 0.3})
        assert response.is_success and any(word in response.text for word in ('"length"', "max_tokens", "incomplete"))
        text = post(server, path, body | {"timeout": 0.3, "stream": True}).text
        assert any(word in text for word in ('"length"', "max_tokens", "incomplete"))
        response = post(server, path, body | {"timeout": 0.05})
        assert response.status_code == 504 and response.json()["error"]["type"] == "timeout_error"
        assert "it took too long" in post(server, path, body | {"timeout": 0.05, "stream": True}).text


def test_a_parser_that_breaks_harms_nobody_else(monkeypatch):
    push = SpelledTokens.push
    engine = ScriptedEngine("bad", "</think>good")
    with serve(engine, errors=1) as server:
        bad = engine.scripts[0]
        monkeypatch.setattr(SpelledTokens, "push", lambda self, token: 1 / 0)
        response = post(server)
        assert response.status_code == 500 and "cannot be parsed" in response.text and bad.text == "bad"
        monkeypatch.setattr(SpelledTokens, "push", push)
        assert post(server).json()["choices"][0]["message"]["content"] == "good"


# --- keys, origins, logs ---------------------------------------------------------------------------------------------


def test_keys(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("DSV41_API_KEYS", "from-environment, second ")
    (tmp_path / "keys").write_text("# for the team\nfrom-file\n\n", encoding="utf-8")
    with serve(engine := ScriptedEngine(), api_key_file=str(tmp_path / "keys")) as server:
        for path, body in PATHS:
            for headers in (
                {},
                {"authorization": "Bearer wrong"},
                {"x-api-key": "from-fil"},
                {"x-api-key": "\xe9".encode("latin-1")},
            ):
                response = post(server, path, body, headers=headers)
                assert response.status_code == 401 and "www-authenticate" in response.headers
                assert response.json()["error"]["type"] == "authentication_error"
        for path in ("/metrics", "/state", "/v1/models", "/nothing", "/docs"):
            assert server.http.get(path).status_code == 401
        for path in ("/health", "/ready"):
            assert server.http.get(path).status_code == 200
        for path in ("/", "/page/nothing.js"):
            assert server.http.get(path).status_code != 401
        tenants = set()
        for key in ("from-environment", "second", "from-file"):
            for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                assert post(server, headers=headers).is_success
                tenants.add(engine.requests[-1].tenant)
            assert server.http.get("/metrics", headers=headers).status_code == 200
        assert len(tenants) == 3 and not any("from" in tenant or "second" in tenant for tenant in tenants)
        openai_client(server, "second").chat.completions.create(**BODY)
        anthropic_client(server, "from-file").messages.create(**BODY, max_tokens=9)
    ours = [
        record for record in caplog.records if not record.name.startswith(("httpx", "httpcore", "openai", "anthropic"))
    ]
    assert not any("from-file" in record.getMessage() or "second" in record.getMessage() for record in ours)


def test_keys_that_cannot_be_used(tmp_path, monkeypatch):
    monkeypatch.delenv("DSV41_API_KEYS", raising=False)
    assert load_keys(ServeSettings()) == ()
    (tmp_path / "keys").write_text("# none\n")
    for path, error in (("keys", ValueError), ("missing", FileNotFoundError)):
        with pytest.raises(error):
            load_keys(ServeSettings(api_key_file=str(tmp_path / path)))
    monkeypatch.setenv("DSV41_API_KEYS", "schlüssel")
    with pytest.raises(ValueError, match="ASCII"):
        load_keys(ServeSettings())


def test_other_origins():
    origin = {"origin": "https://a.example", "access-control-request-method": "POST"}
    with serve(ScriptedEngine()) as server:
        response = server.http.options(CHAT, headers=origin)
        assert response.status_code == 405 and "access-control-allow-origin" not in response.headers
        assert "access-control-allow-origin" not in post(server, headers=origin).headers
        # What a page can send without asking first.
        for kind in ("text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data; boundary=x"):
            headers = {"content-type": kind}
            assert server.http.post(CHAT, content=json.dumps(BODY), headers=headers).status_code == 415
    with serve(ScriptedEngine(), cors_origins=["https://a.example"]) as server:
        headers = origin | {"access-control-request-headers": "authorization, content-type"}
        response = server.http.options(CHAT, headers=headers)
        assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "https://a.example"
        other = server.http.options(CHAT, headers=headers | {"origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        assert post(server, headers=origin).headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize("log_prompts", [False, True])
def test_prompts_are_logged_where_asked_only(log_prompts, caplog):
    caplog.set_level(logging.DEBUG)
    with serve(ScriptedEngine("</think>my answer"), log_prompts=log_prompts) as server:
        for path, body in PATHS:
            caplog.clear()
            text = json.dumps(body).replace('"hi"', '"my secret"')
            assert post(server, path, json.loads(text)).is_success
            assert post(server, path, json.loads(text) | {"temperature": "x"}).status_code == 400
            seen = " ".join(r.getMessage() for r in caplog.records if r.name.startswith(("dsv41", "uvicorn")))
            assert ("my secret" in seen, "my answer" in seen) == (log_prompts, log_prompts)


def test_connections_are_kept():
    with serve(ScriptedEngine()) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
        sockets = set()
        for i in range(6):
            body = BODY | {"stream": i % 2 == 0} | ({"n": 0} if i == 3 else {})
            connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
            assert connection.getresponse().read()
            sockets.add(connection.sock)
        assert len(sockets) == 1
        connection.close()


def test_a_client_that_drips_is_refused():
    with serve(engine := ScriptedEngine(), idle_seconds=0.4, request_seconds=0.5) as server, connect(server) as slow:
        request = raw_request(BODY)
        slow.sendall(request[:-20])
        with contextlib.suppress(OSError):
            for byte in request[-20:]:
                slow.sendall(bytes([byte]))
                time.sleep(0.05)
        assert b"408" in slow.recv(1000) and not engine.requests


class Unread(asyncio.Transport):
    """A transport whose bytes nobody reads."""

    def __init__(self, closing: bool):
        super().__init__()
        self.closing, self.aborted = closing, False

    def get_write_buffer_size(self) -> int:
        return 1000

    def is_closing(self) -> bool:
        return self.closing or self.aborted

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize("closing", [False, True])
def test_the_rest_of_a_response_that_is_not_read_is_given_up(closing):
    """Below the size at which uvicorn stops writing; a `close` would wait for ever."""

    async def check() -> bool:
        options = uvicorn_options(ServeSettings(idle_seconds=0.05))
        protocol = options["http"](uvicorn.Config(None, **options), ServerState(), {})
        transport = Unread(closing)
        protocol.connection_made(transport)
        protocol._reading.cancel()  # another timer
        if closing:
            protocol.on_response_complete()
            assert not transport.aborted
            await asyncio.sleep(0.1)
        else:
            protocol.timeout_keep_alive_handler()
        return transport.aborted

    assert asyncio.run(check())
