"""A progress bar on a terminal; elsewhere one line per epoch. Only the main process speaks."""

import sys
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm


class Progress:
    def __init__(self, total_epochs: int, steps_per_epoch: int, accelerator: Accelerator, start_step: int = 0) -> None:
        self.total_epochs = total_epochs
        self.speaks = accelerator.is_main_process
        shown = self.speaks and sys.stderr.isatty()
        total = total_epochs * steps_per_epoch
        self.bar = tqdm(total=total, initial=start_step, unit="step", disable=not shown, dynamic_ncols=True)
        self.shown: dict[str, str] = {}

    def step(self, loss: float | None = None) -> None:
        """One optimizer step is done; the loss is shown if it is given."""
        if loss is not None and not self.bar.disable:
            self._show(loss=f"{loss:.4f}")
        self.bar.update()

    def epoch(self, record: dict[str, Any]) -> None:
        place = f"epoch {record['epoch'] + 1:{len(str(self.total_epochs))}}/{self.total_epochs}"
        if record.get("phase", "train") != "train":
            place += f", {record['phase']}"
        name = main_metric(record)
        metric, sparsity = metric_text(name, record[name]), f"{record['sparsity']:.2%}"
        if not self.bar.disable:
            self.bar.set_description(place, refresh=False)
            self._show(**{name.split("_")[1]: metric, "sparsity": sparsity})
            self.bar.refresh()
        elif self.speaks:
            print(
                f"{place}  loss {number_text(record['train_loss'])}  "
                f"{name.replace('_', ' ')} {metric:>7}  sparsity {sparsity:>6}  "
                f"flips {record['on_to_off']:,} off, {record['off_to_on']:,} on",
                flush=True,
            )

    def _show(self, **values: str) -> None:
        self.shown.update(values)
        self.bar.set_postfix(self.shown, refresh=False)

    def close(self) -> None:
        self.bar.close()


def main_metric(record: dict[str, Any]) -> str:
    """The test metric that says most: its key in the record."""
    names = (f"{part}_{metric}" for part in ("test", "validation") for metric in ("accuracy", "perplexity", "loss"))
    return next(name for name in names if name in record)


def metric_text(name: str, value: float | None) -> str:
    """As people write it: accuracy in percent, perplexity with two digits."""
    if value is not None and name.endswith("accuracy"):
        return f"{value:.2%}"
    return number_text(value, digits=2 if name.endswith("perplexity") else 4)


def number_text(value: float | None, digits: int = 4) -> str:
    """None, which stands for NaN in records, is said as such."""
    return "nan" if value is None else f"{value:,.{digits}f}"
