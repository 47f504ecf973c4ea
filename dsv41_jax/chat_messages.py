"""Messages as callers write them (OpenAI's shapes) to the conversation that `deepseek-recipe` renders."""

import base64
import binascii
import dataclasses
import json
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import deepseek_recipe
import numpy as np
from PIL import Image

from dsv41_jax.arguments import check_text, is_whole

IMAGE_PLACE = "\ufdd0image\ufdd0"  # where an image stands in a message's text; FDD0 is no character of any text
ROLES = ("system", "user", "assistant", "tool", "latest_reminder")
EFFORTS = ("low", "high", "max")
TASKS = ("action", "query", "authority", "domain", "title", "read_url")


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """A checked conversation.

    Attributes:
        conversation: the library's. images: in the order of the messages; placeholder i is a source that holds i. None:
            the conversation's sources are the images themselves.
        thinking: whether the model is to think. effort: 1 to 100 where that is a number, else None.
        continues: whether the last message is an assistant's that goes on (`prefix`).
        complete: whether the last message is an assistant's that is finished.
        task: the last user message's task, or None.
    """

    conversation: Any
    images: list[Any] | None
    thinking: bool
    effort: int | None
    continues: bool
    complete: bool
    task: str | None


def read_dialogue(
    messages: Sequence[Mapping[str, Any]],
    thinking: str | int | bool | None = "high",
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] = "auto",
) -> Dialogue:
    """Check messages and options of a chat.

    Raises:
        ValueError, TypeError: naming the message and what is wrong with it.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f"messages={messages!r}: a list of messages is needed")
    if not messages:
        raise ValueError("messages=[]: at least one message is needed")
    level, effort = _effort(thinking)
    images: list[Any] = []
    offered, schema, converted = [_tool(f"tools[{i}]", tool) for i, tool in _listed("tools", tools)], None, []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise TypeError(f"{where} is {message!r}: a mapping with role and content is needed")
        role = message.get("role")
        if role not in ROLES:
            hint = "; give a developer's message the role system" if role == "developer" else ""
            raise ValueError(f"{where} has the role {role!r}: one of {', '.join(ROLES)} is needed{hint}")
        own = [_tool(f"{where}.tools[{k}]", tool) for k, tool in _listed(f"{where}.tools", message.get("tools"))]
        if i == 0:
            offered, own = offered + own, []
            schema = message.get("response_format")
        elif message.get("response_format") is not None:
            raise ValueError(f"{where} has a response_format: only the first message can")
        if message.get("task") is not None and (role != "user" or i + 1 < len(messages)):
            raise ValueError(f"{where} has a task: only a user's last message can")
        converted.append(_message(where, role, message, own, images))
    last = messages[-1]
    assistant = last.get("role") == "assistant"
    continues = assistant and bool(last.get("prefix") or last.get("wo_eos"))
    if continues and last.get("tool_calls"):
        raise ValueError("the last message is to be continued and has tool_calls: only text can be continued")
    task = last.get("task")
    if task is not None and task not in TASKS:
        raise ValueError(f"the last message has the task {task!r}: one of {', '.join(TASKS)} is needed")
    offered, choice = _choice(tool_choice, offered, level is not None)
    conversation = deepseek_recipe.Conversation(
        converted,
        thinking_mode=level is not None,
        tools=offered,
        tool_choice=choice,
        reasoning_effort=level,
        response_schema=schema,
    )
    return Dialogue(conversation, images, level is not None, effort, continues, assistant and not continues, task)


def _listed(where: str, values: object) -> Iterable[tuple[int, Any]]:
    """Numbered elements of a list that may be left out; TypeError for anything else."""
    if values is None:
        return ()
    if isinstance(values, str | Mapping) or not isinstance(values, Sequence):
        raise TypeError(f"{where}={values!r}: a list is needed")
    return enumerate(values)


def _effort(thinking: object) -> tuple[str | None, int | None]:
    """(the library's level or None for off, the number to write instead or None)."""
    if thinking is None or thinking is False or (isinstance(thinking, str) and thinking == "none"):
        return None, None
    if isinstance(thinking, str) and thinking in EFFORTS:
        return thinking, None
    if is_whole(thinking) and 1 <= thinking <= 100:
        return "high", int(thinking)
    raise ValueError(f'thinking={thinking!r}: "low", "high", "max", a whole number from 1 to 100, or None is needed')


def _choice(tool_choice: object, tools: list, thinking: bool) -> tuple[list, str]:
    if isinstance(tool_choice, str) and tool_choice in ("auto", "none"):
        return tools, tool_choice
    if isinstance(tool_choice, Mapping):
        function = tool_choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        tools = [tool for tool in tools if tool.name == name]
    elif tool_choice != "required":
        raise ValueError(f'tool_choice={tool_choice!r}: "auto", "none", "required" or {{"function": ...}} is needed')
    if not tools:
        raise ValueError(f"tool_choice={tool_choice!r}: there is no such tool")
    if thinking:
        raise ValueError(f"tool_choice={tool_choice!r} needs thinking=None: calls are opened where reasoning would be")
    return tools, "required"


def _message(where: str, role: str, message: Mapping, tools: list, images: list) -> Any:
    first = len(images)
    content = _content(f"{where}.content", message.get("content"), images)
    if len(images) > first and role in ("assistant", "latest_reminder"):
        raise ValueError(f"{where} holds an image: a message of the role {role} cannot")
    sources = [deepseek_recipe.BytesImageSource(str(k).encode()) for k in range(first, len(images))]
    if role == "latest_reminder":
        return deepseek_recipe.LatestReminderMessage(content)
    if role == "assistant":
        reasoning = message.get("reasoning_content", message.get("reasoning"))
        if reasoning is not None:
            check_text(f"{where}.reasoning_content", reasoning, empty=True)
        given = _listed(f"{where}.tool_calls", message.get("tool_calls"))
        calls = [_call(f"{where}.tool_calls[{k}]", c) for k, c in given]
        prefix = bool(message.get("prefix") or message.get("wo_eos"))
        return deepseek_recipe.AssistantMessage(content, reasoning, calls or None, prefix)
    if role == "tool":
        call_id = message.get("tool_call_id")
        if call_id is not None:
            check_text(f"{where}.tool_call_id", call_id)
        return deepseek_recipe.ToolMessage(content, call_id, sources, image_token=IMAGE_PLACE)
    if role == "system":
        return deepseek_recipe.SystemMessage(content, sources, tools or None, image_token=IMAGE_PLACE)
    return deepseek_recipe.UserMessage(content, sources, image_token=IMAGE_PLACE)


def _content(where: str, content: object, images: list) -> str:
    """Text of a message: its parts joined by a blank line, images as `IMAGE_PLACE` and appended to `images`."""
    if content is None:
        return ""
    if isinstance(content, str):
        return _text(where, content)
    if not isinstance(content, list | tuple):
        raise TypeError(f"{where} is {content!r}: a string or a list of parts is needed")
    blocks = []
    for i, part in enumerate(content):
        at = f"{where}[{i}]"
        if not isinstance(part, Mapping):
            raise TypeError(f"{at} is {part!r}: a mapping with a type is needed")
        kind = part.get("type")
        if kind == "text":
            blocks.append(_text(f"{at}.text", part.get("text")))
        elif kind in ("image", "image_url"):
            images.append(_image(at, part))
            blocks.append(IMAGE_PLACE)
        else:
            raise ValueError(f"{at} has the type {kind!r}: text, image or image_url is needed")
    return "\n\n".join(blocks)


def _text(where: str, text: object) -> str:
    if IMAGE_PLACE in check_text(where, text, empty=True):
        raise ValueError(f"{where} holds the noncharacters U+FDD0 around 'image', which mark an image's place here")
    return text


def _image(where: str, part: Mapping) -> Image.Image | np.ndarray | bytes:
    if part["type"] == "image":
        image = part.get("image")
    else:
        image = part.get("image_url")
        image = image.get("url") if isinstance(image, Mapping) else image
    if isinstance(image, str):
        return data_url_bytes(where, image)
    if not isinstance(image, bytes | bytearray | np.ndarray | Image.Image):
        kind = type(image).__name__
        raise TypeError(f"{where} has {kind} for an image: bytes, an array, a Pillow image or a data URL is needed")
    return image


def data_url_bytes(where: str, url: str) -> bytes:
    """The bytes of a data URL; ValueError for any other URL, because images are not fetched."""
    if not url[:5].lower() == "data:":
        raise ValueError(f"{where} has the URL {url[:60]!r}: images are not fetched, give the bytes or a data URL")
    header, comma, body = url[5:].partition(",")
    if not comma:
        raise ValueError(f"{where} has a data URL without a comma before its data")
    raw = urllib.parse.unquote_to_bytes(body)
    if not header.lower().endswith(";base64"):
        return raw
    try:
        return base64.b64decode(raw, validate=True)
    except binascii.Error as error:
        raise ValueError(f"{where} has a data URL whose base64 is broken: {error}") from None


def _tool(where: str, tool: object) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise ValueError(f'{where} is {tool!r}: {{"type": "function", "function": {{"name": ...}}}} is needed')
    name = check_text(f"{where}.function.name", function.get("name"))
    description = function.get("description")
    if description is not None:
        check_text(f"{where}.function.description", description, empty=True)
    try:
        return deepseek_recipe.ToolDefinition(name, description, function.get("parameters"), function.get("strict"))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}.function.parameters are no JSON: {error}") from None


def _call(where: str, call: object) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(f'{where} is {call!r}: {{"id": ..., "function": {{"name": ..., "arguments": ...}}}} is needed')
    name, arguments = check_text(f"{where}.function.name", function.get("name")), function.get("arguments", "{}")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    check_text(f"{where}.function.arguments", arguments, empty=True)
    return deepseek_recipe.ToolCall(str(call.get("id") or ""), name, _unquoted(arguments))


def _unquoted(arguments: str) -> str:
    """Arguments that were put into JSON twice, as some clients do, once; anything else as it is."""
    try:
        inner = json.loads(arguments)
    except json.JSONDecodeError:
        return arguments
    return inner if isinstance(inner, str) else arguments
