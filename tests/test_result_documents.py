"""benchmarks/sparsification.py and regularisation.py on made-up runs: figures against numpy and scipy on the raw files,
and verdicts that turn when the data do."""

import gc
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import run_folders
from matplotlib.image import imread
from scipy import stats

from binmask_dist.report import figures, tables

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SEEDS = (0, 1, 2)
LEVELS = {1e-6: 0.70, 1e-5: 0.90, 1e-4: 0.98}
RIVALS = ("probmask", "magnitude", "rigl")


@pytest.fixture(scope="module")
def documents() -> Iterator[SimpleNamespace]:
    sys.path.insert(0, str(BENCHMARKS))
    import methods
    import regularisation
    import sparsification
    import sparsification_findings

    gc.freeze()  # statsmodels collects garbage at every call, which takes long where torch is loaded
    yield SimpleNamespace(
        sparsification=sparsification, regularisation=regularisation, bars=sparsification_findings, methods=methods
    )
    gc.unfreeze()
    sys.path.remove(str(BENCHMARKS))


def change(folder: Path, **values: Any) -> None:
    path = folder / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def noise(*key: int) -> float:
    return float(np.random.default_rng(key).normal(0, 0.002))


# sparsification


def write_sparsify(
    folder: Path, drop: float = 0.004, rivals: float = -0.02, dense: float = 0.001, seeds: tuple[int, ...] = SEEDS
) -> Path:
    """`drop`: of BinMask before fine-tuning; `rivals`: theirs less BinMask's; `dense`: dense's less BinMask's."""

    def write(
        number: int, method: str, seed: int, sparsity: float, accuracy: float, before: float, **more: Any
    ) -> None:
        run = folder / method / "trials" / f"{number}-{seed}"
        run_folders.write_run(run, epochs=4, method=method, seed=seed, dataset="data/pictures.parquet", **more)
        accuracy += noise(1, seed) + noise(number, seed, len(method)) / 4
        early = {"test_accuracy": accuracy - before + noise(2, number, seed), "test_loss": 1.0 + noise(3, number, seed)}
        own = early["test_accuracy"] + 0.15 * (method == "probmask") + noise(6, number, seed)
        early["batch_statistics"] = {"test_accuracy": own}
        change(run, sparsity=sparsity, test_accuracy=accuracy, before_finetuning=early, seconds=1800.0)
        place = {"python": "3.11.7", "platform": "Linux-x86_64-some", "cpus": 2, "gpus": [], "git_commit": "abcdef012"}
        (run / "environment.json").write_text(json.dumps([{**place, "versions": {"torch": "2.15.0"}}]))

    for seed in seeds:
        write(0, "dense", seed, 0.0, 0.66 + dense, 0.004, lam=0.0)
        for number, (lam, sparsity) in enumerate(LEVELS.items(), 1):
            write(number, "binmask", seed, sparsity + noise(4, seed) / 50, 0.66, drop, lam=lam)
            for method in RIVALS if number > 1 else ():
                early = 0.16 if method == "probmask" else 0.004
                write(number, method, seed, sparsity, 0.66 + rivals, early, target_sparsity=sparsity)
    return folder


def raw(folder: Path, get: Callable[[dict], float], **wanted: Any) -> np.ndarray:
    """From result.json of all runs whose configuration has these, in the order of their seeds."""
    found = {}
    for path in folder.rglob("config.json"):
        config = json.loads(path.read_text())
        if all(config.get(key) == value for key, value in wanted.items()):
            found[config["seed"]] = get(json.loads((path.parent / "result.json").read_text()))
    return np.array([found[seed] for seed in sorted(found)])


def after(result: dict) -> float:
    return 100 * result["test_accuracy"]


def before(result: dict) -> float:
    return 100 * result["before_finetuning"]["test_accuracy"]


def batch(result: dict) -> float:
    return 100 * result["before_finetuning"]["batch_statistics"]["test_accuracy"]


def with_interval(values: np.ndarray, digits: int = 2, form: str = "{} ± {}") -> str:
    low, high = stats.t.interval(0.95, len(values) - 1, values.mean(), stats.sem(values))
    return form.format(f"{values.mean():.{digits}f}", f"{(high - low) / 2:.{digits}f}")


