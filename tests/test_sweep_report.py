"""The report command: one report of a made-up sweep, held against numpy and scipy on its raw files."""

import io
import json
import re
import runpy
import shutil
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_folders
from matplotlib.figure import Figure
from matplotlib.image import imread
from scipy import stats
from statsmodels.stats.multitest import multipletests

from binmask_dist.report import figures, tables
from binmask_dist.report.analysis import Analysis, ProblemAnalysis, analyse
from binmask_dist.report.main import main, write_figures
from binmask_dist.report.trials import read_trials

LAMS, SEEDS = (0.0, 1e-6, 4e-6, 1.6e-5), (0, 1, 2, 3)
EVIL = "<script>alert('&')</script> 50%_$#{}~^\\|`*"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods and dense, with four seeds; some other seeds, one seed alone, and what cannot be used."""
    folder = tmp_path_factory.mktemp("sweep")
    run_folders.write_sweep(folder, LAMS, SEEDS)
    run_folders.write_sweep(folder, LAMS[1:], SEEDS, method="probmask")
    run_folders.write_sweep(folder, (2e-5,), SEEDS, method="dense")
    for seed in (10, 11, 12):
        run_folders.write_run(folder / "trials" / f"adam-{seed}", lam=1e-6, seed=seed, optimizer="adamw")
    run_folders.write_run(folder / "trials" / "alone", lam=1e-6, seed=0, optimizer=EVIL, tags=(EVIL,))
    run_folders.write_run(folder / "trials" / "other", model=EVIL, dataset="texts.csv", task="lm", finetune_epochs=0)
    change(folder / "trials" / "other" / "result.json", test_perplexity=12.5, test_accuracy=None, test_loss=None)
    run_folders.write_run(folder / "trials" / "unfinished", seed=20)
    (folder / "trials" / "unfinished" / "result.json").unlink()
    run_folders.write_run(folder / "trials" / f"cut {EVIL.replace('/', '')}", seed=21)
    (folder / "trials" / f"cut {EVIL.replace('/', '')}" / "result.json").write_text('{"sparsity": 0.')
    return folder


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture(scope="module")
def said(sweep: Path) -> str:
    """What the command prints; the report is in the folder from then on."""
    before = sys.argv
    sys.argv = ["binmask_dist.report", str(sweep)]
    try:
        with redirect_stdout(io.StringIO()) as output:
            runpy.run_module("binmask_dist.report", run_name="__main__")
    finally:
        sys.argv = before
    return output.getvalue()


@pytest.fixture(scope="module")
def summary(sweep: Path, said: str) -> dict[str, Any]:
    """Of the problem with the sweep."""
    return json.loads((sweep / "report" / "summary.json").read_text())["problems"][-1]


@pytest.fixture(scope="module")
def analysis(sweep: Path) -> Analysis:
    return analyse(read_trials([str(sweep)]))


@pytest.fixture(scope="module")
def problem(analysis: Analysis) -> ProblemAnalysis:
    return analysis.problems[-1]


def raw(sweep: Path, pattern: str, key: str = "test_accuracy") -> np.ndarray:
    """Straight from the files, in the order of seeds."""
    files = sorted(sweep.glob(f"trials/{pattern}/result.json"))
    assert files
    return np.array([json.loads(file.read_text())[key] for file in files])


def named(cells: list[dict[str, Any]], label: str) -> dict[str, Any]:
    (found,) = (cell for cell in cells if cell["label"] == label)
    return found


# the numbers


def test_every_metric_of_every_configuration_is_that_of_scipy(sweep: Path, summary: dict[str, Any]) -> None:
    assert len(summary["configurations"]) == len(LAMS) + len(LAMS[1:]) + 3
    for lam in LAMS:
        found = named(summary["configurations"], f"binmask, lam {lam:g}, optimizer sgd")
        assert [trial["seed"] for trial in found["trials"]] == list(SEEDS)
        for key in ("test_accuracy", "test_loss", "sparsity", "weights_left", "seconds", "test_examples"):
            values, metric = raw(sweep, f"binmask-{lam:g}-*", key), found["metrics"][key]
            assert (metric["trials"], metric["missing"]) == (4, 0)
            assert metric["mean"] == pytest.approx(values.mean(), rel=1e-12)
            assert metric["std"] == pytest.approx(values.std(ddof=1), abs=1e-12)
            assert (metric["min"], metric["max"]) == (values.min(), values.max())
            half = stats.t.ppf(0.975, 3) * values.std(ddof=1) / 2
            assert (metric["low"], metric["high"]) == pytest.approx((values.mean() - half, values.mean() + half))
        before = [each["test_accuracy"] for each in raw(sweep, f"binmask-{lam:g}-*", "before_finetuning")]
        assert found["metrics"]["before_finetuning.test_accuracy"]["mean"] == pytest.approx(np.mean(before))


def test_comparisons_with_the_best_are_those_of_scipy(sweep: Path, summary: dict[str, Any]) -> None:
    """Paired where seeds match, Welch's otherwise, Holm's correction over the whole table."""
    row = summary["against_best"]["test_accuracy"]
    assert row["reference"] == "dense, optimizer sgd"
    best = raw(sweep, "dense-*")
    for lam in LAMS:
        cell = named(row["cells"], f"binmask, lam {lam:g}, optimizer sgd")
        p = stats.ttest_rel(best, raw(sweep, f"binmask-{lam:g}-*")).pvalue
        assert (cell["against"]["test"], cell["against"]["p"]) == ("paired t-test", pytest.approx(p))
        assert cell["bold"] == (p > 0.3)
    cell = named(row["cells"], "binmask, lam 1e-06, optimizer adamw")
    p = stats.ttest_ind(best, raw(sweep, "adam-*"), equal_var=False).pvalue
    assert (cell["against"]["test"], cell["against"]["p"]) == ("Welch's t-test", pytest.approx(p))
    (alone,) = (cell for cell in row["cells"] if "alert" in cell["label"])
    assert (alone["against"]["p"], alone["p_holm"], alone["bold"]) == (None, None, False)
    assert alone["value"]["low"] is None
    cells = [cell for row in summary["against_best"].values() for cell in row["cells"] if cell["p_holm"] is not None]
    expected = multipletests([cell["against"]["p"] for cell in cells], method="holm")[1]
    assert [cell["p_holm"] for cell in cells] == pytest.approx(list(expected))
    assert len(cells) > 30


def test_comparisons_with_dense_are_a_table_of_their_own(sweep: Path, summary: dict[str, Any]) -> None:
    cells = summary["against_dense"]["cells"]
    tested = [cell for cell in cells if cell["p_holm"] is not None]
    assert len(tested) == len(cells) - 2  # not dense itself, and not the single trial
    expected = multipletests([cell["against"]["p"] for cell in tested], method="holm")[1]
    assert [cell["p_holm"] for cell in tested] == pytest.approx(list(expected))
    cell = named(cells, "probmask, lam 4e-06, optimizer sgd")
    difference = raw(sweep, "probmask-4e-06-*").mean() - raw(sweep, "dense-*").mean()
    assert cell["against"]["difference"] == pytest.approx(difference)


def test_methods_are_compared_at_the_same_sparsity(sweep: Path, summary: dict[str, Any]) -> None:
    def curve(method: str, lams: tuple[float, ...], seed: int) -> float:
        points = [json.loads((sweep / f"trials/{method}-{lam:g}-{seed}/result.json").read_text()) for lam in lams]
        return np.interp(0.9, [each["sparsity"] for each in points], [each["test_accuracy"] for each in points])

    ours = np.array([curve("binmask", LAMS, seed) for seed in SEEDS])
    theirs = np.array([curve("probmask", LAMS[1:], seed) for seed in SEEDS])
    row = summary["matched_sparsity"]["90%"]
    found = named(row["cells"], "binmask, optimizer sgd")["value"]
    assert found["mean"] == pytest.approx(ours.mean())
    expected = stats.t.interval(0.95, 3, loc=ours.mean(), scale=stats.sem(ours))
    assert (found["low"], found["high"]) == pytest.approx(expected)
    other = named(row["cells"], "probmask, optimizer sgd")
    assert row["reference"] == "binmask, optimizer sgd"
    assert other["value"]["mean"] == pytest.approx(theirs.mean())
    assert other["against"]["p"] == pytest.approx(stats.ttest_rel(ours, theirs).pvalue)
    assert named(row["cells"], "binmask, optimizer adamw")["value"] is None  # a single configuration is no curve
    assert named(summary["matched_sparsity"]["80%"]["cells"], "probmask, optimizer sgd")["value"] is None


def test_a_language_model_is_a_problem_of_its_own(sweep: Path, said: str, analysis: Analysis) -> None:
    other = json.loads((sweep / "report" / "summary.json").read_text())["problems"][0]
    assert other["name"].endswith("on texts.csv")
    assert (other["metric"], other["higher_is_better"]) == ("test_perplexity", False)
    metrics = other["configurations"][0]["metrics"]
    assert metrics["test_perplexity"]["mean"] == 12.5
    assert "test_loss" not in metrics  # null in result.json: there is no finite value
    table = tables.result_table(analysis.problems[0])
    assert ["test loss", "-"] in [[entry.text for entry in row] for row in table.rows]
    assert "-: not measured, or finite in no trial." in table.notes
    assert not any(entry.bold for row in table.rows for entry in row)  # there is nothing to be better than


def test_a_metric_that_is_null_in_some_trials_says_so(tmp_path: Path) -> None:
    run_folders.write_sweep(tmp_path, (1e-6,), range(3))
    change(tmp_path / "trials" / "binmask-1e-06-1" / "result.json", test_loss=None)
    (problem,) = analyse(read_trials([str(tmp_path)])).problems
    summary = problem.columns[0].summaries["test_loss"]
    assert (summary.trials, summary.missing) == (2, 1)
    text = tables.markdown(tables.result_table(problem))
    assert "(n = 2)" in text
    assert "n: of the trials, so many have a finite value" in text


def test_the_metric_can_be_chosen_and_a_wrong_one_is_an_error(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trials = read_trials([str(sweep)])
    chosen = analyse(trials, metric="train_loss").problems[-1]
    assert chosen.metric == "train_loss"
    means = [column.mean("train_loss") for column in chosen.columns]
    assert means == sorted(means)  # type: ignore[type-var]
    for wrong in (["--metric", "f1"], ["--sparsities", "[1.5]"]):
        with pytest.raises(SystemExit) as exit:
            main([str(sweep / "trials" / "alone"), *wrong])
        assert exit.value.code == 1
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].startswith("error: test_resnet on digits has no metric 'f1'; there is test_loss, test_accuracy,")
    assert errors[1] == "error: a sparsity is a fraction from 0 to 1, and 1.5 is not"


def test_one_lucky_trial_is_not_the_best_of_many(tmp_path: Path) -> None:
    for seed in range(3):
        run_folders.write_run(tmp_path / f"many-{seed}", lam=1e-3, seed=seed)
    run_folders.write_run(tmp_path / "lucky", lam=1e-9, seed=0)
    (problem,) = analyse(read_trials([str(tmp_path)])).problems
    row = next(row for row in problem.results if row.name == "test_accuracy")
    trials = [cell.value.summary.trials for cell in row.cells if cell.value]
    assert trials == [1, 3]  # sorted by the metric: the one is ahead
    assert row.best == 1 and not row.cells[0].bold


# what is written and said


def test_the_closing_text_says_where_things_are_and_what_was_left_out(sweep: Path, said: str) -> None:
    lines = said.splitlines()
    assert lines[0] == f"37 trials of 11 configurations: {sweep / 'report' / 'report.html'}"
    assert lines[2] == "2 configurations with one trial: no interval, and no test"
    assert lines[3] == "2 left out:"
    assert f"  {sweep / 'trials' / 'unfinished'} is not finished: it has no result.json" in lines
    assert any("result.json cannot be read" in line for line in lines)
    assert len(lines) == 6
    for file in ("tables.md", "report.html", "summary.json"):
        assert "is not finished: it has no result" in (sweep / "report" / file).read_text()


def test_all_files_are_there_and_nothing_half_written(sweep: Path, said: str) -> None:
    files = {str(path.relative_to(sweep / "report")) for path in (sweep / "report").rglob("*") if path.is_file()}
    names = ("metric-over-sparsity", "training", "layers", "churn")
    drawn = {file for file in files if file.startswith("figures/")}
    assert files - drawn == {"report.html", "summary.json", "tables.md", "tables.tex"}
    assert drawn == {
        f"figures/{prefix}-{name}.{kind}"
        for prefix in ("1-script-50-on-texts.csv", "2-test-resnet-on-digits")
        for name in names
        for kind in ("png", "svg")
    }
    for file in drawn:
        path = sweep / "report" / file
        if file.endswith("png"):
            image = imread(path)
            assert image.shape[1] > 700
            assert image.std() > 0.01
        else:
            assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_no_finished_trial_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_folders.write_run(tmp_path / "run") / "result.json").unlink()
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "error: there is no finished trial in" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


# tables


def test_the_table_has_the_layout_of_the_paper(sweep: Path, said: str, problem: ProblemAnalysis) -> None:
    table = tables.result_table(problem)
    means = [raw(sweep, pattern).mean() for pattern in ("dense-*", "binmask-0-*")]
    assert table.head[1:3] == ["dense, optimizer sgd", "binmask, lam 0, optimizer sgd"]
    assert [row[0].text for row in table.rows] == [
        "test accuracy (%)",
        "test loss",
        "test accuracy before fine-tuning (%)",
        "test loss before fine-tuning",
        "train loss",
        "sparsity (%)",
        "weights left",
        "training time (s)",
        "trials",
    ]
    half = stats.t.ppf(0.975, 3) * stats.sem(raw(sweep, "dense-*"))
    assert (table.rows[0][1].text, table.rows[0][1].bold) == (f"{100 * means[0]:.2f} ± {100 * half:.2f}", True)
    (alone,) = (index for index, text in enumerate(table.head) if "alert" in text)
    assert "±" not in table.rows[0][alone].text
    assert any("one trial: there is no interval" in note for note in table.notes)
    markdown = (sweep / "report" / "tables.md").read_text()
    assert f"**{table.rows[0][1].text}**" in markdown
    assert "<script" not in markdown
    for block in markdown.split("\n\n"):
        if block.startswith("|"):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_the_p_values_stand_in_a_table(summary: dict[str, Any], problem: ProblemAnalysis) -> None:
    table = tables.p_value_table(problem)
    entry = table.rows[0][table.head.index("binmask, lam 1e-06, optimizer adamw")]
    cell = named(summary["against_best"]["test_accuracy"]["cells"], "binmask, lam 1e-06, optimizer adamw")
    assert entry.text == f"{tables.p_text(cell['against']['p'])} ({tables.p_text(cell['p_holm'])}) W"
    assert table.rows[0][1].text == "best"
    assert "W: Welch's test, because the seeds differ." in table.notes
    assert "-: a test needs two trials of each." in table.notes


def test_the_latex_is_balanced_and_escaped(sweep: Path, said: str) -> None:
    text = (sweep / "report" / "tables.tex").read_text()
    body = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    stack: list[str] = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", body):
        if kind == "begin":
            stack.append(name)
        else:
            assert stack.pop() == name
    assert not stack
    plain = re.sub(r"\\[&%$#_{}\\]", "", body.replace(r"\\", ""))
    depth = 0
    for character in plain:
        depth += (character == "{") - (character == "}")
        assert depth >= 0
    assert depth == 0
    assert not re.search(r"[%#_~^<>|±]", plain)
    assert plain.count("$") == 2 * plain.count(r"$\pm$")
    tabulars = re.findall(r"\\begin\{tabular\}\{p\{7.5em\}(r+)\}(.*?)\\end\{tabular\}", body, re.DOTALL)
    assert len(tabulars) == body.count(r"\begin{tabular}")
    for tabular in tabulars:
        rows = [line for line in tabular[1].splitlines() if line.endswith(r"\\")]
        assert len(rows) > 1
        assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {len(tabular[0]) + 1}
    assert r"\textbf{" in body
    assert body.count(r"\begin{table}") == body.count(r"\caption{") > 8


DOCUMENT = r"""\documentclass{article}\usepackage[textwidth=400pt]{geometry}
\usepackage{booktabs}\usepackage{threeparttable}
\begin{document}\input{tables.tex}\end{document}"""


def test_the_latex_compiles(sweep: Path, said: str, tmp_path: Path) -> None:
    if not shutil.which("pdflatex"):
        pytest.skip("NOT COMPILED: there is no pdflatex here; apt-get install texlive-latex-extra")
    shutil.copy(sweep / "report" / "tables.tex", tmp_path)
    (tmp_path / "document.tex").write_text(DOCUMENT)
    command = ["pdflatex", "-draftmode", "-halt-on-error", "-interaction=nonstopmode", "document.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.parametrize(("seeds", "text"), [([0, 1, 2, 5], "0-2, 5"), ([3], "3"), ([1, 3], "1, 3")])
def test_seeds_are_told_shortly(seeds: list[int], text: str) -> None:
    assert tables.ranges(seeds) == text


# figures


def test_the_metric_is_drawn_against_the_sparsity_with_intervals(sweep: Path, problem: ProblemAnalysis) -> None:
    figure, caption = figures.draw_metric(problem)
    axes = figure.axes[0]
    drawn = {container.get_label(): container for container in axes.containers}
    labels = [f"{method}, optimizer sgd" for method in ("binmask", "probmask")]
    assert {f"{label}, {when}" for label in labels for when in ("after", "before fine-tuning")} <= drawn.keys()
    line, _, (across, along) = drawn["binmask, optimizer sgd, after"]
    accuracy = [100 * raw(sweep, f"binmask-{lam:g}-*") for lam in LAMS]
    density = [100 - 100 * raw(sweep, f"binmask-{lam:g}-*", "sparsity") for lam in LAMS]
    assert line.get_ydata() == pytest.approx([values.mean() for values in accuracy])
    assert line.get_xdata() == pytest.approx([values.mean() for values in density])
    assert axes.get_xscale() == "log"
    for bars, samples, side in ((along, accuracy, 1), (across, density, 0)):
        halves = [np.ptp(segment[:, side]) / 2 for segment in bars.get_segments()]
        assert halves == pytest.approx([stats.t.ppf(0.975, 3) * stats.sem(values) for values in samples])
    before = raw(sweep, "binmask-1e-06-*", "before_finetuning")
    line, _, _ = drawn["binmask, optimizer sgd, before fine-tuning"]
    assert line.get_ydata()[1] == pytest.approx(np.mean([100 * each["test_accuracy"] for each in before]))
    band = axes.patches[0].get_extents().transformed(axes.transData.inverted())
    dense = 100 * raw(sweep, "dense-*")
    half = stats.t.ppf(0.975, 3) * stats.sem(dense)
    assert (band.y0, band.y1) == pytest.approx((dense.mean() - half, dense.mean() + half))
    assert "before fine-tuning" in caption
    assert "one trial" in caption


def test_training_is_drawn_with_bands_from_min_to_max(sweep: Path, problem: ProblemAnalysis) -> None:
    figure, caption = figures.draw_training(problem)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "Weights left (%)",
        "Held-out loss",
        "Training loss",
    ]
    assert figure.axes[0].get_yscale() == "log"
    for axes, key in zip(figure.axes, ("sparsity", "test_loss", "train_loss"), strict=True):
        (place,) = (i for i, line in enumerate(axes.lines) if line.get_label() == "binmask, lam 1.6e-05, optimizer sgd")
        files = sorted(sweep.glob("trials/binmask-1.6e-05-*/metrics.jsonl"))
        records = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        values = np.array([[each[key] for each in trial if each["kind"] == "epoch"] for trial in records])
        values = 100 * (1 - values) if key == "sparsity" else values
        assert axes.lines[place].get_ydata() == pytest.approx(values.mean(axis=0))
        edges = axes.collections[place].get_paths()[0].vertices[:, 1]
        assert (edges.min(), edges.max()) == pytest.approx((values.min(), values.max()))
    assert "min and max over trials" in caption
    assert "of 10 configurations" in caption


def test_layers_and_churn_are_means_over_trials(sweep: Path, problem: ProblemAnalysis) -> None:
    (configuration,) = (each for each in problem.columns if each.label == "binmask, lam 4e-06, optimizer sgd")
    files = sorted(sweep.glob("trials/binmask-4e-06-*/metrics.jsonl"))
    records = [[json.loads(line) for line in file.read_text().splitlines() if '"epoch", ' in line] for file in files]
    layers, sparsity = figures.layers_over_training(configuration)
    assert layers == list(run_folders.LAYERS)
    expected = np.mean([[list(each["layer_sparsity"].values()) for each in trial] for trial in records], axis=0).T
    assert sparsity == pytest.approx(expected)
    steps, flips = figures.over_training(configuration, "on_to_off")
    assert list(steps) == [each["step"] for each in records[0]]
    assert flips.tolist() == [[each["on_to_off"] for each in trial] for trial in records]
    images = [axes.images[0] for axes in figures.draw_layers(problem)[0].axes if axes.images]
    assert len(images) == 4
    assert all(image.get_clim() == (0, 100) for image in images)
    assert [axes.get_title(loc="left") for axes in figures.draw_churn(problem)[0].axes] == ["On to off", "Off to on"]


def test_colours_of_different_curves_are_never_the_only_difference() -> None:
    kinds = len(figures.COLOURS)
    assert len(set(figures.COLOURS)) == len(set(figures.MARKERS)) == len(set(map(str, figures.LINES))) == kinds
    assert kinds > figures.SELECTED


def test_the_same_figure_is_the_same_file(tmp_path: Path) -> None:
    """So that a report can be kept under version control."""

    def content() -> bytes:
        figure = Figure()
        figure.subplots().fill_between([0, 1], [0, 1], [1, 2])
        ((_, svg),) = write_figures(tmp_path, [figures.Drawing("x", figure, "")], "")
        return svg

    assert content() == content()


# the page


class References(HTMLParser):
    """All that a page could load or lead to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        names = ("src", "href", "srcset", "action", "data", "poster", "background")
        self.found += [value or "" for name, value in attributes if name in names]
        assert not any(name.startswith("on") for name, _ in attributes)


