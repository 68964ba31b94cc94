"""From YAML text and ``key=value`` words to a config.

Everything is merged as plain dictionaries first and validated once, so nothing half valid exists.
"""

from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from study.config.explain import explain
from study.config.schema import Config
from study.errors import UserError


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars (`off` and `no` are words, `1e-3` is a number), duplicate keys refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain value", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} stands twice; allowed is once", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _yaml_1_2(loader: type[yaml.SafeLoader]) -> None:
    import re

    dropped = {
        "tag:yaml.org,2002:bool",
        "tag:yaml.org,2002:float",
        "tag:yaml.org,2002:int",
        "tag:yaml.org,2002:timestamp",
    }
    loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in rules if tag not in dropped]
        for first, rules in loader.yaml_implicit_resolvers.items()
    }
    loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), list("tf"))
    loader.add_implicit_resolver(
        "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789")
    )
    loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(
            r"^[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?$|^[-+]?[0-9]+[eE][-+]?[0-9]+$|^[-+]?\.(?:inf|nan)$"
        ),
        list("-+.0123456789"),
    )


_yaml_1_2(_Loader)


MOST_VALUES = 1_000_000
"""In one document: a hundred times the largest grid."""


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML text.

    Args:
        text: the document.
        source: the file's name, for the error.

    Raises:
        UserError: it is not YAML, or a key stands twice; one line with the source and the line's number.
    """
    try:
        value = yaml.load(text, _Loader)
        _check_size(value)
        return value
    except RecursionError:
        raise UserError(f"{source}: nested too deep; allowed is what a config needs") from None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{source}{line}: {error.problem or 'not YAML'}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{source}: not YAML: {' '.join(str(error).split())}") from None


def _check_size(value: Any) -> None:
    """Aliases of aliases make a few lines as large as one likes, and one inside of what it names has no end."""
    left, count = [value], 0
    while left:
        below = left.pop()
        count += 1
        if count > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES:,} values, with aliases followed")
        if isinstance(below, dict):
            left += below.values()
        elif isinstance(below, list):
            left += below


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file whose top is a mapping; an empty file is an empty mapping.

    Raises:
        UserError: the file cannot be read, is no YAML, or holds something else.
    """
    try:
        value = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"{path}: cannot be read: {reason}") from None
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UserError(f"{path}: holds {_kind(value)}; allowed is a mapping of names to values")
    return cast(dict[str, Any], value)


def _kind(value: object) -> str:
    if isinstance(value, dict):
        return "a key that is no word"
    return "a list" if isinstance(value, list) else "a single value"


def parse_overrides(arguments: Iterable[str]) -> dict[str, Any]:
    """Turn ``["m=0.99", "optimiser.lr=1e-3"]`` into a nested tree; the value is YAML.

    Raises:
        UserError: an argument has no ``=``, an empty key, or a key stands twice.
    """
    tree: dict[str, Any] = {}
    seen: set[str] = set()
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key or not all(key.split(".")):
            raise UserError(f"command line: {argument!r}: allowed is key=value, such as optimiser.lr=0.03")
        if key in seen:
            raise UserError(f"command line: {key} stands twice; allowed is once")
        seen.add(key)
        if not text.strip():
            raise UserError(
                f"command line: {key} = nothing: allowed is a value; {key}=null leaves the choice to the default"
            )
        tree = merge(tree, nest(key, parse_yaml(text, f"command line: {key}")))
    return tree


def nest(key: str, value: Any) -> dict[str, Any]:
    """``nest("a.b", 1)`` is ``{"a": {"b": 1}}``."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return cast(dict[str, Any], value)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The tree ``base`` with the leaves of ``over`` in place of its own; dotted keys in ``over`` are nested first."""
    merged = dict(base)
    for key, value in over.items():
        if "." in key:
            merged = merge(merged, nest(key, value))
            continue
        below = merged.get(key)
        merged[key] = merge(below if isinstance(below, Mapping) else {}, value) if isinstance(value, Mapping) else value
    return merged


def resolve(tree: Mapping[str, Any], source: str) -> Config:
    """Validate a merged tree.

    Args:
        tree: nested plain values, as YAML gives them.
        source: where it came from, for the error: a file's name or ``command line``.

    Raises:
        UserError: an unknown key, a wrong type, a value out of range, or keys that exclude each other.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{source}: {explain(error, tree)}") from None


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted leaves of a nested tree, in its order: ``{"a": {"b": 1}}`` is ``{"a.b": 1}``."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves |= flatten(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
