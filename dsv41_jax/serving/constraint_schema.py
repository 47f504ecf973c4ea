"""What is wrong with a JSON schema, before it is compiled.

`llguidance` refuses what it cannot express and what is contradictory. Looked at here is what it lets through: keywords
that it does not know, which it would ignore; schemas whose values would have to be infinite; and sheer size.
"""

import json
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dsv41_jax.serving.request import RequestError

MAX_BYTES = 1 << 18  # of a schema, as JSON
MAX_DEPTH = 100  # of its JSON; llguidance's own reader ends at 128

# Each of these holds one schema, a list of schemas, or schemas by name.
_ONE = ("items", "additionalItems", "additionalProperties")
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_KEYWORDS = frozenset(
    [*_ONE, *_MANY, *_NAMED, "$ref", "const", "enum", "type", "minItems", "maxItems", "required"]
    + ["minProperties", "maxProperties", "minLength", "maxLength", "pattern", "format"]
    + ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]
)
# What each of these holds, where the rest of this module relies on it; llguidance looks at the others itself.
_SHAPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    **dict.fromkeys((*_MANY, "enum"), (list, "a list")),
    **dict.fromkeys(_NAMED, (dict, "an object")),
    **dict.fromkeys(("minItems", "minLength", "maxLength"), ((int, float), "a number")),
    **dict.fromkeys(("pattern", "$ref"), (str, "a string")),
    "type": ((str, list), "a name or a list of names"),
    "required": (list, "a list of names"),
}
# They say nothing about which values are right ("discriminator" only names the property that tells a oneOf apart).
ANNOTATIONS = frozenset(
    "$schema $id id $anchor $comment title description default example examples deprecated readOnly writeOnly "
    "contentMediaType contentEncoding discriminator".split()
)


def check_schema(schema: Any, where: str = "schema") -> dict[str, Any]:
    """A schema that says something about every value, all of it understood, and that some finite value can satisfy as
    far as its references go; `true` becomes {}.

    Raises:
        RequestError: naming the place, as a JSON pointer behind `where`, and what is wrong there.
    """
    if schema is True:
        schema = {}
    if schema is False:
        raise RequestError(f"{where} is false: no value satisfies it")
    if not isinstance(schema, Mapping):
        raise RequestError(f"{where} is {_short(schema)}: a JSON object is needed")
    schema = json.loads(json_text(schema, where))
    nodes = dict(_nodes(schema, "#"))
    for at, node in nodes.items():
        _check_keywords(f"{where} at {at}", node)
    known = set(map(id, nodes.values()))
    for at, node in nodes.items():
        target = resolve(schema, node.get("$ref")) if isinstance(node, Mapping) else None
        if target is not None and id(target) not in known:
            raise RequestError(f"{where} at {at} refers to {node['$ref']}, where no schema stands")
    _check_finite(schema, nodes, where)
    return schema


def json_text(value: Any, where: str) -> str:
    """A value as JSON, not too deep and not too long.

    Raises:
        RequestError: where it is either, or not JSON.
    """
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise RequestError(f"{where} is nested more than {MAX_DEPTH} levels deep")
        below: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                below += item.values()
            elif isinstance(item, list | tuple):
                below += item
        level = below
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except (TypeError, ValueError) as error:
        raise RequestError(f"{where} is no JSON: {error}") from None
    if size > MAX_BYTES:
        raise RequestError(f"{where} has {size} bytes: at most {MAX_BYTES} are taken")
    return text