def difference(values: np.ndarray, digits: int = 2) -> str:
    low, high = stats.t.interval(0.95, len(values) - 1, values.mean(), stats.sem(values))
    return f"{values.mean():+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


@pytest.fixture(scope="module")
def sparsify(tmp_path_factory: pytest.TempPathFactory, documents: SimpleNamespace) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("sparsify")
    runs = write_sparsify(folder / "runs")
    measured = iter((2.0, 2.2, 4.4, 2.0, 2.1, 4.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents.methods, "seconds_per_epoch", lambda *_: next(measured))
        variants = ["--rounds", "2", "--variants", "binmask", "probmask, 2 masks"]
        patch.setattr(sys, "argv", ["methods.py", *variants, "--out", str(folder / "times.json")])
        documents.methods.main()
    tuning = run_folders.write_run(folder / "tuning" / "a", method="probmask", mask_lr=0.02, target_sparsity=0.9)
    change(tuning, test_accuracy=0.5432, sparsity=0.9, before_finetuning={"test_accuracy": 0.5111})
    document = folder / "docs" / "document.md"
    arguments = [str(runs), "--tuning", str(folder / "tuning"), "--document", str(document)]
    times = ["--times", str(folder / "times.json")]
    documents.sparsification.main(arguments)
    without_times = document.read_text()
    documents.sparsification.main([*times, "--document", str(document)])
    added = document.read_text()
    documents.sparsification.main([*arguments, *times])
    return SimpleNamespace(
        without_times=without_times,
        added=added,
        runs=runs,
        document=document,
        text=document.read_text(),
        study=study(documents, runs),
    )


def test_accuracies_are_those_of_the_raw_files(sparsify: SimpleNamespace) -> None:
    rows = [line for line in sparsify.text.splitlines() if line.endswith("| 3 |")]
    assert [row.split(" | ")[0] for row in rows] == [
        "| dense",
        "| BinMask",
        *["| BinMask", "| magnitude", "| ProbMask", "| RigL"] * 2,
    ]
    for lam in LEVELS:
        cells = [with_interval(raw(sparsify.runs, get, method="binmask", lam=lam)) for get in (before, batch, after)]
        sparsity = with_interval(raw(sparsify.runs, lambda result: 100 * result["sparsity"], method="binmask", lam=lam))
        assert f"| BinMask | lam {lam:g} | {sparsity} | {' | '.join(cells)} | 3 |" in rows
    cells = [with_interval(raw(sparsify.runs, get, method="dense")) for get in (before, batch, after)]
    assert f"| dense | - | 0.00 ± 0.00 | {' | '.join(cells)} | 3 |" in rows


def test_the_drop_of_probmask_and_what_batches_do_to_it(sparsify: SimpleNamespace) -> None:
    gains = []
    for sparsity in (0.90, 0.98):
        own = {
            get: raw(sparsify.runs, get, method="probmask", target_sparsity=sparsity) for get in (before, batch, after)
        }
        cells = [difference(own[get] - own[before]) for get in (after, batch)]
        assert f"| ProbMask | {100 * sparsity:.2f} | {' | '.join(cells)} |" in sparsify.text
        gains.append((own[batch] - own[before]).mean())
    prose = " ".join(sparsify.text.split())
    assert f"{np.mean(gains):+.2f} in the mean over its sparsities, which is within the paper's 12.9 to 17.8" in prose
    assert "significantly improve ProbMask's accuracy before fine-tuning | shown | they add" in sparsify.text
    assert f"| by 12.9 to 17.8 points | shown | {np.mean(gains):+.2f} in the mean |" in sparsify.text
    assert "| ProbMask is significantly worse without fine-tuning | shown |" in sparsify.text


def test_the_document_says_what_was_run_and_nothing_of_the_machine_s_folders(sparsify: SimpleNamespace) -> None:
    prose = " ".join(sparsify.text.split())
    assert "**scaled down**" in prose and "| 300 epochs: 15,000,000 images |" in prose
    config = json.loads(next(sparsify.runs.rglob("config.json")).read_text())
    steps, size = 4 * run_folders.STEPS_PER_EPOCH, config["batch_size"]
    assert f"{steps} steps of {size}: {steps * size:,} images, {steps * size / 15e6:.2%} of the paper's" in prose
    trials = len(list(sparsify.runs.rglob("result.json")))
    assert f"{trials} trials, {trials / 2:.2f} hours one after the other; x86_64 with 2 cores, no GPU;" in prose
    assert "Python 3.11.7, torch 2.15.0; commit abcdef0." in prose
    assert (
        "| ProbMask | 0.02 to 0.0001 | 90.00 | 51.11 | 54.32 |" in prose
        and "20% of the training images, held out" in prose
    )
    assert str(sparsify.runs.parent) not in sparsify.text and "/tmp" not in sparsify.text
    assert "Partial" not in prose
    image = imread(sparsify.document.with_suffix(".png"))
    assert image.shape[1] > image.shape[0] > 400 and f"({sparsify.document.stem}.png)" in sparsify.text


def test_times_can_be_put_into_the_document_that_is_there(sparsify: SimpleNamespace) -> None:
    assert (
        "Not measured" in sparsify.without_times and sparsify.without_times.count("| cannot say | not measured |") == 2
    )
    assert sparsify.added == sparsify.text


def test_times_stand_beside_the_paper_s(sparsify: SimpleNamespace) -> None:
    assert re.search(
        r"cores, torch [\d.]+.*; test_resnet, 32 px, 20 steps of 64, 2 rounds\.", " ".join(sparsify.text.split())
    )
    assert "| binmask | 2.15 | 1.075 (1.050 to 1.100) | 1.000 | 1.034 and 1.110 times dense |" in sparsify.text
    assert "| probmask, 2 masks | 4.20 | 2.100 (2.000 to 2.200) | 1.952 | 1.4 and 1.9 times BinMask |" in sparsify.text
    told = r"times as long as dense \| cannot say \| test\\_resnet: 1.075 \(1.050 to 1.100\); wide\\_resnet32: not"
    assert re.search(told, sparsify.text)
    assert re.search(r"times as long as BinMask \| cannot say \| test\\_resnet, two masks: 1.952", sparsify.text)


@pytest.mark.parametrize(
    ("resnet", "vgg", "verdicts"),
    [
        ([1.02, 1.03, 1.033], [1.0, 1.1, 1.11], [True, True]),
        ([1.04, 1.05, 1.06], [1.0, 1.1, 1.11], [False, True]),  # above the paper's in every round
        ([1.02, 1.03, 1.05], [1.0, 1.1, 1.11], [None, True]),
        ([1.02, 1.03, 1.033], None, [None, None]),
    ],
)
def test_times_are_held_against_the_paper_s_on_its_own_networks(documents, resnet, vgg, verdicts) -> None:
    ratios = {"wide_resnet32": resnet, "vgg19_bn_32px": vgg, "test_resnet": [9.0, 9.0, 9.0]}
    times = [
        {
            "model": model,
            "rows": {"binmask": {"over_dense": each}, "probmask, 2 masks": {"over_binmask": [2.0, 2.0, 2.0]}},
        }
        for model, each in ratios.items()
        if each
    ]
    assert [finding.holds for finding in documents.bars.time_claims(times)] == verdicts


def study(documents: SimpleNamespace, runs: Path) -> Any:
    problems = documents.sparsification.analyse(documents.sparsification.finished([str(runs)]), "accuracy").problems
    return documents.bars.Study.of(problems)


def test_bars_turn_when_the_data_do(documents: SimpleNamespace, sparsify: SimpleNamespace, tmp_path: Path) -> None:
    good = documents.bars.bars(sparsify.study)
    assert [bar.verdict for bar in good] == ["met"] * 3
    assert sparsify.text.count("**met**") == 3
    runs = write_sparsify(tmp_path, drop=0.03, rivals=0.05, dense=0.04)
    worse = study(documents, runs)
    bad = documents.bars.bars(worse)

    ours = {lam: raw(runs, after, method="binmask", lam=lam) for lam in LEVELS}
    drops = [abs((ours[lam] - raw(runs, before, method="binmask", lam=lam)).mean()) for lam in LEVELS]
    assert bad[0].verdict == f"missed by {max(drops) - 1:.2f} points"

    missed = []
    for lam, sparsity in list(LEVELS.items())[-2:]:
        for method in RIVALS:
            theirs = raw(runs, after, method=method, target_sparsity=sparsity)
            missed.append(-stats.ttest_rel(ours[lam], theirs).confidence_interval(0.95).high)
    assert bad[1].verdict == f"missed by {max(missed):.2f} points" and len(bad[1].numbers) == 6

    dense = raw(runs, after, method="dense")
    room = stats.t.ppf(0.975, 2) * stats.sem(dense)
    short = [dense.mean() - ours[lam].mean() - room for lam in list(LEVELS)[1:]]  # 90% or more
    assert bad[2].verdict == f"missed by {min(short):.2f} points"

    claims = {found.question: found.holds for found in documents.bars.claims(worse, None)}
    assert [holds for question, holds in claims.items() if "BinMask is better than ProbMask" in question] == [False]
    assert [holds for question, holds in claims.items() if "does not differ" in question] == [False]
    assert [holds for question, holds in claims.items() if "CIFAR-100" in question] == [None]


def test_a_difference_within_the_interval_is_enough(documents: SimpleNamespace, tmp_path: Path) -> None:
    runs = write_sparsify(tmp_path, rivals=-0.0003)
    _, ahead, _ = documents.bars.bars(study(documents, runs))
    assert ahead.met and any(" -0.0" in text for text in ahead.numbers)


def test_one_seed_is_marked_and_shows_little(documents: SimpleNamespace, tmp_path: Path, capsys: Any) -> None:
    runs = write_sparsify(tmp_path / "runs", seeds=(5,), rivals=0.01)
    (next((runs / "rigl").rglob("result.json"))).unlink()
    for path in (runs / "magnitude").rglob("result.json"):
        path.unlink()
    documents.sparsification.main([str(runs), "--document", str(tmp_path / "one.md")])
    text = " ".join((tmp_path / "one.md").read_text().split())
    assert "**Partial results.** There is no run of magnitude." in text
    assert "Fewer than 3 seeds: dense: 1; BinMask, lam 1e-06: 1;" in text
    assert "**Partial results.** 3 runs are not finished." in text
    assert text.count("**cannot be said") == 2 and "missed" not in text
    assert capsys.readouterr().out.split() == text.split()


@pytest.mark.parametrize("name", ["sparsification", "regularisation"])
def test_without_finished_runs_there_is_a_sentence_and_no_document(
    documents: SimpleNamespace, tmp_path: Path, capsys: Any, name: str
) -> None:
    run = run_folders.write_run(tmp_path / "runs" / "a")
    (run / "result.json").unlink()
    (tmp_path / "old.md").write_text("old")
    with pytest.raises(SystemExit) as stop:
        getattr(documents, name).main([str(tmp_path / "runs"), "--document", str(tmp_path / "old.md")])
    out, error = capsys.readouterr()
    assert stop.value.code == 1 and not out and error.count("\n") == 1
    assert error.startswith(f"error: there is no finished run in {tmp_path / 'runs'}; run its sweep first")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["old.md"]


def test_runs_of_several_protocols_are_refused(documents: SimpleNamespace, tmp_path: Path) -> None:
    run_folders.write_run(tmp_path / "a", lam=1e-6)
    run_folders.write_run(tmp_path / "b", lam=1e-6, lr=0.3)
    with pytest.raises(documents.sparsification.RunError, match="BinMask was run with several settings"):
        study(documents, tmp_path)
    run_folders.write_run(tmp_path / "c", lam=1e-6, test_fraction=0.5)
    with pytest.raises(documents.sparsification.RunError, match="tested on different data"):
        study(documents, tmp_path)


def test_reports_have_a_row_for_batch_statistics_too(sparsify: SimpleNamespace) -> None:
    rows = {row[0].text: row for row in tables.result_table(sparsify.study.analysis).rows}
    row = rows["test accuracy before fine-tuning, with per-batch statistics (%)"]
    expected = with_interval(raw(sparsify.runs, batch, method="binmask", lam=1e-6))
    assert expected in [entry.text for entry in row]


def test_the_two_sides_of_the_figure_are_the_means(sparsify: SimpleNamespace) -> None:
    sides = figures.draw_before_and_after(sparsify.study.analysis).axes
    for axes, get in zip(sides, (before, after), strict=True):
        ours = axes.containers[0]  # BinMask is the first
        assert ours.get_label() == "binmask"
        expected = [raw(sparsify.runs, get, method="binmask", lam=lam).mean() for lam in LEVELS]
        assert list(ours.lines[0].get_ydata()) == pytest.approx(expected)


# regularisation


COEFFICIENTS = {
    "binmask": (1e-5, 3e-5),
    "l1": (1e-4, 2e-4),
    "l2": (0.01, 1.0),
    "dropout": (0.3, 0.5),
    "logistic": (0.0,),
}


def write_regularise(folder: Path, binmask: float = 0.02, dataset: str = "data/a_table.npz") -> Path:
    """`binmask`: its test AUC less that of weight decay alone. The coefficients that are best by validation are the
    second ones, by test the first."""
    gains = {"binmask": binmask, "l1": 0.0199, "l2": 0.0, "dropout": -0.001, "logistic": -0.01}
    for place, (method, lams) in enumerate(COEFFICIENTS.items()):
        for number, lam in enumerate(lams):
            for seed in range(4):
                run = folder / method / "trials" / f"{number}-{seed}"
                table = {"task": "tabular", "dataset": dataset, "model": "mlp_tanh", "finetune_epochs": 0}
                run_folders.write_run(run, method=method, lam=lam, seed=seed, epochs=2, **table)
                test = 0.8 + gains[method] + noise(1, seed) + noise(number, seed, place) / 8 - 0.0006 * number
                gap = 0.03 - gains[method] - 0.002 * (method == "binmask") + noise(6, number, seed, place) / 8
                values = {
                    "test_auc": test,
                    "validation_auc": test + 0.001 * number,
                    "train_auc": test + gap,
                }
                norms = {f"weight_l{power}": 0.5 / (1 + power) / (1 + number) + noise(5, seed) for power in range(3)}
                norms["weight_l0"] -= 0.2 * (method == "binmask")
                sizes = {"train_examples": 750, "validation_examples": 100, "test_examples": 150}
                change(run, **values, **norms, **sizes)
    return folder


@pytest.fixture(scope="module")
def regularise(tmp_path_factory: pytest.TempPathFactory, documents: SimpleNamespace) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("regularise")
    good = write_regularise(folder / "runs" / "good")
    bad = write_regularise(folder / "runs" / "bad", binmask=-0.05, dataset="data/b_table.npz")
    for seed in range(3):
        change(bad / "binmask" / "trials" / f"1-{seed}", sparsity=0.0)
    document = folder / "docs" / "document.md"
    documents.regularisation.main([str(folder / "runs"), "--seeds", "4", "--document", str(document)])
    text = document.read_text()
    assert str(folder) not in text
    parts = {part.split("\n")[0]: part for part in text.split("\n## ")}
    return SimpleNamespace(good=good, bad=bad, text=text, parts=parts)


def test_trials_that_were_stopped_before_masks_learnt_are_counted(regularise: SimpleNamespace) -> None:
    told = r"In 3 of the \d+ trials of BinMask the epoch with the best validation AUC"
    assert re.search(told, regularise.parts["b_table"]) and not re.search("In . of the", regularise.parts["a_table"])


def rows_of(part: str, metric: str) -> dict[str, list[str]]:
    """Method -> cells, of Table 1."""
    cells = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith(f"| {metric} |")]
    return {row[1]: [cell.strip(" |") for cell in row[2:] if cell.strip(" |")] for row in cells}


