"""Reads W&B's offline files with its own record format."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def records(folder: Path) -> Iterator[tuple[Path, Any]]:
    """The records of offline W&B files below a folder: a 7-byte header, then LevelDB log blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.rglob("run-*.wandb")):
        data, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):
                record = Record()
                record.ParseFromString(whole)
                whole = b""
                yield path, record


def of_kind(folder: Path, kind: str) -> list[Any]:
    return [getattr(each, kind) for _, each in records(folder) if each.WhichOneof("record_type") == kind]


def pairs(items: Any) -> dict[str, Any]:
    return {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def history(folder: Path) -> list[dict[str, Any]]:
    return [pairs(each.item) for each in of_kind(folder, "history")]


def summary(folder: Path) -> dict[str, Any]:
    return {key: value for each in of_kind(folder, "summary") for key, value in pairs(each.update).items()}


def config(folder: Path) -> dict[str, Any]:
    first = [pairs(each.config.update) for each in of_kind(folder, "run")]
    later = [pairs(each.update) for each in of_kind(folder, "config")]
    return {key: value for each in first + later for key, value in each.items()}


def table(folder: Path, name: str) -> list[dict[str, Any]]:
    (path,) = folder.rglob(f"{name}_*.table.json")
    content = json.loads(path.read_text())
    return [dict(zip(content["columns"], line, strict=True)) for line in content["data"]]
