"""The page at / in headless Chromium, against a scripted server."""

import base64
import io
import re
import time

import pytest
from PIL import Image
from starlette.responses import JSONResponse

from browser import PAGE, ScriptedServer, chromium, delta

PNG = io.BytesIO()
Image.new("RGB", (60, 40), (30, 120, 90)).save(PNG, "PNG")
USAGE = {"prompt_tokens": 40, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 32}}


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def server():
    return ScriptedServer()


@pytest.fixture
def page(browser, server):
    """The page, open. Nothing may break its policy or fail in its scripts."""
    with server.running() as address:
        context = browser.new_context(viewport={"width": 1100, "height": 760})
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=address)
        page = context.new_page()
        page.set_default_timeout(5000)
        said, outside = [], []
        page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: outside.append(request.url))
        page.goto(address)
        page.get_by_role("heading", name="demo-model").wait_for()
        yield page
        context.close()
        # Chromium itself writes a line for every answer that is an error.
        assert [text for text in said if "Failed to load resource" not in text] == []
        assert [url for url in outside if not url.startswith((address, "data:", "blob:"))] == []


def ask(page, text: str) -> None:
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")


def has(locator, text: str | re.Pattern) -> None:
    from playwright.sync_api import expect

    expect(locator).to_have_text(text, timeout=5000)


def test_an_answer_streams_with_its_thinking_apart(page, server):
    prompt = page.get_by_role("textbox", name="Message")
    prompt.press_sequentially("two")
    page.keyboard.press("Shift+Enter")
    prompt.press_sequentially("lines")
    assert server.requests == []
    page.keyboard.press("Enter")
    answer = page.get_by_role("article", name="Answer")
    answer.get_by_text("Waiting for the server").wait_for()
    server.say(delta(role="assistant", content=""), delta(reasoning_content="Hm 漢字 "))
    has(answer.locator(".thought"), "Hm 漢字")
    assert answer.locator("details").evaluate("node => node.open")
    server.say(delta(reasoning_content="🌊."))
    has(answer.locator(".thought"), "Hm 漢字 🌊.")
    server.say("Some ", "**bo")
    has(answer.locator(".markdown"), "Some **bo")
    assert not answer.locator("details").evaluate("node => node.open")  # it made room for the answer
    server.say("ld** and `co", "de`\n\n```py\nx = 1 < 2\n```\n1. é\n   - b\n2. c\n\n| h | i |\n|---|---|\n| `j` | k |")
    has(answer.locator(".markdown strong"), "bold")
    server.end(usage=USAGE)
    has(answer.locator(".facts"), re.compile(r"^9 tokens · .* · prompt of 40, 32 cached$"))
    has(answer.locator("pre"), "x = 1 < 2")
    has(answer.locator("ol > li"), ["éb", "c"])
    has(answer.locator("ol > li > ul > li"), "b")
    has(answer.locator(".markdown :is(th, td)"), ["h", "i", "j", "k"])
    answer.locator("summary").click()
    has(answer.locator(".thought"), "Hm 漢字 🌊.")
    (body,) = server.requests
    assert body["messages"] == [{"role": "user", "content": "two\nlines"}]
    assert body["model"] == "demo-model" and body["stream"] and body["reasoning_effort"] == "high"
    answer.get_by_role("button", name="Copy", exact=True).last.click()
    assert page.evaluate("navigator.clipboard.readText()").startswith("Some **bold** and")
    # The next question brings the conversation along.
    ask(page, "and?")
    server.say("Yes.")
    server.end()
    has(answer.last.locator(".markdown"), "Yes.")
    messages = server.requests[1]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[1]["reasoning_content"] == "Hm 漢字 🌊." and messages[1]["content"].endswith("| k |")
    page.get_by_role("button", name="New chat").click()
    assert answer.count() == 0
    ask(page, "fresh")
    server.say("x")
    server.end()
    has(answer.locator(".markdown"), "x")
    assert len(server.requests[2]["messages"]) == 1


def test_stop_and_retry(page, server):
    stop, answer = page.get_by_role("button", name="Stop"), page.get_by_role("article", name="Answer")
    ask(page, "go")
    for act in (stop.click, lambda: page.keyboard.press("Escape")):
        server.say("par", "tial")
        has(answer.locator(".markdown"), "partial")
        assert not page.get_by_role("button", name="Send").is_visible()
        act()
        has(answer.locator(".facts"), "stopped")
        assert server.disconnected.wait(5)
        server.disconnected.clear()
        page.get_by_role("button", name="Retry").click()
    server.say("whole")
    server.end("length")
    has(answer.locator(".markdown"), "whole")
    has(answer.locator(".facts"), "cut off: no more tokens allowed")
    assert server.requests[0] == server.requests[1] == server.requests[2]


