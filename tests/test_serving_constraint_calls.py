"""Forced tool calls: blocks walked at random under the masks are parsed back to calls with valid arguments."""

import json
import re

import pytest

from dsv41_jax.chat_messages import read_dialogue
from dsv41_jax.chat_parse import AnswerParser
from dsv41_jax.chat_prompt import DSML, THINK_END, render
from dsv41_jax.serving.constraints import Constraints
from dsv41_jax.serving.request import RequestError
from dsv41_jax.tokenizer import Tokenizer
from test_serving_constraints import DEMO, EOS, ROWS, allowed, feed, walk


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.from_folder(DEMO)


@pytest.fixture(scope="module")
def constraints(demo) -> Constraints:
    return Constraints(demo, ROWS, EOS)


def tool(name: str, properties: dict, required=(), **more) -> dict:
    parameters = {"type": "object", "properties": properties, "required": list(required)} | more
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = tool(
    "get_weather",
    {
        "city": {"type": "string", "maxLength": 20, "description": "é"},
        "unit": {"$ref": "#/$defs/unit"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "when": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}/[0-9]+$"},
    },
    ["city", "unit", "extra"],
    additionalProperties={"type": "array", "items": {"$ref": "#/$defs/unit"}},
    **{"$defs": {"unit": {"enum": ["C", "F", '"K"']}}},
)
TOOLS = [WEATHER, tool("ping", {}), tool("free", {"any": {}, "some": {"type": ["string", "integer"], "minLength": 1}})]


def is_call(name: str, arguments: dict) -> bool:
    if name == "ping":
        return arguments == {}
    if name == "free":
        some = arguments.get("some", 0)
        return set(arguments) <= {"any", "some"} and (isinstance(some, int) or len(some) >= 1)
    days, units = arguments.get("days", 1), ("C", "F", '"K"')
    return (
        name == "get_weather"
        and {"city", "unit", "extra"} <= set(arguments) <= {"city", "unit", "days", "note", "when", "code", "extra"}
        and len(arguments["city"]) <= 20
        and arguments["unit"] in units
        and all(unit in units for unit in arguments["extra"])
        and isinstance(days, int)
        and 1 <= days <= 14
        and (arguments.get("note") is None or isinstance(arguments["note"], str))
        and re.fullmatch(r"\d{4}-\d\d-\d\d", arguments.get("when", "2000-01-01"))
        and re.fullmatch("[A-Z]{2}/[0-9]+", arguments.get("code", "AB/1"))
    )


