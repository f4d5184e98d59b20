"""Tables in the layout of the paper's Table 1: a column for each configuration, best first; a row for each metric."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from binmask_dist.report.analysis import Cell, ProblemAnalysis, Row
from binmask_dist.report.configurations import varied_settings
from binmask_dist.report.statistics import Summary
from binmask_dist.report.trials import BATCH_STATISTICS, BEFORE_FINETUNING, WITHOUT_EPOCHS

WIDEST = 5  # columns that fit on a printed page
NOTHING = "-"  # where there is no figure
METHODS = {"binmask": "BinMask", "probmask": "ProbMask", "hard_concrete": "hard concrete", "rigl": "RigL"}
METHODS |= {"l1": "L1", "l2": "L2", "logistic": "LR"}  # names that are not as --method has them
_COEFFICIENT = "coefficient / dropout probability"
_TABLE_1 = {"train_auc": "training AUC", "test_auc": "test AUC"}
_TABLE_1 |= {f"weight_l{power}": f"mean weight L{power}" for power in (0, 1, 2)}
_LATEX = {character: f"\\{character}" for character in "&%$#_{}"}
_LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
_LATEX |= {"±": r"$\pm$"}


@dataclass
class Entry:
    text: str
    bold: bool = False


@dataclass
class Table:
    """The first entry of the head and of each row is its title, or the first `titles` are."""

    title: str
    problem: str
    head: list[str]
    rows: list[list[Entry]]
    notes: list[str] = field(default_factory=list)
    titles: int = 1

    def blocks(self, widest: int = WIDEST) -> Iterator["Table"]:
        """The same in pieces of at most so many columns; the notes are with the last one."""
        titles = slice(self.titles)
        starts = range(self.titles, len(self.head), widest)
        for start in starts:
            columns = slice(start, start + widest)
            rows = [[*row[titles], *row[columns]] for row in self.rows]
            notes = self.notes if start == starts[-1] else []
            title = self.title if start == starts[0] else f"{self.title} (continued)"
            yield Table(title, self.problem, [*self.head[titles], *self.head[columns]], rows, notes, self.titles)


# what the tables say


def result_table(analysis: ProblemAnalysis) -> Table:
    head = ["", *(each.label for each in analysis.columns)]
    rows = [[Entry(title(row.name)), *(_value(row.name, cell) for cell in row.cells)] for row in analysis.results]
    counts = [len(each.trials) for each in analysis.columns]
    rows.append([Entry("trials"), *(Entry(str(count)) for count in counts)])
    notes = [f"Columns are sorted by {title(analysis.metric, unit=False)}, the best first."]
    if max(counts) > 1:
        notes.append("Numbers after ± are half of the 95% t-interval over the trials (seeds) of a configuration.")
        notes.append(
            "Bold: the best of a row among those with several trials, and those than which it is not significantly "
            "better (p > 0.3)."
        )
    if min(counts) == 1:
        which = "These configurations have" if max(counts) == 1 else "A configuration without ± has"
        notes.append(f"{which} one trial: there is no interval, and a difference may be chance.")
    if any(cell.value and cell.value.summary.missing for row in analysis.results for cell in row.cells):
        notes.append("n: of the trials, so many have a finite value; the others are in no figure of that cell.")
    if any(cell.value is None for row in analysis.results for cell in row.cells):
        notes.append(f"{NOTHING}: not measured, or finite in no trial.")
    return Table("Results", analysis.problem.name, head, rows, notes)


def p_value_table(analysis: ProblemAnalysis) -> Table:
    """The best of each row against the others."""
    rows = [
        [Entry(title(row.name, unit=False)), *(_p_value(row, index) for index in range(len(row.cells)))]
        for row in analysis.results
        if row.best is not None
    ]
    head = ["", *(each.label for each in analysis.columns)]
    name = "The best of each row against the others"
    return Table(name, analysis.problem.name, head, rows, _p_notes(analysis.results))


def dense_table(analysis: ProblemAnalysis) -> Table | None:
    """Each configuration against the dense one."""
    row = analysis.against_dense
    if row is None:
        return None
    p_values = [Entry("p"), *(_p_value(row, index, "dense") for index in range(len(row.cells)))]
    difference = [Entry(f"difference of {title(analysis.metric)}")]
    for cell in row.cells:
        scale, digits, _ = _style(analysis.metric)
        difference.append(Entry(f"{scale * cell.against.difference:+.{digits}f}" if cell.against else NOTHING))
    head = ["", *(each.label for each in analysis.columns)]
    return Table("Against dense", analysis.problem.name, head, [difference, p_values], _p_notes([row]))


def matched_table(analysis: ProblemAnalysis) -> Table | None:
    """The metric where curves have the same sparsity."""
    if not analysis.matched or not analysis.curves:
        return None
    head = ["sparsity", *(curve.label for curve in analysis.curves)]
    rows = []
    for row in analysis.matched:
        rows.append([Entry(row.name), *(_value(analysis.metric, cell) for cell in row.cells)])
        if len(analysis.curves) > 1 and row.best is not None:
            rows.append([Entry("p"), *(_p_value(row, index) for index in range(len(row.cells)))])
    notes = ["Linear between neighbouring configurations, for each seed by itself; nothing is extrapolated."]
    if any(cell.value and cell.value.sample is None for row in analysis.matched for cell in row.cells):
        notes.append("Where configurations do not share seeds, their means are interpolated, and there is no test.")
    if len(analysis.curves) > 1:
        notes += _p_notes(analysis.matched)
    return Table(f"{sentence(title(analysis.metric))} at the same sparsity", analysis.problem.name, head, rows, notes)


def configuration_table(analysis: ProblemAnalysis) -> Table:
    """One row for each configuration."""
    varied = [key for key in varied_settings(analysis.problem) if key != "method"]
    head = ["configuration", "method", *varied, "seeds", title(analysis.metric), title("sparsity"), "hash"]
    rows = []
    for each in analysis.columns:
        values = [setting_text(each.config.get(key)) for key in varied]
        figures = [value_text(name, each.summaries.get(name)) for name in (analysis.metric, "sparsity")]
        rows.append([Entry(text) for text in (each.label, each.method, *values, ranges(each.seeds), *figures, each.id)])
    return Table("Configurations", analysis.problem.name, head, rows)


def coefficient_table(analysis: ProblemAnalysis, methods: Sequence[str]) -> Table:
    """The paper's Table 1: for each metric a row for each method, its coefficients sorted by the metric, best first."""
    places = {name: [i for i, each in enumerate(analysis.columns) if each.method == name] for name in methods}
    places = {name: own for name, own in places.items() if own}
    networks = [name for name in places if name not in WITHOUT_EPOCHS]
    metrics = {row.name: row for row in analysis.results}
    rows = []
    for name in networks:
        lams = [setting_text(analysis.columns[place].config["lam"]) for place in places[name]]
        rows.append([Entry(text) for text in (_COEFFICIENT, METHODS.get(name, name), *lams)])
    for metric, heading in _TABLE_1.items():
        for name in places if metric.endswith("auc") else networks:
            cells = [metrics[metric].cells[place] for place in places[name]] if metric in metrics else []
            rows.append([Entry(heading), Entry(METHODS.get(name, name)), *(_bracketed(cell) for cell in cells)])
    width = max(map(len, rows))
    rows = [[*row, *[Entry("")] * (width - len(row))] for row in rows]
    head = ["metric", "method", "values (95% interval)", *[""] * (width - 3)]
    return Table("Regularisation", analysis.problem.name, head, rows, titles=2)


