"""Images of requests: how they reach the engine, and which of them do not."""

import base64
import http.server
import io
import struct
import threading
import zlib

import numpy as np
import pytest
from PIL import Image

from dsv41_jax.image_plan import preprocess_image
from dsv41_jax.serving import image_sources
from dsv41_jax.serving.image_sources import is_public
from scripted_engine import ScriptedEngine, demo_config, openai_client, serve


def encoded(form: str = "PNG", size: tuple[int, int] = (90, 60)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (200, 30, 90)).save(file, form)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes that says it has so many pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000)))


def chat_body(*urls: str) -> dict:
    parts = [{"type": "text", "text": "What?"}, *({"type": "image_url", "image_url": {"url": url}} for url in urls)]
    return {"model": "demo", "messages": [{"role": "user", "content": parts}]}


@pytest.fixture(scope="module")
def server():
    with serve(ScriptedEngine(), images=True, max_images=3, max_image_pixels=100_000) as server:
        yield server


def test_images_reach_the_engine_through_every_api():
    png, webp = encoded(), encoded("WEBP", (40, 80))
    config = demo_config(images=True)
    with serve(engine := ScriptedEngine(), images=True) as server:
        client = openai_client(server)
        client.chat.completions.create(**chat_body(data_url(png), data_url(webp, "image/webp")))
        content = [{"type": "input_text", "text": "What?"}]
        content += [{"type": "input_image", "image_url": data_url(data)} for data in (png, webp)]
        client.responses.create(model="demo", input=[{"role": "user", "content": content}])
        blocks = [{"type": "text", "text": "What?"}]
        for data, kind in ((png, "image/png"), (webp, "image/webp")):
            source = {"type": "base64", "media_type": kind, "data": base64.b64encode(data).decode()}
            blocks.append({"type": "image", "source": source})
        body = {"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": blocks}]}
        assert server.http.post("/v1/messages", json=body).status_code == 200
        assert len(engine.requests) == 3
        for request in engine.requests:
            assert len(request.images) == 2
            covered = np.flatnonzero(request.token_ids == config.image_token_id)
            spans = [np.arange(image.start, image.end(config.vision)) for image in request.images]
            np.testing.assert_array_equal(covered, np.concatenate(spans))
            for image, data in zip(request.images, (png, webp), strict=True):
                patches, grid, _ = preprocess_image(data, config)
                assert image.grid == grid
                np.testing.assert_array_equal(image.patches, patches)


def test_text_that_spells_an_image_is_text():
    with serve(engine := ScriptedEngine(), images=True) as server:
        body = {"model": "demo", "messages": [{"role": "user", "content": "<｜deepseek_image｜> <｜image｜>"}]}
        assert server.http.post("/v1/chat/completions", json=body).status_code == 200
        assert (engine.requests[0].token_ids != demo_config().image_token_id).all()


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ([data_url(b"no image")], "no image that can be decoded"),
        ([data_url(encoded()[:80])], "no image that can be decoded"),
        ([data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")], "no image that can be decoded"),
        ([data_url(bomb(90_000, 90_000))], "no image that can be decoded"),
        ([data_url(bomb(12_000, 12_000))], "12000 x 12000 pixels"),
        ([data_url(encoded(size=(400, 300)))], "400 x 300 pixels, more than 100000"),
        (["data:image/png;base64,@@@@"], "Invalid base64"),
        (["data:image/png;base64"], "Unsupported image_url"),
        ([data_url(encoded())] * 4, "has 4 images, this server takes 3"),
        ([data_url(encoded())] * 100, "has 100 images, this server takes 3"),
        (["http://127.0.0.1/x.png"], "fetches no images"),
        (["https://example.com/x.png"], "fetches no images"),
        (["file:///etc/passwd"], ""),
        ([""], ""),
    ],
)
def test_images_that_are_refused(server, urls, message):
    response = server.http.post("/v1/chat/completions", json=chat_body(*urls))
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]
    assert server.http.post("/v1/chat/completions", json=chat_body(data_url(encoded()))).status_code == 200


def test_a_model_without_a_tower_takes_no_images():
    with serve(ScriptedEngine()) as server:
        response = server.http.post("/v1/chat/completions", json=chat_body(data_url(encoded())))
        assert response.status_code == 400 and "no vision tower" in response.text