def test_table_1_has_the_raw_numbers_sorted_by_test_auc(regularise: SimpleNamespace) -> None:
    part = regularise.parts["a_table"]
    titles = {"binmask": "BinMask", "l1": "L1", "l2": "L2", "dropout": "dropout", "logistic": "LR"}
    metrics = {"train_auc": "training AUC", "test_auc": "test AUC"}
    metrics |= {f"weight_l{power}": f"mean weight L{power}" for power in range(3)}
    samples = {
        (method, lam): raw(regularise.good, lambda result: result["test_auc"], method=method, lam=lam)
        for method, lams in COEFFICIENTS.items()
        for lam in lams
    }
    order = {
        method: sorted(lams, key=lambda lam: -samples[method, lam].mean()) for method, lams in COEFFICIENTS.items()
    }
    shown = rows_of(part, "coefficient / dropout probability")
    assert shown == {titles[method]: [f"{lam:g}" for lam in lams] for method, lams in order.items() if lams != [0.0]}
    for key, heading in metrics.items():
        own = {k: raw(regularise.good, lambda result, key=key: result[key], method=k[0], lam=k[1]) for k in samples}
        best = max(own.values(), key=lambda values: values.mean())
        found = rows_of(part, heading)
        assert list(found) == [titles[method] for method in order if key.endswith("auc") or method != "logistic"]
        for method in order:
            for cell, lam in zip(found.get(titles[method], []), order[method], strict=titles[method] in found):
                values = own[method, lam]
                bold = key.endswith("auc") and (values is best or stats.ttest_rel(best, values).pvalue > 0.3)
                text = with_interval(values, 4, "{} (± {})")
                assert cell == (f"**{text}**" if bold else text), (key, method, lam)
    assert part.count("**0.") > 2


