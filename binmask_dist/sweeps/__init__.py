"""Sweeps behind `launch/sweep.py`: W&B's sweep files, run here, without a server."""
