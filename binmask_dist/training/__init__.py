"""The training job behind `launch/train.py`."""
