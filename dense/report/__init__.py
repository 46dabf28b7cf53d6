"""The report of a comparison: a table (text, markdown, JSON) and a self-contained page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dense.comparison import REPORT, Comparison
from dense.report.collect import Results, collect
from dense.report.page import page
from dense.report.tables import as_json, as_markdown, as_text
from dense.report.words import check_expectations, verdict_text
from dense.runs import Run
from skipless.files import write_json, write_text

__all__ = ['Report', 'Results', 'collect', 'write_report']


@dataclass(frozen=True)
class Report:
    """What was written, and the text for a terminal."""

    page: Path
    markdown: Path
    data: Path
    text: str


def write_report(comparison: Comparison, runs: list[Run], work_dir: Path, command: str = '') -> Report:
    """Write ``work_dir/report/{index.html,table.md,results.json}`` from what the runs have left so far.

    Runs that failed or are missing leave a gap with its reason. ``command`` is how the comparison was
    started, for the page to repeat.
    """
    results = collect(comparison, runs)
    verdicts = check_expectations(results)
    folder = work_dir / REPORT
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(
        page=folder / 'index.html',
        markdown=folder / 'table.md',
        data=folder / 'results.json',
        text='\n\n'.join(filter(None, [as_text(results), verdict_text(verdicts)])),
    )
    write_json(report.data, as_json(results, verdicts, command))
    write_text(report.markdown, as_markdown(results, verdicts))
    write_text(report.page, page(results, verdicts, command))
    return report
