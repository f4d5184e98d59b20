"""Scripts for two ranks, and how tests start them."""

import os
import subprocess
import sys
from pathlib import Path


def run_two_ranks(script: str, folder: Path) -> None:
    """Run a script of this folder under torchrun, with a folder for its results."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run = subprocess.run(
        [*command, str(Path(__file__).parent / script), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-6000:]