def test_effort_and_settings_reach_the_server(page, server):
    effort = page.get_by_role("combobox", name="Thinking")
    for choice, expected in (("none", "none"), ("low", "low"), ("max", "max"), ("number", 37)):
        effort.select_option(choice)
        if choice == "number":
            page.get_by_role("spinbutton", name="Thinking effort").fill("37")
        ask(page, "x")
        server.say("y")
        server.end()
        page.get_by_role("button", name="Send").wait_for()
        assert server.requests[-1]["reasoning_effort"] == expected
    assert not {"temperature", "max_tokens", "tools"} & set(server.requests[-1])
    assert "authorization" not in server.headers[-1]
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0.3")
    page.get_by_label("Most tokens").fill("64")
    page.get_by_label("Instructions").fill("Be brief.")
    page.get_by_label("API key").fill("sk-secret")
    page.get_by_label("Tools").fill("[{")
    page.get_by_role("button", name="Done").click()
    page.get_by_role("alert").get_by_text("cannot be read").wait_for()
    page.get_by_label("Tools").fill('[{"type": "function", "function": {"name": "f"}}]')
    page.get_by_role("button", name="Done").click()
    ask(page, "z")
    server.say("y")
    server.end()
    page.get_by_role("button", name="Send").wait_for()
    body = server.requests[-1]
    assert body["temperature"] == 0.3 and body["max_tokens"] == 64 and body["tools"][0]["function"]["name"] == "f"
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert server.headers[-1]["authorization"] == "Bearer sk-secret"
    assert page.evaluate("sessionStorage.getItem('chat.api-key')") == "sk-secret"
    assert page.evaluate("localStorage.length") == 0 and page.context.cookies() == []


def test_images(page, server):
    file = {"name": "green.png", "mimeType": "image/png", "buffer": PNG.getvalue()}
    page.get_by_label("Images", exact=True).set_input_files([file, file | {"name": "other.png"}])
    thumbnails = page.get_by_role("list", name="Images to send").get_by_role("img")
    has(thumbnails, ["", ""])
    assert thumbnails.first.evaluate("image => image.naturalWidth") == 60
    page.get_by_role("button", name="Remove other.png").click()
    has(thumbnails, [""])
    # Dropped and pasted ones come as the browser's own events.
    page.evaluate(
        """([text, name]) => {
            const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
            const data = new DataTransfer();
            data.items.add(new File([bytes], name, {type: "image/png"}));
            document.dispatchEvent(new DragEvent("drop", {dataTransfer: data, cancelable: true}));
            const pasted = new ClipboardEvent("paste", {clipboardData: data, cancelable: true, bubbles: true});
            document.getElementById("prompt").dispatchEvent(pasted);
        }""",
        [base64.b64encode(PNG.getvalue()).decode(), "dropped.png"],
    )
    has(thumbnails, ["", "", ""])
    ask(page, "what?")
    server.say("A picture.")
    server.end()
    has(page.get_by_role("article", name="Answer").locator(".markdown"), "A picture.")
    (message,) = server.requests[0]["messages"]
    url = "data:image/png;base64," + base64.b64encode(PNG.getvalue()).decode()
    assert message["content"] == [{"type": "image_url", "image_url": {"url": url}}] * 3 + [
        {"type": "text", "text": "what?"}
    ]
    assert thumbnails.count() == 0
    assert page.get_by_role("article", name="You").get_by_role("img").count() == 3


def test_a_model_without_images(page, server):
    server.model["images"] = False
    page.reload()
    page.get_by_role("heading", name="demo-model").wait_for()
    assert not page.get_by_role("button", name="Add images").is_visible()
    page.get_by_label("Images", exact=True).set_input_files(
        [{"name": "a.png", "mimeType": "image/png", "buffer": PNG.getvalue()}]
    )
    page.get_by_text("This model takes no images.").wait_for()


def test_errors_are_shown(page, server):
    answer = page.get_by_role("article", name="Answer")
    error = {"error": {"message": "the <b>queue</b> is full", "type": "rate_limit_error"}}
    server.refuse(JSONResponse(error, 429, headers={"Retry-After": "7"}))
    ask(page, "x")
    has(answer.get_by_role("alert"), "Error 429the <b>queue</b> is full (try again in 7 s)")
    server.say("some ", {"error": {"message": "the engine failed"}})
    page.get_by_role("button", name="Retry").click()
    has(answer.get_by_role("alert"), "Errorthe engine failed")
    has(answer.locator(".markdown"), "some ")
    server.cut()
    page.get_by_role("button", name="Edit question").click()
    assert page.get_by_role("textbox", name="Message").input_value() == "x" and answer.count() == 0
    server.say("cut")
    server.cut()
    page.keyboard.press("Enter")
    has(answer.get_by_role("alert"), "ErrorThe connection ended before the answer did.")
    assert [len(body["messages"]) for body in server.requests] == [1, 1, 1]


