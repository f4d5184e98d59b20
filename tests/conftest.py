"""What all tests share: no network, one thread, and a quiet log."""

import os

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
