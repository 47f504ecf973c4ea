"""Settings: frozen dataclasses of checked values whose fields carry the help lines of flags and configs.

    @dataclasses.dataclass(frozen=True)
    class Limits(Settings):
        rows: int = setting(16, "requests that run at once", least=1)

    Limits.of({"rows": 4})

A field whose type is itself a `Settings` is a section: a mapping becomes it, and its errors name both.
"""

import dataclasses
import math
import runpy
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from ml_collections import ConfigDict

from dsv41_jax.arguments import is_real, is_whole


def config_values(path: str) -> dict[str, Any]:
    """What the `get_config()` of a --config file returns, as plain dicts.

    Raises:
        FileNotFoundError: no such file. ValueError: a file that cannot be run or has no get_config().
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"--config={path}: no such file")
    try:
        made = runpy.run_path(path)
    except Exception as error:
        raise ValueError(f"--config={path} cannot be run: {type(error).__name__}: {error}") from error
    if "get_config" not in made:
        raise ValueError(f"--config={path} has no get_config()")
    return ConfigDict(made["get_config"]()).to_dict()


def setting(default: Any, text: str, **more: Any) -> Any:
    """A field: its default and its help line.

    Args:
        more: `least` (default 1) and `most` of a number, `choices` of a string.
    """
    return dataclasses.field(default=default, metadata={"help": text, **more})


def section(kind: type, text: str) -> Any:
    """A field that holds settings of its own, by default their defaults."""
    return dataclasses.field(default_factory=kind, metadata={"help": text})


class Settings:
    """Base of the dataclasses.

    Raises:
        ValueError: naming the setting, its value and what is allowed. TypeError: a value of another kind.
    """

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = _checked(field.name, hints[field.name], field.metadata, getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """From a config's mapping; ValueError for a name that is no setting."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"unknown settings {unknown}; known are {sorted(known)}")
        return cls(**values)


def _checked(name: str, kind: Any, rule: Mapping[str, Any], value: Any) -> Any:
    """The value as it is kept."""
    if isinstance(kind, types.UnionType):
        if value is None:
            return None
        kind = next(each for each in typing.get_args(kind) if each is not types.NoneType)
    if isinstance(kind, type) and issubclass(kind, Settings):
        return _section(name, kind, value)
    if typing.get_origin(kind) is tuple:
        if isinstance(value, str | Mapping) or not hasattr(value, "__iter__"):
            raise TypeError(f"{name}={value!r}: a list is needed")
        item = typing.get_args(kind)[0]
        return tuple(_checked(f"{name}[{i}]", item, rule, each) for i, each in enumerate(value))
    fits = {int: is_whole, float: is_real}.get(kind, lambda v: type(v) is kind)
    if not fits(value):
        raise TypeError(f"{name}={value!r}: {getattr(kind, '__name__', kind)} is needed")
    if kind in (int, float):
        least, most = rule.get("least", 1), rule.get("most", math.inf)
        if not least <= value <= most:
            raise ValueError(f"{name}={value!r}: a number from {least} to {most} is needed")
        return kind(value)
    if "choices" in rule and value not in rule["choices"]:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(rule['choices'])}")
    return value


def _section(name: str, kind: type[Settings], value: Any) -> Settings:
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}={value!r}: a section of settings is needed")
    try:
        return kind.of(value)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{name}: {error}") from None


def listed(settings: Settings, prefix: str = "") -> str:
    """All settings as lines: dotted name, value, help."""
    lines = []
    for field in dataclasses.fields(settings):
        value, name = getattr(settings, field.name), prefix + field.name
        if isinstance(value, Settings):
            lines.append(f"# {name}: {field.metadata['help']}")
            lines.append(listed(value, f"{name}."))
        else:
            lines.append(f"{name}={value!r}  # {field.metadata['help']}")
    return "\n".join(lines)
