"""The report of a comparison: a table (text, markdown, JSON) and a self-contained page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from dense.comparison import REPORT, Comparison
from dense.report.collect import Results, collect, finite
from dense.report.page import page
from dense.report.tables import as_json, as_markdown, as_text
from dense.report.words import check_expectations, verdict_text
from dense.runs import Run

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
    content = json.dumps(finite(as_json(results, verdicts, command)), indent=1, default=str, allow_nan=False)
    report.data.write_text(content, encoding='utf-8')
    report.markdown.write_text(as_markdown(results, verdicts), encoding='utf-8')
    report.page.write_text(page(results, verdicts, command), encoding='utf-8')
    return report
