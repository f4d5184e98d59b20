"""Files that are either the old one or the new one, never half of it."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary path to write to, which takes the place of `path` when the block ends without an error.

    It lies in the same folder, because a rename is atomic only within one file system, and it keeps the suffix,
    by which writers such as matplotlib choose their format.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # some writers, safetensors among them, make files that only their owner may read
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())  # a rename may reach the disk before the data does
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write the whole file, or leave what was there."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