def parsed(demo: Tokenizer, ids: list[int], thinking: bool, opened: bool) -> list[tuple[str, dict]]:
    """The calls of an answer, whose parse must see nothing wrong."""
    user = [{"role": "user", "content": "x"}]
    prompt = render(read_dialogue(user, "high" if thinking else None, TOOLS, "required" if opened else "auto"))
    assert (prompt.stage == "calls") == opened
    parser = AnswerParser(demo, prompt)
    deltas = [*(parser.push([i]) for i in ids), parser.finish()]
    assert parser.problems == []
    assert "".join(delta.content for delta in deltas).strip() == ""
    calls: dict[int, list[str]] = {}
    for piece in (piece for delta in deltas for piece in delta.tool_calls):
        call = calls.setdefault(piece["index"], ["", ""])
        call[0] += piece["function"].get("name", "")
        call[1] += piece["function"].get("arguments", "")
    return [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.parametrize("where", ["opened", "content", "reasoning"])
def test_walks_are_calls(where, constraints, demo):
    names = set()
    for seed in range(5):
        constraint = constraints.tool_calls(TOOLS, where == "reasoning", opened=where == "opened")
        ids = []
        if where == "reasoning":
            ids = [*demo.encode("hm"), demo.token_id(THINK_END)]
            feed(constraint, demo, ids)
        ids += walk(constraint, demo, seed)
        calls = parsed(demo, ids, where == "reasoning", where == "opened")
        assert calls and all(is_call(*call) for call in calls), calls
        names |= {name for name, _ in calls}
    assert len(names) > 1


def test_one_named_call(constraints, demo):
    for seed in range(4):
        constraint = constraints.tool_calls(TOOLS, False, only="free", opened=True, several=False)
        ((name, arguments),) = parsed(demo, walk(constraint, demo, seed), False, True)
        assert name == "free" and is_call(name, arguments)


@pytest.mark.parametrize("pattern", ["a|^b$", "^(ab|cd)+$", r"\d{3}", r"a\$$", "[$^]/x"])
def test_text_parameters_match_their_pattern(pattern, constraints, demo):
    one = tool("f", {"a": {"type": "string", "pattern": pattern, "maxLength": 12}}, ["a"])
    for seed in range(6):
        ids = walk(constraints.tool_calls([one], False, opened=True, several=False), demo, seed)
        ((_, arguments),) = parsed(demo, ids, False, True)
        assert re.search(pattern, arguments["a"]) and len(arguments["a"]) <= 12, arguments


def test_text_parameters_of_any_characters(constraints, demo):
    values = ["a\nb", "\x01", '"q"\\', "</", "é</f>", "🌊", "\t\r"]
    found = set()
    for value in values:
        one = tool("f", {"a": {"enum": [value]}}, ["a"])
        ids = walk(constraints.tool_calls([one], False, opened=True, several=False), demo, 0)
        ((_, arguments),) = parsed(demo, ids, False, True)
        found.add(arguments["a"])
    assert found == set(values)


def test_calls_as_the_model_writes_them(constraints, demo):
    """Two calls in the release's form, text parameters as they are; behind the block only the end."""
    spelled = (
        '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">\n'
        '<｜DSML｜ parameter name="city" string="true">a </b> "q"\n<é</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="unit" string="true">"K"</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="days" string="false">12</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="note" string="false">null</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="extra" string="false">["C", "F"]</｜DSML｜ parameter>\n'
        '</｜DSML｜ invoke>\n<｜DSML｜ invoke name="ping">\n\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
    )
    marker = demo.token_id(DSML)
    ids = [i for n, piece in enumerate(spelled.split(DSML)) for i in ([marker] if n else []) + demo.encode(piece)]
    constraint = constraints.tool_calls(TOOLS, False)
    feed(constraint, demo, ids)
    assert allowed(constraint) == {EOS}
    expected = {"city": 'a </b> "q"\n<é', "unit": '"K"', "days": 12, "note": None, "extra": ["C", "F"]}
    assert parsed(demo, ids, False, False) == [("get_weather", expected), ("ping", {})]


@pytest.mark.parametrize(
    ("tools", "only", "message"),
    [
        (None, None, "tools=None: a list is needed"),
        ([], None, "no tool to call"),
        ([tool("f", {})], "g", "no tool 'g'"),
        ([tool("f", {}), tool("f", {})], None, "two tools"),
        ([tool('a"b', {})], None, "cannot stand in a call"),
        ([tool("f", {'a">': {}})], None, "cannot stand in a call"),
        ([{"type": "function"}], None, r"tools\[0\]"),
        ([tool("f", {"a": {"type": "integer", "minimum": 3, "maximum": 1}}, ["a"])], None, "tool 'f' cannot be foll"),
        ([tool("f", {"a": {"foo": 1}})], None, "tool 'f' at #/properties/a has the keyword 'foo'"),
        ([tool("f", {}, anyOf=[{}])], None, "tool 'f' have the keyword 'anyOf'"),
        ([tool("f", {}, type="array")], None, "an object is needed"),
        ([tool("f", {"a": {"$ref": "#"}}, ["a"])], None, "never be complete"),
    ],
)
def test_refused_tools(tools, only, message, constraints):
    with pytest.raises(RequestError, match=message):
        constraints.tool_calls(tools, False, only)