def test_the_page_asks_nobody_and_escapes_everything(sweep: Path, said: str) -> None:
    text = (sweep / "report" / "report.html").read_text()
    page = References()
    page.feed(text)
    assert page.found
    assert all(address.startswith(("data:image/svg+xml;base64,", "#")) for address in page.found)
    assert not {"script", "link", "iframe", "object", "embed"} & set(page.tags)
    assert page.tags.count("img") == 8
    assert not re.search(r"url\(|@import|https?://", text)
    assert "&lt;script&gt;alert(" in text
    assert "Content-Security-Policy" in text


def test_the_page_has_the_configuration_of_each_trial(sweep: Path, said: str) -> None:
    text = (sweep / "report" / "report.html").read_text()
    for file in sweep.glob("trials/binmask-*/config.json"):
        assert f'<code class="soft">{file.parent}</code>' in text
        config = json.loads(file.read_text())
        assert f"&#34;seed&#34;: {config['seed']}" in text
        outcome = json.loads((file.parent / "result.json").read_text())
        outcome_text = (
            f"test accuracy (%) {100 * outcome['test_accuracy']:.2f}, sparsity (%) {100 * outcome['sparsity']:.2f}"
        )
        assert f"<summary>seed {config['seed']}: {outcome_text}" in text
        for key in config.keys() - {"seed"}:
            assert key in text
    assert text.count("<summary>seed ") == 37
    assert "2 of 11 configurations have one trial, and so neither an interval nor a test." in text