# --- fetching --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *((a, True) for a in ("8.8.8.8", "93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c")),
        *((a, False) for a in ("127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.5.5", "192.168.1.1", "::1")),
        *((a, False) for a in ("169.254.169.254", "100.64.0.1", "100.100.100.200", "192.0.0.192", "198.18.0.1", "::")),
        *((a, False) for a in ("224.0.0.1", "240.0.0.1", "255.255.255.255", "ff02::1", "fe80::1", "fe80::1%eth0")),
        *(
            (a, False)
            for a in ("fc00::1", "fd00:ec2::254", "fec0::1", "::ffff:8.8.8.8", "::ffff:127.0.0.1", "::8.8.8.8")
        ),
        *((a, False) for a in ("64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::", "2001:0:1::1", "2001:db8::1")),
        *((a, False) for a in ("168.63.129.16", "localhost", "", "1", "127.1", "0x7f000001")),
    ],
)
def test_public_addresses(address, public):
    assert is_public(address) is public


@pytest.fixture
def inside():
    """A server of the inside: (its port, the paths that were asked for)."""
    paths: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            paths.append(self.path)
            if self.path.startswith("/to/"):
                self.send_response(302)
                self.send_header("Location", self.path[4:])
                self.end_headers()
                return
            self.send_response(200)
            self.end_headers()
            if self.path == "/slow":
                slow.wait(5)
            self.wfile.write(bytes(40_000) if self.path == "/large" else encoded())

        def log_message(self, *args):
            pass

    slow = threading.Event()
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    yield web.server_port, paths
    slow.set()
    web.shutdown()
    web.server_close()


def test_nothing_inside_is_reached(inside):
    port, paths = inside
    with serve(ScriptedEngine(), images=True, image_urls=True) as server:
        for host in (
            "127.0.0.1",
            "localhost",
            "127.1",
            "2130706433",
            "0x7f.1",
            "0.0.0.0",
            "[::1]",
            "[::ffff:127.0.0.1]",
        ):
            response = server.http.post("/v1/chat/completions", json=chat_body(f"http://{host}:{port}/x.png"))
            assert response.status_code == 400 and "DestinationRejected" in response.text, (host, response.text)
        for url in ("file:///etc/passwd", "ftp://127.0.0.1/x", f"gopher://127.0.0.1:{port}/"):
            assert server.http.post("/v1/chat/completions", json=chat_body(url)).status_code == 400
    assert paths == []


def test_the_filter_sees_every_address_and_every_redirect(inside, monkeypatch):
    port, paths = inside
    seen: list[str] = []

    def allow_first(address: str) -> bool:
        """As if the first answer of the name server were a public address."""
        seen.append(address)
        return len(seen) == 1

    monkeypatch.setattr(image_sources, "is_public", allow_first)
    with serve(engine := ScriptedEngine(), images=True, image_urls=True) as server:
        url = f"http://localhost:{port}/to/http://localhost:{port}/secret"
        response = server.http.post("/v1/chat/completions", json=chat_body(url))
        assert response.status_code == 400 and "DestinationRejected" in response.text
        assert paths == [f"/to/http://localhost:{port}/secret"] and len(seen) >= 2
        seen.clear()
        assert server.http.post("/v1/chat/completions", json=chat_body(f"http://127.0.0.1:{port}/x.png")).is_success
        assert len(engine.requests) == 1 and len(engine.requests[0].images) == 1
        seen.clear()
        response = server.http.post("/v1/chat/completions", json=chat_body(f"http://127.0.0.1:{port}/not-an-image"))
        assert seen == ["127.0.0.1"] and response.is_success


def test_large_and_slow_images_are_given_up(inside, monkeypatch):
    port, _ = inside
    monkeypatch.setattr(image_sources, "is_public", lambda address: True)
    monkeypatch.setattr(image_sources, "FETCH_SECONDS", 0.2)
    with serve(ScriptedEngine(), images=True, image_urls=True, max_body_bytes=30_000) as server:
        for path, message in (("large", "ImageTooLarge"), ("slow", "did not come in 0.2 s")):
            body = chat_body(f"http://127.0.0.1:{port}/{path}")
            response = server.http.post("/v1/chat/completions", json=body)
            assert response.status_code == 400 and message in response.text
