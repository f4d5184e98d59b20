"""What all tests share: no network, one thread, and a quiet log."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny, and two ranks share two cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

# What starts processes of its own takes longest, and comes first: two workers then end at about the same time.
LONG = ("test_engines", "test_resume", "test_hosts", "test_sweeps", "test_examples", "test_train", "test_zoo")
LONG += ("test_trainer_callback",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nobody is logged in to W&B here, whoever runs the tests; and it reads its settings anew."""
    import wandb

    for key in [key for key in os.environ if key.startswith("WANDB_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    wandb.teardown()
    yield monkeypatch
    wandb.teardown()