def resolve(root: Mapping[str, Any], reference: Any) -> Any:
    """What a reference inside of `root` names, or None for any other."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    node: Any = root
    for part in urllib.parse.unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping) and key in node:
            node = node[key]
        elif isinstance(node, list | tuple) and key.isdigit() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node


def pointer(name: str) -> str:
    """A property's name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _nodes(schema: Any, at: str) -> Iterator[tuple[str, Any]]:
    """Every schema inside of a schema, itself first, with its JSON pointer."""
    yield at, schema
    if not isinstance(schema, Mapping):
        return
    for keyword in _ONE:
        if keyword in schema and not isinstance(schema[keyword], list):
            yield from _nodes(schema[keyword], f"{at}/{keyword}")
    for keyword in (*_MANY, "items"):
        if isinstance(schema.get(keyword), list):
            for i, item in enumerate(schema[keyword]):
                yield from _nodes(item, f"{at}/{keyword}/{i}")
    for keyword in _NAMED:
        if isinstance(schema.get(keyword), Mapping):
            for name, item in schema[keyword].items():
                yield from _nodes(item, f"{at}/{keyword}/{pointer(name)}")


def _check_keywords(where: str, node: Any) -> None:
    if isinstance(node, bool):
        return
    if not isinstance(node, Mapping):
        raise RequestError(f"{where} is {_short(node)}: a schema is needed")
    for keyword in node:
        known = keyword in _KEYWORDS or keyword in ANNOTATIONS
        if not known and (keyword == "x-guidance" or not keyword.startswith("x-")):
            hint = ' (write "type": [..., "null"])' if keyword == "nullable" else ""
            raise RequestError(f"{where} has the keyword {keyword!r}, which is not supported here{hint}")
        shape, words = _SHAPES.get(keyword, (object, ""))
        fits = isinstance(node[keyword], shape) and not isinstance(node[keyword], bool)
        if keyword in ("type", "required") and isinstance(node[keyword], list):
            fits = all(isinstance(name, str) for name in node[keyword])
        if words and not fits:
            raise RequestError(f"{where}: {keyword} is {_short(node[keyword])}: {words} is needed")


def _check_finite(schema: Mapping[str, Any], nodes: Mapping[str, Any], where: str) -> None:
    """RequestError where a schema demands a value that contains another one of itself, without end."""
    finite: set[int] = set()
    waiting: dict[int, list[Any]] = {}  # by the id of what they wait for
    queue = [node for node in nodes.values() if isinstance(node, Mapping)]  # children behind parents: taken first
    while queue:
        node = queue.pop()
        if id(node) in finite:
            continue
        if missing := _missing(schema, node, finite):
            for key in missing:
                waiting.setdefault(key, []).append(node)
        else:
            finite.add(id(node))
            queue += waiting.pop(id(node), ())
    for at, node in nodes.items():
        if isinstance(node, Mapping) and id(node) not in finite:
            raise RequestError(f"{where} at {at} can never be complete: its values would contain each other forever")


def _missing(root: Mapping[str, Any], node: Mapping[str, Any], finite: set[int]) -> list[int]:
    """Ids of schemas one of which must have a finite value before this one can; [] where it has one, given those that
    are known to.
    """

    def unknown(children: Iterable[Any]) -> list[int]:
        return [id(child) for child in children if isinstance(child, Mapping) and id(child) not in finite]

    needed = [[resolve(root, node["$ref"])]] if "$ref" in node else []
    needed.append(node.get("allOf") or ())
    kinds = node.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    # Where another type is allowed, its values are finite.
    if kinds == ["object"]:
        needed.append(_required(node))
    elif kinds == ["array"]:
        needed.append(_items_needed(node))
    for children in needed:
        if missing := unknown(children):
            return missing[:1]
    for keyword in ("anyOf", "oneOf"):
        options = node.get(keyword) or ()
        if options and len(missing := unknown(options)) == len(options):
            return missing
    return []


def _required(node: Mapping[str, Any]) -> list[Any]:
    named = node.get("properties") or {}
    return [named.get(name, node.get("additionalProperties")) for name in node.get("required") or ()]


def _items_needed(node: Mapping[str, Any]) -> list[Any]:
    least = node.get("minItems", 0)
    items = node.get("items")
    first = node.get("prefixItems") or (items if isinstance(items, list) else [])
    if len(first) >= least:
        return [item for i, item in enumerate(first) if i < least]
    return [*first, node.get("additionalItems") if isinstance(items, list) else items]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
