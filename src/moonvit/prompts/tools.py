"""Tool declarations as Kimi-K2.5 reads them: TypeScript types, or compact JSON where a schema has no such form.

The model was trained on text of exactly this shape, oddities included: ``None`` and ``True`` in enumerations stand as
Python writes them, and a definition that is no object still becomes an ``interface``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from moonvit.errors import PromptError

INDENT = "  "
_NAMES = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
"""Types of a list of types."""
_CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
"""What is said about a type beside its description, in the order it is said."""
_PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}


class _NoTypeError(Exception):
    """A schema that the TypeScript form cannot say."""


def declare(tools: Sequence[Mapping[str, Any]]) -> str:
    """Write the declaration of some tools.

    Args:
        tools: Tools in the OpenAI shape, ``{"type": "function", "function": {...}}``.

    Returns:
        TypeScript text; for tools that it cannot say, all of them as compact JSON with sorted keys.

    Raises:
        PromptError: If the tools are no JSON at all, or are nested too deeply.
    """
    try:
        ordered = [_sorted(tool) for tool in tools]
        try:
            functions = [_Function(tool["function"]).text() for tool in ordered if tool.get("type") == "function"]
        except (_NoTypeError, AttributeError, KeyError, TypeError):
            functions = []
        if functions and len(functions) == len(ordered):
            return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(functions) + "\n}\n"
        return json.dumps(ordered, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise PromptError("the schemas of the tools are nested too deeply", param="tools") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise PromptError(f"the tools are not JSON objects: {error}", param="tools") from None


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_sorted(item) for item in value]
    return value


def _lines(text: str, indent: str) -> str:
    return "".join((f"{indent}// {line}" if line else "") + "\n" for line in text.split("\n"))


class _Function:
    """One function; collects the definitions its schema names."""

    def __init__(self, function: Mapping[str, Any]) -> None:
        self._name = function.get("name", "function")
        self._description = function.get("description") or ""
        self._parameters = function.get("parameters") or {}
        self._definitions: dict[str, Any] = {}
        self._names_itself = False

    def text(self) -> str:
        """The function and its definitions, without a line break at the end."""
        argument = self._object(self._parameters, "")
        interfaces = ""
        if self._names_itself:
            argument = "parameters"
            fields = ",\n".join(self._fields(self._parameters, INDENT, required_first=False))
            interfaces += f"interface parameters {{\n{fields}\n}}\n" if fields else "interface parameters {}\n"
        for name, schema in list(self._definitions.items()):
            description = schema.get("description")
            interfaces += _lines(description, "") if description else ""
            interfaces += f"interface {name} {self._type(schema, '')}\n"
        description = _lines(self._description, "") if self._description else ""
        return f"{interfaces}{description}type {self._name} = (_: {argument}) => any;"

    def _type(self, schema: Any, indent: str) -> str:
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self._type(choice, indent) for choice in schema["anyOf"])
        if "enum" in schema:
            return self._choices(schema)
        if not schema:
            return "any"
        if "type" not in schema:
            raise _NoTypeError
        kind = schema["type"]
        if isinstance(kind, list):
            return " | ".join(_NAMES[one] for one in kind)
        if kind == "object":
            return self._object(schema, indent)
        if kind == "array":
            return self._array(schema, indent)
        return "number" if kind == "integer" else str(kind)

    def _reference(self, reference: str) -> str:
        if reference == "#":
            self._names_itself = True
            return "parameters"
        name = reference.rsplit("/", 1)[-1]
        if not reference.startswith("#/$defs/") or name not in self._definitions:
            raise _NoTypeError
        return name

    @staticmethod
    def _choices(schema: Mapping[str, Any]) -> str:
        kind = schema.get("type")
        if isinstance(kind, list):
            kinds = [one for one in kind if one != "null"] or ["null"]
            if len(kind) > 2 or len(kinds) > 1:
                raise _NoTypeError
            kind = kinds[0]
        expected = _PYTHON_TYPES.get(kind or "", object)
        if not all(value is None or isinstance(value, expected) for value in schema["enum"]):
            raise _NoTypeError
        return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])

    def _object(self, schema: Mapping[str, Any], indent: str) -> str:
        self._definitions.update(schema.get("$defs") or {})
        inner = indent + INDENT
        fields = self._fields(schema, inner, required_first=True)
        others = schema.get("additionalProperties")
        if isinstance(others, bool):
            fields.append(f"{inner}[k: string]: {'any' if others else 'never'}")
        elif others is not None:
            fields.append(f"{inner}[k: string]: {self._type(others, inner)}")
        if not fields:
            return "{}"
        return "{\n" + ",\n".join(fields) + "\n" + indent + "}"

    def _fields(self, schema: Mapping[str, Any], indent: str, *, required_first: bool) -> list[str]:
        properties = schema.get("properties") or {}
        required = set(schema.get("required") or ())
        names = sorted(properties, key=lambda name: (required_first and name not in required, name))
        fields = []
        for name in names:
            inner = properties[name]
            comments = self._comments(inner, indent)
            default = inner.get("default") if isinstance(inner, Mapping) else None
            if default is not None:
                plain = isinstance(default, (bool, int, float))
                shown = repr(default) if plain else json.dumps(default, ensure_ascii=False)
                comments += f"{indent}// Default: {shown}\n"
            mark = "" if name in required else "?"
            fields.append(f"{comments}{indent}{name}{mark}: {self._type(inner, indent)}")
        return fields

    def _array(self, schema: Mapping[str, Any], indent: str) -> str:
        item = schema.get("items")
        if not item:
            return "Array<any>"
        inner = indent + INDENT
        comments = self._comments(item, inner)
        if comments:
            return f"Array<\n{comments}{inner}{self._type(item, inner)}\n{indent}>"
        return f"Array<{self._type(item, indent)}>"

    @staticmethod
    def _comments(schema: Any, indent: str) -> str:
        if isinstance(schema, bool):
            return ""
        comments = ""
        if schema.get("description"):
            comments += _lines(schema["description"], indent)
        kind = schema.get("type")
        named = isinstance(kind, str) and not any(key in schema for key in ("$ref", "anyOf", "enum"))
        limits = [key for key in _CONSTRAINTS.get(kind, ()) if key in schema] if named else []
        if limits:
            comments += f"{indent}// {', '.join(f'{key}: {schema[key]}' for key in limits)}\n"
        return comments
