"""Writes the keys of scores.json into docs/files.md, and its JSON schema, from the types in cpt/evaluation.

`python docs/site/scores.py` writes both; tests/test_site.py fails if they are out of date."""

import json
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(DOCS.parent))

from pydantic import TypeAdapter  # noqa: E402
from pydantic.json_schema import GenerateJsonSchema  # noqa: E402

from cpt.evaluation.score_schema import VERSION, find_file_key  # noqa: E402
from cpt.evaluation.scores import Scores  # noqa: E402

PAGE, SCHEMA = DOCS / "files.md", DOCS.parent / "cpt/evaluation/scores.schema.json"
BEGIN, END = "<!-- generated: scores.json -->", "<!-- end: scores.json -->"
SCALARS = {"integer": "integer", "number": "number", "string": "string", "boolean": "true or false"}


class CompactSchema(GenerateJsonSchema):
    """A JSON schema without titles and defaults."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> dict[str, Any]:
        return self.generate_inner(schema["schema"])


def make_json_schema() -> dict[str, Any]:
    """The JSON schema of scores.json, which has every field of Scores."""
    made = TypeAdapter(Scores).json_schema(schema_generator=CompactSchema)
    properties = {}
    for column in fields(Scores):
        properties[find_file_key(column)] = (
            made["properties"][column.name] | column.metadata["key"].annotations
        )
    made["properties"] = properties
    about = {"title": f"scores.json, version {VERSION}", "required": list(properties)}
    return {"$schema": GenerateJsonSchema.schema_dialect} | made | about


def list_keys(
    node: dict[str, Any], defined: dict[str, Any], path: str
) -> Iterator[tuple[str, str, str, str]]:
    """The keys below an object: path, type with shape, unit, content."""
    for name, value in node["properties"].items():
        kind, unit, content, inner = describe(value, defined)
        optional = name not in node.get("required", ())
        yield f"{path}{name}", kind, unit, "optional; " * optional + content
        if inner:
            yield from list_keys(inner, defined, f"{path}{name}.{'*.' * kind.startswith(('{', '['))}")


def describe(node: dict[str, Any], defined: dict[str, Any]) -> tuple[str, str, str, dict[str, Any] | None]:
    """Type with shape, unit, content, and the object that it holds, if any."""
    if "$ref" in node:
        return "object", "", node.get("description", ""), defined[node["$ref"].rpartition("/")[2]]
    if "const" in node:
        return str(node["const"]), "", node["description"], None
    if "anyOf" in node:
        parts = [describe(each, defined) for each in node["anyOf"] if "maxProperties" not in each]
        kinds = sorted((part[0] for part in parts), key=lambda kind: kind.startswith("["))
        kind, inner = " or ".join([*kinds, *["{}"] * (len(parts) < len(node["anyOf"]))]), parts[0][3]
        return kind, node.get("unit", ""), node.get("description", ""), inner
    if node["type"] == "null":
        return "null", "", "", None
    item = node.get("items", node.get("additionalProperties"))
    if node["type"] not in ("array", "object") or not isinstance(item, dict):
        return (
            SCALARS.get(node["type"], node["type"]),
            node.get("unit", ""),
            node.get("description", ""),
            None,
        )
    kind, unit, content, inner = describe(item, defined)
    over = node.get("over", node.get("maxItems", "")) if node["type"] == "array" else node.get("over", "name")
    shape = f"[{over}]" if node["type"] == "array" else f"{{{over}}}"
    kind = kind if kind[0] in "[{" else f" {kind}"
    return shape + kind, node.get("unit") or unit, node.get("description") or content, inner


def page(text: str) -> str:
    """docs/files.md with the table as the types are now."""
    made = make_json_schema()
    rows = ["| key | type | unit | content |", "| :-- | :-- | :-- | :-- |"]
    for path, kind, unit, content in list_keys(made, made["$defs"], ""):
        rows.append(f"| `{path}` | {kind.replace('[', chr(92) + '[')} | {unit} | {content} |")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n" + "\n".join(rows) + f"\n\n{END}{rest.split(END)[1]}"


def schema() -> str:
    return json.dumps(make_json_schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    SCHEMA.write_text(schema(), encoding="utf-8")
