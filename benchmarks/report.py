"""A report of a thousand trials: seconds to read and aggregate them, and for the whole of it with its figures."""

import argparse
import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import run_folders  # noqa: E402

from binmask_dist.report.analysis import analyse  # noqa: E402
from binmask_dist.report.main import ReportOptions, make_report  # noqa: E402
from binmask_dist.report.trials import read_trials  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.trials):
            setting = {"lam": 1e-7 * (1 + number // 5), "seed": number % 5}
            run_folders.write_run(Path(folder) / "trials" / str(number), epochs=options.epochs, **setting)
        files = [path for path in Path(folder).rglob("*.json*")]
        megabytes = sum(path.stat().st_size for path in files) / 1e6
        marks = [(time.perf_counter(), time.process_time())]
        analysis = analyse(read_trials([folder]))
        marks.append((time.perf_counter(), time.process_time()))
        make_report(ReportOptions([folder]))
        marks.append((time.perf_counter(), time.process_time()))
        page = (Path(folder) / "report" / "report.html").stat().st_size / 1e6
        numbers = json.loads((Path(folder) / "report" / "summary.json").read_text())
    count = sum(len(each["trials"]) for each in numbers["problems"][0]["configurations"])
    print(f"{count:,} trials of {len(analysis.problems[0].columns)} configurations, {megabytes:.0f} MB of files")
    for what, (start, end) in zip(("read and aggregated", "the whole report"), pairwise(marks), strict=True):
        print(f"{what}: {end[0] - start[0]:.1f} s, {end[1] - start[1]:.1f} s of one core")
    print(f"the page has {page:.1f} MB")


if __name__ == "__main__":
    main()
