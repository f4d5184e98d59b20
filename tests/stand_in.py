"""Takes the place of launch/train.py or another program where a test is about the sweep: does what lr and seed say."""

import os
import signal
import sys
import time
from pathlib import Path

FAILING_SEED = 7  # until there is a file `mended` in the sweep folder

if __name__ == "__main__":
    told = dict(word[2:].split("=", 1) for word in sys.argv[1:])
    folder = Path(told["folder"]) if "folder" in told else Path(told["run_root"]) / told["name"]
    with (folder / "starts").open("a") as file:
        print(os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES"), file=file)
    if int(told["seed"]) == FAILING_SEED and not (folder.parent.parent / "mended").exists():
        print("error: seven is not a good seed")
        sys.exit(3)
    time.sleep(float(told["lr"]))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # between the two lines it would look as if it had ended twice
    with (folder / "ends").open("a") as file:
        print(os.getpid(), file=file)
    (folder / "result.json").write_text("{}")