def test_table_1_is_latex_too(documents: SimpleNamespace, regularise: SimpleNamespace) -> None:
    trials = documents.sparsification.finished([str(regularise.good)])
    (analysis,) = documents.sparsification.analyse(trials, "auc").problems
    table = tables.coefficient_table(analysis, tuple(COEFFICIENTS))
    text = tables.latex(table)
    assert r"\begin{tabular}{p{7.5em}lrr}" in text and r"training AUC & LR & \textbf{" in text
    narrow = list(table.blocks(widest=1))
    assert [len(block.head) for block in narrow] == [3, 3]
    assert all(block.rows[0][1].text == "BinMask" for block in narrow)


def test_coefficients_are_chosen_by_the_validation_part(regularise: SimpleNamespace) -> None:
    part = regularise.parts["a_table"]
    for method, label in (("binmask", "BinMask"), ("l1", "L1"), ("l2", "L2"), ("dropout", "dropout")):
        lam = COEFFICIENTS[method][1]
        test, train = (
            raw(regularise.good, lambda result, key=key: result[key], method=method, lam=lam)
            for key in ("test_auc", "train_auc")
        )
        assert f"| {label} | {lam:g} |" in part
        gap = train - test
        row = next(line for line in part.splitlines() if line.startswith(f"| {label} | {lam:g} |"))
        assert with_interval(test, 4) in row and difference(gap, 4) in row


