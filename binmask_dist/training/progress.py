"""A progress bar on a terminal; elsewhere one line per epoch. Only the main process speaks."""

import sys
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm


class Progress:
    def __init__(self, epochs: int, steps: int, accelerator: Accelerator) -> None:
        self.epochs = epochs
        self.accelerator = accelerator
        shown = accelerator.is_main_process and sys.stderr.isatty()
        self.bar = tqdm(total=steps, unit="step", disable=not shown)

    def step(self) -> None:
        self.bar.update()

    def epoch(self, record: dict[str, Any]) -> None:
        accuracy, sparsity = f"{record['test_accuracy']:.2%}", f"{record['sparsity']:.2%}"
        if not self.bar.disable:
            self.bar.set_description(f"epoch {record['epoch'] + 1}/{self.epochs}")
            self.bar.set_postfix(loss=f"{record['train_loss']:.3f}", accuracy=accuracy, sparsity=sparsity)
            return
        self.accelerator.print(
            f"epoch {record['epoch'] + 1:3d}/{self.epochs}  loss {record['train_loss']:.4f}  "
            f"test accuracy {accuracy:>7}  sparsity {sparsity:>6}  "
            f"flips {record['on_to_off']:,} off, {record['off_to_on']:,} on",
            flush=True,
        )

    def close(self) -> None:
        self.bar.close()
