"""What all tests share: no network, one thread, and a quiet log."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny, and two ranks share two cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
