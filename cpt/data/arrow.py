"""Arrow streams that are written a record batch at a time and read from any of them on, without mapping the
file into memory: of 2 GB that are read once, a process would seem to hold 2 GB."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

END = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # of a stream


def schema_of(features: dict) -> pa.Schema:
    """The schema of a file that `datasets` reads with these features."""
    from datasets import DatasetInfo, Features
    from datasets.arrow_writer import ArrowWriter

    made = Features(features)
    return made.arrow_schema.with_metadata(ArrowWriter._build_metadata(DatasetInfo(features=made)))


def read_batches(path: Path, position: int = 0) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The record batches of a stream from a position on, each with the position behind it."""
    with pa.OSFile(str(path)) as file:
        schema = pa.ipc.read_schema(file)
        if position:
            file.seek(position)
        while (message := next_message(file)) is not None:
            yield file.tell(), pa.ipc.read_record_batch(message, schema)


def next_message(file: pa.NativeFile) -> pa.Message | None:
    """The next message of a stream; None at its end."""
    try:
        return pa.ipc.read_message(file)
    except EOFError:
        return None