def problem_tables(analysis: ProblemAnalysis) -> list[Table]:
    tables = [result_table(analysis)]
    if len(analysis.columns) > 1:
        tables.append(p_value_table(analysis))
    tables += [table for table in (dense_table(analysis), matched_table(analysis)) if table]
    return [*tables, configuration_table(analysis)]


# entries


def title(metric: str, unit: bool = True) -> str:
    plain = metric.removeprefix(BEFORE_FINETUNING)
    name = plain.removeprefix(BATCH_STATISTICS).replace("_", " ").replace("seconds", "training time")
    name = re.sub(r"\bauc\b", "AUC", name)
    if plain != metric:
        name += " before fine-tuning"
    if plain.startswith(BATCH_STATISTICS):
        name += ", with per-batch statistics"
    return f"{name} ({_style(metric)[2]})" if unit and _style(metric)[2] else name


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def value_text(metric: str, summary: Summary | None) -> str:
    if summary is None:
        return NOTHING
    scale, digits, _ = _style(metric)
    text = f"{scale * summary.mean:,.{digits}f}"
    if summary.half_width is not None:
        text += f" ± {scale * summary.half_width:,.{digits}f}"
    return text + (f" (n = {summary.trials})" if summary.missing else "")


def setting_text(value: Any) -> str:
    if value is None:
        return NOTHING
    return f"{value:g}" if isinstance(value, float) else str(value) or '""'


