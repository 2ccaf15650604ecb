"""Reads W&B's offline files with its own record format."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32768  # bytes
FILE_HEADER = 7
PART_HEADER = 7


def read_records(folder: Path) -> Iterator[tuple[Path, Any]]:
    """The records of offline W&B files below a folder: a 7-byte header, then LevelDB log blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.rglob("run-*.wandb")):
        for content in read_chunks(path.read_bytes()):
            record = Record()
            record.ParseFromString(content)
            yield path, record


def read_chunks(data: bytes) -> Iterator[bytes]:
    """The contents of a LevelDB log, whose records are divided where a block ends.

    A record's part has a header of seven bytes: checksum [4], length [2], kind (1: whole, 4: its last part)."""
    position = FILE_HEADER
    content = b""
    while position + PART_HEADER <= len(data):
        left_in_block = BLOCK - position % BLOCK
        if left_in_block < PART_HEADER:  # too little for a header: padding
            position += left_in_block
            continue

        length = int.from_bytes(data[position + 4 : position + 6], "little")
        kind = data[position + 6]
        start = position + PART_HEADER
        content += data[start : start + length]
        position = start + length
        if kind in (1, 4):
            yield content
            content = b""


def read_records_of_kind(folder: Path, kind: str) -> list[Any]:
    kinds = [(record, record.WhichOneof("record_type")) for _, record in read_records(folder)]
    return [getattr(record, kind) for record, record_kind in kinds if record_kind == kind]


def pairs(items: Any) -> dict[str, Any]:
    return {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def history(folder: Path) -> list[dict[str, Any]]:
    return [pairs(record.item) for record in read_records_of_kind(folder, "history")]


def summary(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for record in read_records_of_kind(folder, "summary"):
        values.update(pairs(record.update))
    return values


def config(folder: Path) -> dict[str, Any]:
    """The config at the start of a run, with its later changes."""
    values: dict[str, Any] = {}
    for record in read_records_of_kind(folder, "run"):
        values.update(pairs(record.config.update))
    for record in read_records_of_kind(folder, "config"):
        values.update(pairs(record.update))
    return values


def table(folder: Path, name: str) -> list[dict[str, Any]]:
    (path,) = folder.rglob(f"{name}_*.table.json")
    content = json.loads(path.read_text())
    return [dict(zip(content["columns"], line, strict=True)) for line in content["data"]]