MEASURE = """<!doctype html><title>waiting</title><body style="margin:0">
<iframe src="report.html" width="390" height="800"></iframe>
<iframe src="report.html" width="1280" height="800"></iframe>
<script>
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, root = page.documentElement;
    page.querySelectorAll("details").forEach(each => each.open = true);
    const boxes = [...page.querySelectorAll(".scroll")];
    return {
      inner: frame.contentWindow.innerWidth, wide: Math.max(root.scrollWidth, page.body.scrollWidth),
      images: [...page.images].map(image => image.naturalWidth),
      scrolling: boxes.filter(box => box.scrollWidth > box.clientWidth).length,
      small: [...page.querySelectorAll("td, th, p, li, figcaption")].filter(
        each => parseFloat(frame.contentWindow.getComputedStyle(each).fontSize) < 12).length,
    };
  });
  document.title = JSON.stringify(found);
});
</script>"""


@pytest.fixture
def browse(tmp_path: Path) -> Callable[[Path, str], tuple[str, list[str]]]:
    """Opens a page of a folder in a real browser; gives the DOM after loading, and what was asked of the server."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not chromium:
        pytest.skip("NOT LOOKED AT in a browser: there is no chromium here; apt-get install chromium")

    def open_page(folder: Path, name: str) -> tuple[str, list[str]]:
        asked: list[str] = []

        class Handler(SimpleHTTPRequestHandler):
            def log_request(self, *arguments: Any) -> None:
                asked.append(self.path)

            def log_message(self, *arguments: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        options += ["--window-size=1800,900", "--virtual-time-budget=10000", "--dump-dom"]
        address = f"http://127.0.0.1:{server.server_port}/{name}"
        done = subprocess.run([chromium, *options, address], capture_output=True, text=True, timeout=120)
        server.shutdown()
        server.server_close()
        return done.stdout, asked

    return open_page


def test_a_browser_shows_the_page_at_the_widths_of_a_phone_and_a_desk(
    sweep: Path, said: str, browse: Callable[[Path, str], tuple[str, list[str]]], tmp_path: Path
) -> None:
    """In frames, because a window of Chromium is at least 500 pixels wide."""
    folder = tmp_path / "site"
    folder.mkdir()
    shutil.copy(sweep / "report" / "report.html", folder)
    (folder / "measure.html").write_text(MEASURE)
    content, asked = browse(folder, "measure.html")
    (title,) = re.findall(r"<title>(.*?)</title>", content)
    phone, desk = json.loads(title)
    assert (phone["inner"], desk["inner"]) == (390, 1280)
    for seen in (phone, desk):
        assert seen["wide"] <= seen["inner"]  # nothing but the boxes of wide tables scrolls sideways
        assert len(seen["images"]) == 8 and min(seen["images"]) > 300
        assert seen["small"] == 0
    assert phone["scrolling"] > 0
    assert set(asked) <= {"/measure.html", "/report.html", "/favicon.ico"}
