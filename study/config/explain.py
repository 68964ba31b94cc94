"""A fault of a config in one line: its key, its value, and what is allowed there."""

import difflib
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from study.config.schema import Config, ConflictError, render


def explain(error: ValidationError, tree: Any, model: type[BaseModel] = Config) -> str:
    """One fault of a validation as ``key = value: allowed is …``.

    Args:
        error: what pydantic found.
        tree: what was validated.
        model: what it was validated as.
    """
    faults = error.errors(include_url=False)
    keys = [_key(fault["loc"], tree, fault["type"] == "missing") for fault in faults]
    # Where one of several kinds would do, each has its fault, and the one that fits best leads the deepest.
    key = max((key for key in keys if key[:1] == keys[0][:1]), key=len)
    same = [fault for fault, its in zip(faults, keys, strict=True) if its == key]
    fault = same[0]
    if isinstance(conflict := fault.get("ctx", {}).get("error"), ConflictError):
        return str(conflict)
    name = ".".join(str(part) if str(part).isprintable() else repr(part) for part in key)
    if fault["type"] == "extra_forbidden":
        known = [name for kind in _kinds_at(model, key[:-1])[1] if _is_model(kind) for name in kind.model_fields]
        close = difflib.get_close_matches(str(key[-1]), known, 1)
        meant = f"; did you mean {close[0]}?" if close else ""
        return f"{name} = {render(fault['input'])}: unknown key; allowed is {', '.join(known)}{meant}"
    if fault["type"] == "missing":
        return f"{name} is missing: allowed is {_wanted(_kinds_at(model, key)[1])}"
    allowed = dict.fromkeys(_allowed(fault["type"], fault["msg"], fault.get("ctx", {}), model, key) for fault in same)
    return f"{name} = {render(fault['input'])}: allowed is {' or '.join(allowed)}"


Key = tuple[int | str, ...]


def _key(location: Key, tree: Any, missing: bool) -> Key:
    """The part of pydantic's location that leads into the tree: it also names the kinds that it tried."""
    key: Key = ()
    for part in location:
        is_key = part in tree if isinstance(tree, Mapping) else isinstance(tree, list) and part in range(len(tree))
        if is_key:
            key, tree = (*key, part), tree[part]
    return (*key, location[-1]) if missing else key


def _kinds_at(model: type[BaseModel], key: Key) -> tuple[FieldInfo | None, list[Any]]:
    """The last field on the way to a key, and the types that may stand there."""
    field: FieldInfo | None = None
    here: list[Any] = [model]
    for part in key:
        below = []
        for kind in here:
            if _is_model(kind):
                if found := kind.model_fields.get(str(part)):
                    field = found
                    below.append(found.annotation)
            elif arguments := get_args(kind):
                below.append(arguments[-1])  # of a mapping the values, of a list the items
        here = [kind for union in below for kind in _members(union)]
    return field, here


def _members(kind: Any) -> list[Any]:
    """The types of a union, whatever is annotated to them."""
    if get_origin(kind) is Annotated:
        return _members(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [member for each in get_args(kind) for member in _members(each)]
    return [kind]


def _is_model(kind: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _wanted(kinds: list[Any]) -> str:
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}
    words |= {dict: "a mapping of names to values"}
    said = []
    for kind in kinds:
        if _is_model(kind):
            said.append(f"a mapping with {', '.join(kind.model_fields)}")
        elif get_origin(kind) is Literal:
            said.append(", ".join(map(str, get_args(kind))))
        else:
            said.append(words.get(get_origin(kind) or kind, "a value"))
    return " or ".join(dict.fromkeys(said))


def _allowed(kind: str, message: str, context: Mapping[str, Any], model: type[BaseModel], key: Key) -> str:
    """What pydantic asks for, in words that follow ``allowed is``."""
    if kind in ("model_type", "model_attributes_type"):
        return _wanted([kind for kind in _kinds_at(model, key)[1] if _is_model(kind)] or [dict])
    if kind == "dict_type":
        return _wanted([dict])
    if kind in ("list_type", "tuple_type"):
        return _wanted([list])
    if kind == "too_short":
        return f"{context['min_length']} or more"
    if kind == "string_pattern_mismatch":
        field, _ = _kinds_at(model, key)
        examples = field.examples if field and field.examples else []
        return f"text such as {' or '.join(examples)}" if examples else f"text that matches {context['pattern']}"
    return message.removeprefix("Input should be ").removeprefix("Value error, ")
