"""Trials in one file, to be published or kept: a zip of what a report reads of their run folders.

Unpacked into the folder that it was made from, it is a sweep that goes on with the trials that are not finished.
"""

import json
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from binmask_dist.files import replacing
from binmask_dist.report.trials import Trials
from binmask_dist.training.metrics_file import FILE_NAME
from binmask_dist.training.tasks.base import RunError

WHOLE_FILES = ("config.json", "environment.json", "result.json", "trial.json")
LARGE = "latent_histogram"  # most of an epoch's record


def pack(trials: Trials, roots: Sequence[str], file: Path) -> int:
    """Write the trials that are used, each under its place below one of the folders. Returns how many."""
    places: dict[Path, Path] = {}  # in the archive: the run folder
    for trial in trials.used:
        folder = Path(trial.source)
        root = next((Path(root).resolve() for root in roots if folder.is_relative_to(Path(root).resolve())), None)
        if root is None:
            raise RunError(f"{trial.source} is in none of the folders; an archive is made of run folders alone")
        place = folder.relative_to(root) if folder != root else Path(folder.name)
        if place in places:
            raise RunError(f"{folder} and {places[place]} have the same place; give the folder that holds both")
        places[place] = folder
    with packing(file) as packed:
        for place, folder in places.items():
            for name in WHOLE_FILES:
                if (folder / name).exists():
                    packed.write(folder / name, place / name)
            if (folder / FILE_NAME).exists():
                packed.writestr(str(place / FILE_NAME), _epochs(folder / FILE_NAME))
    return len(places)


@contextmanager
def packing(file: Path) -> Iterator[zipfile.ZipFile]:
    """An archive to write to, which is there when the block ends without an error."""
    with replacing(file) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        yield packed


def _epochs(path: Path) -> str:
    records = [record for record in map(json.loads, path.read_text().splitlines()) if record.get("kind") == "epoch"]
    small = [{key: value for key, value in record.items() if key != LARGE} for record in records]
    return "".join(json.dumps(record) + "\n" for record in small)


@cache
def unpacked(file: Path) -> Path:
    """A folder with the content, which lasts as long as this process."""
    folder = tempfile.TemporaryDirectory(prefix="binmask_dist-")
    _kept.append(folder)
    with zipfile.ZipFile(file) as packed:
        packed.extractall(folder.name)
    return Path(folder.name)


_kept: list[tempfile.TemporaryDirectory] = []