def p_text(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def ranges(seeds: Sequence[int]) -> str:
    """0, 1, 2, 5 as 0-2, 5."""
    runs: list[list[int]] = []
    for seed in seeds:
        if runs and seed == runs[-1][-1] + 1:
            runs[-1].append(seed)
        else:
            runs.append([seed])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _style(metric: str) -> tuple[float, int, str]:
    """Factor, decimals and unit."""
    if metric.endswith(("accuracy", "sparsity")):
        return 100, 2, "%"
    if metric.endswith("seconds"):
        return 1, 1, "s"
    if metric.endswith(("weights_left", "bytes", "steps")):
        return 1, 0, ""
    return 1, 2 if metric.endswith("perplexity") else 4, ""


def _value(metric: str, cell: Cell) -> Entry:
    return Entry(value_text(metric, cell.value.summary if cell.value else None), cell.bold)


def _bracketed(cell: Cell) -> Entry:
    """As the paper has it: 0.8340 (± 0.0060)."""
    return Entry(re.sub(r"± ([\d.,]+)", r"(± \1)", _value("", cell).text), cell.bold)


def _p_value(row: Row, index: int, reference: str = "best") -> Entry:
    cell = row.cells[index]
    if index == row.best:
        return Entry(reference)
    if cell.against is None or cell.against.p is None or cell.corrected is None:
        return Entry(NOTHING)
    mark = " W" if cell.against.test.startswith("Welch") else ""
    return Entry(f"{p_text(cell.against.p)} ({p_text(cell.corrected)}){mark}")


def _p_notes(rows: Sequence[Row]) -> list[str]:
    compared = [cell.against for row in rows for cell in row.cells if cell.against]
    tests = {comparison.test for comparison in compared}
    notes = []
    if tests - {"none"}:
        notes.append("Two-sided p-values; in brackets, Holm-corrected over this table.")
    if "paired t-test" in tests:
        notes.append("t-tests are paired by seed, over the seeds that both have.")
    if "Welch's t-test" in tests:
        notes.append("W: Welch's test, because the seeds differ.")
    reasons = dict.fromkeys(comparison.reason for comparison in compared if comparison.reason)
    return notes + [f"{NOTHING}: {reason}." for reason in reasons]


# Markdown and LaTeX


def markdown(table: Table) -> str:
    parts = []
    for block in table.blocks():
        parts += [f"## {markdown_text(_heading(block))}", markdown_rows(block)]
        parts += ["\n".join(f"- {markdown_text(note)}" for note in block.notes)] if block.notes else []
    return "\n\n".join(parts) + "\n"


def markdown_rows(table: Table) -> str:
    """The head and the rows alone, however wide."""
    lines = [[markdown_text(text) for text in table.head], ["---"] * len(table.head)]
    lines += [[_markdown_entry(entry) for entry in row] for row in table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _markdown_entry(entry: Entry) -> str:
    return f"**{markdown_text(entry.text)}**" if entry.bold else markdown_text(entry.text)


def latex(table: Table) -> str:
    """Needs the packages booktabs and threeparttable."""
    return "\n".join(_latex_block(block) for block in table.blocks())


def _latex_block(table: Table) -> str:
    lines = [r"\begin{table}[hbt]", r"\scriptsize", r"\centering", rf"\caption{{{_tex(_heading(table))}}}"]
    lines += [r"\setlength{\tabcolsep}{.3em}", r"\begin{threeparttable}"]
    columns = "l" * (table.titles - 1) + "r" * (len(table.head) - table.titles)
    lines += [rf"\begin{{tabular}}{{p{{7.5em}}{columns}}}", r"\toprule"]
    lines += [" & ".join(_tex_head(text) for text in table.head) + r" \\", r"\midrule"]
    for row in table.rows:
        lines.append(" & ".join(rf"\textbf{{{_tex(e.text)}}}" if e.bold else _tex(e.text) for e in row) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    if table.notes:
        lines += [r"\begin{tablenotes}[online]", *(rf"\item {_tex(note)}" for note in table.notes), r"\end{tablenotes}"]
    return "\n".join([*lines, r"\end{threeparttable}", r"\end{table}", ""])


def _tex_head(text: str) -> str:
    """One line for each part of a label, or a few columns would fill a page."""
    parts = [_tex(part) for part in text.split(", ")]
    return r"\shortstack[r]{" + r", \\ ".join(parts) + "}" if len(parts) > 1 else parts[0]


def _heading(table: Table) -> str:
    return f"{table.title}: {table.problem}"


def markdown_text(text: str) -> str:
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", " ".join(text.split())).replace("<", "&lt;")


def _tex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))
