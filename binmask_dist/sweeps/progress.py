"""One view of the whole sweep: a bar on a terminal, elsewhere one line for each trial that ends."""

import sys
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from statistics import fmean

from tqdm import tqdm


def seconds_left(durations: Sequence[float], elapsed: Sequence[float], waiting: int) -> float | None:
    """From how long finished trials took, and how long those at work have taken; None if nothing is known yet."""
    if not durations or not elapsed:
        return None
    typical = fmean(durations)
    rest = [max(0.0, typical - seconds) for seconds in elapsed]
    return max((typical * waiting + sum(rest)) / len(elapsed), *rest)


class Progress:
    def __init__(self, name: str, total: int) -> None:
        self.total = total
        # its own guess of the time left would take the first trial after a restart for all before it
        layout = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
        self.bar = tqdm(total=total, desc=name, bar_format=layout, disable=not sys.stderr.isatty(), dynamic_ncols=True)

    def show(self, counts: Counter[str], left: float | None) -> None:
        """How many trials have which status, and the seconds left."""
        if self.bar.disable:
            return
        self.bar.n = counts["finished"]
        self.bar.set_postfix_str(", ".join(_rest(counts, left)))

    def event(self, text: str, counts: Counter[str], left: float | None) -> None:
        """A trial has ended."""
        if self.bar.disable:
            place = f"{counts['finished']}/{self.total}"
            print(f"{place} finished, {', '.join(_rest(counts, left))}: {text}", flush=True)
        else:
            self.bar.write(text)
            self.show(counts, left)

    def say(self, text: str) -> None:
        self.bar.write(text, file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        self.bar.close()


def _rest(counts: Counter[str], left: float | None) -> list[str]:
    waiting = counts["waiting"] + counts["interrupted"]
    parts = [f"{counts['running']} running", f"{counts['failed']} failed", f"{waiting} left"]
    return [*parts, f"about {duration(left)} to go"] if left is not None else parts


def duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