def test_what_the_model_writes_is_text(page, server):
    evil = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
    ask(page, evil)
    server.say(
        delta(reasoning_content=evil),
        f"{evil} **{evil}** `{evil}` [a](javascript:alert(1)) ",
        "[b](https://b.example/)",
    )
    server.say(delta(tool_calls=[{"index": 0, "id": "c", "function": {"name": evil, "arguments": '{"<i>": "<b>"}'}}]))
    server.end()
    answer = page.get_by_role("article", name="Answer")
    has(answer.locator("strong"), evil)
    assert page.locator("#turns :is(img, script, i, b)").count() == 0
    assert page.title() == "demo-model"
    assert evil in answer.locator(".thought").text_content()
    links = answer.get_by_role("link").evaluate_all("links => links.map((link) => link.href)")
    assert links == ["https://b.example/"]


def test_tool_calls_are_shown_and_answered(page, server):
    ask(page, "weather?")
    for piece in (
        {"index": 0, "id": "call-1", "type": "function", "function": {"name": "get_weather", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"city": "Zü'}},
        {"index": 0, "function": {"arguments": 'rich", "days": 2}'}},
        {"index": 1, "id": "call-2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ):
        server.say(delta(tool_calls=[piece]))
    server.end("tool_calls")
    answer = page.get_by_role("article", name="Answer")
    has(answer.locator(".call h3"), ["Calls get_weather", "Calls now"])
    has(answer.locator(".call dl"), "cityZürichdays2")
    page.get_by_label("Result of get_weather").fill("sunny")
    page.get_by_label("Result of now").fill("noon")
    page.get_by_role("button", name="Send results").click()
    server.say("Sunny at noon.")
    server.end()
    has(answer.last.locator(".markdown"), "Sunny at noon.")
    _, calls, first, second = server.requests[1]["messages"]
    assert [call["function"]["name"] for call in calls["tool_calls"]] == ["get_weather", "now"]
    assert calls["tool_calls"][0]["function"]["arguments"] == '{"city": "Zürich", "days": 2}'
    assert first == {"role": "tool", "tool_call_id": "call-1", "content": "sunny"}
    assert second == {"role": "tool", "tool_call_id": "call-2", "content": "noon"}


def test_the_strip_is_live_while_it_is_seen(page, server):
    has(page.locator("#strip-running"), "3 / 16")
    has(page.locator("#strip-waiting"), "1")
    has(page.locator("#strip-pages"), "128 / 512")
    has(page.locator("#strip-hbm"), "1.5 GiB")
    has(page.locator("#strip-persistent"), "50 MiB")
    has(page.locator("#strip-cached"), "1.2K")
    has(page.locator("#strip-rate"), re.compile(r"^([1-4]?\d|50)(\.\d)?$"))  # 50 tokens a question, one a second
    page.evaluate(
        """() => {
            Object.defineProperty(document, "hidden", {value: true, configurable: true});
            document.dispatchEvent(new Event("visibilitychange"));
        }"""
    )
    page.wait_for_timeout(100)
    reads = server.state_reads
    page.wait_for_timeout(1150)
    assert server.state_reads == reads
    page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    end = time.monotonic() + 5
    while server.state_reads == reads and time.monotonic() < end:
        page.wait_for_timeout(20)
    assert server.state_reads > reads


def test_narrow_windows(page, server):
    page.set_viewport_size({"width": 360, "height": 640})
    ask(page, "x" * 200)
    server.say("y" * 300, "\n\n```\n" + "z" * 300 + "\n```\n", "`" + "w" * 300 + "`")
    server.say(delta(tool_calls=[{"index": 0, "id": "c", "function": {"name": "n" * 80, "arguments": "v" * 300}}]))
    server.end("tool_calls", USAGE)
    page.get_by_role("button", name="Send result").wait_for()
    page.get_by_role("combobox", name="Thinking").select_option("number")
    for width in (360, 1100):
        page.set_viewport_size({"width": width, "height": 640})
        for element in ("document.documentElement", "document.getElementById('log')"):
            assert page.evaluate(f"{element}.scrollWidth - {element}.clientWidth") <= 0
    page.set_viewport_size({"width": 360, "height": 640})
    for name in ("Send", "New chat", "Settings"):
        box = page.get_by_role("button", name=name, exact=True).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 360


def test_the_page_is_whole():
    """It names no other host, and every file that it names is there."""
    for file in PAGE.iterdir():
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text.replace("https?:", "")), file.name
        for name in re.findall(r'"(?:page/|\./)([\w.-]+)"', text):
            assert (PAGE / name).is_file(), (file.name, name)
    index = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=", index)
