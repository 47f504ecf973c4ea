"""The grammar of a block of tool calls, in llguidance's Lark.

    <｜DSML｜ calls>
    <｜DSML｜ invoke name="NAME">
    <｜DSML｜ parameter name="KEY" string="true">text as it is</｜DSML｜ parameter>
    <｜DSML｜ parameter name="KEY" string="false">JSON</｜DSML｜ parameter>
    </｜DSML｜ invoke>
    </｜DSML｜ calls>

｜DSML｜ is one control token, which no text can spell. Every stretch of fixed text between two of them is a terminal of
its own, so that none is the beginning of another that could stand at the same place: the lexer takes the longest.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import llguidance

from dsv41_jax.serving.constraint_schema import ANNOTATIONS, check_schema, json_text, resolve
from dsv41_jax.serving.request import RequestError

_TOP = ANNOTATIONS | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_NAME = re.compile(r'[^"<>\x00-\x1f]+')
_TEXT_KEYWORDS = frozenset({"type", "enum", "const", "minLength", "maxLength", "pattern"}) | ANNOTATIONS
# Those that say nothing about strings.
_OTHER_KEYWORDS = frozenset(
    "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf items additionalItems prefixItems minItems maxItems "
    "properties additionalProperties patternProperties required minProperties maxProperties".split()
)
_OTHER_TYPES = ("null", "boolean", "number", "integer", "array", "object")


def tools_by_name(tools: Sequence[Mapping[str, Any]], only: str | None) -> dict[str, dict[str, Any]]:
    """Checked parameter schemas of tools in OpenAI's shape, by name; of the tool `only` where that is given.

    Raises:
        RequestError: naming the tool and what is wrong with it.
    """
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise RequestError(f"tools={tools!r}: a list is needed")
    found: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RequestError(f"tools[{i}] has the name {name!r}, which cannot stand in a call")
        if only is not None and name != only:
            continue
        if name in found:
            raise RequestError(f"tools[{i}]: there are two tools of the name {name!r}")
        parameters = function.get("parameters")
        schema = check_schema({} if parameters is None else parameters, _where(name))
        if schema.get("type", "object") != "object":
            raise RequestError(f"{_where(name)} are of the type {schema['type']!r}: an object is needed")
        for keyword in schema:
            if keyword not in _TOP and not keyword.startswith("x-"):
                raise RequestError(f"{_where(name)} have the keyword {keyword!r}: a forced call's cannot")
        found[name] = {"type": "object"} | schema
    if not found:
        raise RequestError(f"there is no tool {only!r} to call" if only is not None else "there is no tool to call")
    return found


def _where(name: str) -> str:
    return f"the parameters of the tool {name!r}"


def calls_grammar(tools: Mapping[str, dict[str, Any]], dsml: int, opened: bool, several: bool, options: dict) -> str:
    """The Lark grammar of a block of calls.

    Args:
        tools: parameter schemas by tool name. dsml: the control token's id. options: of embedded JSON schemas.
        opened: whether the prompt already ends with the block's first line. several: whether more than one call may
            stand in it.

    Declared parameters come in the order of the schema. Others, even where the schema allows them, are not written,
    but for those it requires.
    """
    mark = f"<[{dsml}]>"
    head = f'"<" {mark}' if opened else f'"\\n\\n<" {mark} " calls>\\n<" {mark}'
    more = f'(call " invoke>\\n<" {mark})* ' if several else ""
    rules = [f'start: {head} {more}call " invoke>\\n</" {mark} " calls>"']
    rules.append("call: " + " | ".join(f"tool{t}" for t in range(len(tools))))
    for t, (name, schema) in enumerate(tools.items()):
        rules += _tool(f"{t}", name, schema, mark, options)
    return "\n".join(rules) + "\n"


def _tool(t: str, name: str, schema: dict[str, Any], mark: str, options: dict) -> Iterable[str]:
    """Rules of one tool. `none{t}_{i}` and `some{t}_{i}`: what may follow from parameter i on, while none or some
    were written before it.
    """
    properties, required = dict(schema.get("properties") or {}), set(schema.get("required") or ())
    for key in schema.get("required") or ():
        properties.setdefault(key, schema.get("additionalProperties", True))
    yield f"tool{t}: {_quoted(f' invoke name={chr(34)}{name}{chr(34)}>')} none{t}_0"
    keys = [key for key in properties if key in required or properties[key] is not False]
    for i, key in enumerate(keys):
        if not _NAME.fullmatch(key):
            raise RequestError(f"{_where(name)}: {key!r} cannot stand in a call")
        skip = "" if key in required else f" | {{}}{t}_{i + 1}"
        yield f'none{t}_{i}: "\\n<" {mark} value{t}_{i} some{t}_{i + 1}' + skip.format("none")
        yield f'some{t}_{i}: " parameter>\\n<" {mark} value{t}_{i} some{t}_{i + 1}' + skip.format("some")
        yield from _value(f"{t}_{i}", key, properties[key], schema, mark, options)
    yield f'none{t}_{len(keys)}: "\\n\\n</" {mark}'
    if keys:
        yield f'some{t}_{len(keys)}: " parameter>\\n</" {mark}'


def _value(at: str, key: str, schema: Any, root: dict[str, Any], mark: str, options: dict) -> Iterable[str]:
    """Rules of one parameter, from its tag to the marker of the closing one."""
    found, choices, terminals = _forms(schema, root), [], []
    for k, (kind, form) in enumerate(found):
        tag = _quoted(f' parameter name="{key}" string="{"true" if kind == "text" else "false"}">')
        if kind == "text":
            terminals.append(f'TEXT{at}_{k}: ({form}) "</"')
            choices.append(f"{tag} TEXT{at}_{k} {mark}")
        else:
            embedded = _rooted(form, root) | {"x-guidance": options}
            terminals.append(f"json{at}_{k}: %json {json_text(embedded, f'the parameter {key!r}')}")
            choices.append(f'{tag} json{at}_{k} "</" {mark}')
    yield f"value{at}: " + " | ".join(choices)
    yield from terminals


def _forms(schema: Any, root: dict[str, Any], depth: int = 0) -> list[tuple[str, Any]]:
    """The ways to write values of a schema: ("text", a terminal's body) for strings as they are, ("json", a schema).

    Strings whose schema is not plain enough are written as JSON too, which means the same to who reads the call.
    """
    if schema is True or (isinstance(schema, Mapping) and not set(schema) - ANNOTATIONS):
        return [("text", "/(?s:.*)/"), ("json", {"type": list(_OTHER_TYPES)})]
    keywords = set(schema) - ANNOTATIONS
    target = resolve(root, schema["$ref"]) if keywords == {"$ref"} and depth < 8 else None
    if isinstance(target, Mapping):
        forms = _forms(target, root, depth + 1)
        return forms if any(kind == "text" for kind, _ in forms) else [("json", schema)]
    if keywords == {"anyOf"} and depth < 8:
        return [form for branch in schema["anyOf"] if branch is not False for form in _forms(branch, root, depth + 1)]
    kinds = schema.get("type", ("string", *_OTHER_TYPES))
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if keywords & {"enum", "const"}:
        values = schema.get("enum", [schema.get("const")])
        others: dict[str, Any] = {"enum": [value for value in values if not isinstance(value, str)]}
        is_plain = keywords <= _TEXT_KEYWORDS and len(others["enum"]) < len(values)
        if "type" in keywords:  # of several types, which one a value has is not looked into here
            is_plain, others = is_plain and kinds == ["string"], {"enum": []}
    else:
        others = {"type": [kind for kind in kinds if kind != "string"]}
        typed = keywords <= _TEXT_KEYWORDS | _OTHER_KEYWORDS and "type" in keywords
        is_plain = "string" in kinds and (keywords <= _TEXT_KEYWORDS or typed)
    if not is_plain or ("pattern" in schema and _searched(schema["pattern"]) is None):
        return [("json", schema)]
    rest = [("json", dict(schema) | others)] if all(others.values()) else []
    return [("text", _text(schema)), *rest]


def _text(schema: Mapping[str, Any]) -> str:
    """The terminal's body of the strings of a schema."""
    parts = []
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        parts.append("(" + " | ".join(_quoted(value) for value in values if isinstance(value, str)) + ")")
    if "minLength" in schema or "maxLength" in schema:
        most = int(schema["maxLength"]) if "maxLength" in schema else ""
        parts.append(f"/(?s:.{{{int(schema.get('minLength', 0))},{most}}})/")
    if "pattern" in schema:
        parts.append("/" + llguidance.regex_to_lark(_searched(schema["pattern"]), "dw") + "/")
    return " & ".join(parts) or "/(?s:.*)/"


def _searched(pattern: str) -> str | None:
    """A pattern, which may match anywhere, as one of the whole text; None where it has anchors inside.

    An anchor at an end that holds for one alternative only is taken for all: fewer texts, all of them right.
    """
    start, end = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    body = pattern[start : len(pattern) - end]
    if re.search(r"[\^$]", re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", body, flags=re.DOTALL)):
        return None
    return ("" if start else "(?s:.*)") + f"(?:{body})" + ("" if end else "(?s:.*)")


def _rooted(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """A parameter's schema as one of its own: with references, together with the schema that they point into."""
    if schema is True:
        return {}
    if not _has_reference(schema):
        return dict(schema)
    return {"allOf": [_moved(schema)], "$defs": {"tool": _moved(root)}}


def _has_reference(node: Any) -> bool:
    if isinstance(node, Mapping):
        return "$ref" in node or any(map(_has_reference, node.values()))
    return isinstance(node, list | tuple) and any(map(_has_reference, node))


def _moved(node: Any) -> Any:
    """With the references of a schema that now stands at #/$defs/tool."""
    if isinstance(node, Mapping):
        is_local = isinstance(node.get("$ref"), str) and node["$ref"].startswith("#")
        moved = {key: _moved(value) for key, value in node.items()}
        return moved | {"$ref": "#/$defs/tool" + node["$ref"][1:]} if is_local else moved
    return [_moved(item) for item in node] if isinstance(node, list | tuple) else node


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
