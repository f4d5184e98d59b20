"""metrics.jsonl: one JSON object per line. It is the truth about a run; trackers only follow it."""

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from binmask_dist.files import write_atomically

FILE_NAME = "metrics.jsonl"


class MetricsFile:
    """The open file of a run, which goes on from the optimizer step `resume_step`; None: from the start.

    `open_epoch` is the one that has not ended there: a run may be killed after its record and before its checkpoint,
    and the one before that may be of the same step.
    """

    def __init__(self, path: Path, resume_step: int | None, open_epoch: int | None = None) -> None:
        kept = [] if resume_step is None else [record for record in read_records(path) if record["step"] <= resume_step]
        kept = [record for record in kept if (record["kind"], record.get("epoch")) != ("epoch", open_epoch)]
        write_atomically(path, "".join(_line(record) for record in kept))
        self.path = path
        self.kept = kept
        self.file = path.open("a", encoding="utf-8")

    def add(self, record: dict[str, Any]) -> None:
        """Append what `jsonable` has made. It survives the death of this process; an epoch's that of the host, too."""
        self.file.write(_line(record))
        self.file.flush()
        if record["kind"] == "epoch":
            os.fsync(self.file.fileno())

    def close(self) -> None:
        with suppress(OSError):  # of a record that `add` has not got rid of, and has raised for
            self.file.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole records of a metrics.jsonl; none if there is no file. A last line without its end was cut by a kill."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def jsonable(value: Any) -> Any:
    """What JSON can say: NaN and infinities become None, numbers of numpy and torch plain ones, tuples lists."""
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return jsonable(value.item()) if hasattr(value, "item") else value


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