def test_verdicts_turn_when_the_data_do(regularise: SimpleNamespace) -> None:
    prose = regularise.parts["What holds"]
    assert "| the paper | a\\_table | b\\_table |" in prose
    verdicts = re.findall(r"\| (?:holds|does not hold|claimed)[^|]*\| ([a-z ]+) \| ([a-z ]+) \|", prose)
    assert verdicts == [
        ("holds", "does not hold"),  # best test AUC
        ("holds", "does not hold"),  # gap
        ("holds", "holds"),  # L0
        ("holds", "holds"),  # norms
        ("holds", "does not hold"),  # only two improve
        ("holds", "does not hold"),  # better than logistic regression
    ]
    lam = COEFFICIENTS["binmask"][1]
    for folder, name in ((regularise.good, "a_table"), (regularise.bad, "b_table")):
        ours, theirs = (
            raw(folder, lambda result: result["test_auc"], method=method, lam=lam)
            for method, lam in (("binmask", lam), ("logistic", 0.0))
        )
        assert f"less that of LR, BinMask, lam {lam:g}: {difference(ours - theirs, 4)}" in regularise.parts[name]
    assert "Coefficients that were run: BinMask 2 of 5, L1 2 of 5, L2 2 of 5, dropout 2 of 5." in regularise.text
    assert "1,000 rows split 75/10/15" in regularise.text and "Fewer than" not in regularise.text
