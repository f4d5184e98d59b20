"""What processes tell each other while they train; on two of them in test_resume and test_train."""

import os
import signal

import pytest
import torch

from binmask_dist.training import interruption
from binmask_dist.training.interruption import Interruption

GOOD, BAD = torch.tensor(False), torch.tensor(True)


@pytest.fixture
def asking_rarely(monkeypatch):
    """An interruption that has been asked once, and will be again after 100 steps."""
    monkeypatch.setattr(interruption, "SECONDS", 1e9)
    asked = Interruption(torch.device("cpu"))
    with asked:
        assert asked.agree(0, GOOD, now=False) == (0, None)
        yield asked


def test_a_signal_and_the_first_bad_loss_wait_for_the_next_question(asking_rarely):
    os.kill(os.getpid(), signal.SIGTERM)
    answers = [asking_rarely.agree(step, BAD if step in (30, 40) else GOOD, now=False) for step in range(1, 101)]
    assert answers == [(0, None)] * 99 + [(signal.SIGTERM, 30)]
    assert asking_rarely.agree(101, GOOD, now=True) == (signal.SIGTERM, None)


def test_what_is_asked_now_is_answered_now(asking_rarely):
    assert asking_rarely.agree(1, BAD, now=False) == (0, None)
    assert asking_rarely.agree(2, GOOD, now=True) == (0, 1)


def test_slow_steps_are_all_asked_after(monkeypatch):
    monkeypatch.setattr(interruption, "SECONDS", 0.0)
    asked = Interruption(torch.device("cpu"))
    assert [asked.agree(step, BAD, now=False) for step in range(3)] == [(0, 0), (0, 1), (0, 2)]
