from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from dense.comparison import Comparison
from dense.report import Results, collect, write_report
from dense.report.curves import block_charts, learning_curves
from dense.report.markup import Markup, data, element
from dense.report.outcome import dot_plots, result_table
from dense.report.page import page
from dense.report.tables import as_markdown, as_text, config_differences, notes
from dense.report.words import check_expectations, headline, leaders, listing, statement
from dense.runs import Run

sys.path.insert(0, str(Path(__file__).parent))
from fake_comparison import COMPARISON_CONFIG, finish, finish_all, planned, write_history

VOID = {'br', 'hr', 'img', 'link', 'meta'}


class Page(HTMLParser):
    """Checks that every element is closed in order, and collects what the tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        assert len(given) == len(attributes), f'an attribute twice in {tag}'
        self.addresses += [str(given[key]) for key in ('src', 'href') if key in given]
        self.ids += [str(given['id'])] if 'id' in given else []
        if tag == 'img':
            self.images.append(given)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        if not set(self.open) & {'style', 'script'}:
            self.words.append(text)

    @property
    def text(self) -> str:
        return ' '.join(' '.join(self.words).split())


@pytest.fixture
def made(tmp_path: Path) -> tuple[Comparison, list[Run]]:
    comparison, runs = planned(tmp_path)
    finish_all(runs)
    return comparison, runs


@pytest.fixture
def drawn(made: tuple[Comparison, list[Run]]) -> tuple[Comparison, list[Run]]:
    """As ``made``, with pictures."""
    finish_all(made[1], pictures=True)
    return made


def results_of(made: tuple[Comparison, list[Run]]) -> Results:
    return collect(*made)


def lose(run: Run, returncode: int | None, said: str = '') -> None:
    """Make a finished run one without result."""
    (run.directory / 'summary.json').unlink()
    run.remember(returncode=returncode)
    run.log.write_text(said, encoding='utf-8')


def find(runs: list[Run], arm: str, seed: int, probe: str | None) -> Run:
    return next(run for run in runs if (run.arm, run.seed, run.probe) == (arm, seed, probe))


# Numbers


def test_a_cell_is_mean_and_sample_deviation_in_the_printed_unit(tmp_path: Path) -> None:
    comparison, runs = planned(tmp_path, COMPARISON_CONFIG.replace('[0, 1]', '[0, 1, 2]'))
    values = [0.31, 0.35, 0.42]
    for seed, value in enumerate(values):
        finish(find(runs, 'skip', seed, 'depth'), metrics={'delta1': value, 'abs_rel': 0.2})
    cell = collect(comparison, runs).cell('skip', 'depth.delta1')
    np.testing.assert_allclose(cell.mean, 100 * np.mean(values), rtol=1e-12)
    np.testing.assert_allclose(cell.spread, 100 * np.std(values, ddof=1), rtol=1e-12)
    finish(find(runs, 'random', 0, 'depth'), metrics={'delta1': 0.3, 'abs_rel': 0.2})
    difference = collect(comparison, runs).baseline_difference('skip', 'depth.delta1')
    np.testing.assert_allclose(difference, 100 * (np.mean(values) - 0.3), rtol=1e-12)
    assert collect(comparison, runs).cell('random', 'depth.delta1').spread is None


def test_best_follows_the_metric_and_ties_as_printed(made: tuple[Comparison, list[Run]]) -> None:
    comparison, runs = made
    for arm, score, error in (('skip', 40.04, 0.3), ('skipless', 39.96, 0.2), ('control', 39.94, 0.4)):
        for seed in (0, 1):
            finish(find(runs, arm, seed, 'segmentation'), metrics={'mIoU': score})
            finish(find(runs, arm, seed, 'depth'), metrics={'delta1': 0.5, 'abs_rel': error})
    results = collect(comparison, runs)
    assert results.best('segmentation.mIoU') == {'skip', 'skipless'}
    assert results.best('depth.abs_rel') == {'skipless'}


def test_a_value_before_training_is_the_first_one_logged(tmp_path: Path) -> None:
    comparison, runs = planned(tmp_path, COMPARISON_CONFIG.replace("['knn']", "['knn@start', 'knn']"))
    finish_all(runs)
    results = collect(comparison, runs)
    assert results.cell('skip', 'pretrain.knn@start').values == {0: 21.0, 1: 21.0}
    assert results.cell('skip', 'pretrain.knn').mean > 30
    assert results.best('pretrain.knn')
    assert not results.best('pretrain.knn@start')
    assert not any('before training' in sentence for sentence in leaders(results))


def test_a_list_of_labels_with_commas_stays_readable() -> None:
    assert listing(['a', 'b', 'c']) == 'a, b and c'
    assert listing(['a, 1', 'b', 'c']) == 'a, 1; b and c'


def test_of_values_by_block_the_last_counts(tmp_path: Path) -> None:
    names = "['token_cosine@start', 'token_cosine']"
    comparison, runs = planned(tmp_path, COMPARISON_CONFIG.replace("['knn']", names))
    run = find(runs, 'skip', 0, None)
    write_history(run, [{'step': 0, 'token_cosine': [0.1, 0.25]}, {'step': 9, 'token_cosine': [0.2, 0.75]}])
    finish(run, metrics={'token_cosine': [0.2, 0.75]})
    finish(find(runs, 'skip', 1, None), metrics={'token_cosine': []})
    results = collect(comparison, runs)
    assert results.cell('skip', 'pretrain.token_cosine@start').values == {0: 0.25}
    assert results.cell('skip', 'pretrain.token_cosine').values == {0: 0.75}


def test_a_resumed_history_counts_each_step_once_and_its_later_line(made: tuple[Comparison, list[Run]]) -> None:
    comparison, runs = made
    run = find(runs, 'skip', 0, None)
    write_history(run, [{'step': 1, 'loss': 3.0}, {'step': 2, 'loss': 9.0}, {'step': 2, 'loss': 2.0}])
    with (run.directory / 'monitor.jsonl').open('a') as file:
        file.write('{"step": 3, "lo')
    history = collect(comparison, runs).by_key['skip', 0, None].history
    assert [(row['step'], row['loss']) for row in history] == [(1, 3.0), (2, 2.0)]


# Words


@pytest.mark.parametrize(
    ('metric', 'ours', 'theirs', 'margin', 'holds', 'confirmed'),
    [
        ('segmentation.mIoU', 13.1, 10.0, 3.0, True, True),
        ('segmentation.mIoU', 12.9, 10.0, 3.0, True, False),
        ('segmentation.mIoU', 12.9, 10.0, 3.0, False, True),
        ('segmentation.mIoU', 13.1, 10.0, 3.0, False, False),
        ('depth.abs_rel', 0.2, 0.3, 0.05, True, True),
        ('depth.abs_rel', 0.3, 0.2, 0.05, True, False),
        ('depth.delta1', 0.54, 0.5, 3.0, True, True),  # the margin is in points, as printed
    ],
)
def test_an_expectation_is_checked_in_the_direction_of_its_metric(
    tmp_path: Path, metric: str, ours: float, theirs: float, margin: float, holds: bool, confirmed: bool
) -> None:
    head = COMPARISON_CONFIG.partition('    expectations')[0]
    claim = dict(better='skip', than='random', metric=metric, margin=margin, holds=holds)
    comparison, runs = planned(tmp_path, f'{head}    expectations = [{claim}]\n')
    probe, key = metric.split('.')
    for arm, value in (('skip', ours), ('random', theirs)):
        for seed in (0, 1):
            finish(find(runs, arm, seed, probe), metrics={key: value})
    (verdict,) = check_expectations(collect(comparison, runs))
    assert verdict.confirmed is confirmed
    assert ('beats' in verdict.claim) is holds
    leads = (ours < theirs) if key == 'abs_rel' else (ours > theirs)
    assert f'ahead in {2 * leads} of 2 seeds' in verdict.evidence


def test_leaders_are_told_once_a_task_and_ties_as_printed_are_ties(made: tuple[Comparison, list[Run]]) -> None:
    comparison, runs = made
    for arm, score in (('skip', 40.04), ('skipless', 39.96), ('control', 12.0), ('random', 10.0)):
        for seed in (0, 1):
            finish(find(runs, arm, seed, 'segmentation'), metrics={'mIoU': score})
            finish(find(runs, arm, seed, 'depth'), metrics={'delta1': score / 100, 'abs_rel': 1.0})
    told = leaders(collect(comparison, runs))
    assert 'Segmentation, mIoU: skip + AdamW and skipless + init + SOAP lead with 40.0 %.' in told
    assert 'Depth, δ1: skip + AdamW and skipless + init + SOAP lead with 40.0 %.' in told
    assert len(told) == 3  # of depth only the first metric


def test_a_difference_that_rounds_to_nothing_has_no_sign(made: tuple[Comparison, list[Run]]) -> None:
    comparison, runs = made
    for arm, score in (('skip', 10.0), ('random', 10.04)):
        for seed in (0, 1):
            finish(find(runs, arm, seed, 'segmentation'), metrics={'mIoU': score})
    results = collect(comparison, runs)
    assert str(results.baseline_difference('skip', 'segmentation.mIoU')) == '0.0'
    assert 'delta down' not in result_table(results)
    assert '+0.0' in result_table(results)


def test_every_row_of_a_dot_plot_shows_its_own_baseline(tmp_path: Path) -> None:
    config = COMPARISON_CONFIG.replace("label='skip + AdamW',", "label='skip + AdamW', baseline='other',")
    config = config.replace("init + SOAP', pretrain", "init + SOAP', baseline='random', pretrain")
    other = "        other=dict(label='other weights', backbone=dict(name='vit_tiny_patch16_224')),\n        random="
    comparison, runs = planned(tmp_path, config.replace('        random=', other))
    for arm, score in (('skip', 30.0), ('skipless', 30.0), ('other', 10.0), ('random', 20.0)):
        for seed in (0, 1):
            finish(find(runs, arm, seed, 'segmentation'), metrics={'mIoU': score})
    results = collect(comparison, runs)
    plots = str(dot_plots(results))
    rows = {arm: re.search(rf'data-arm="{arm}".*?</g>', plots).group() for arm in ('skip', 'skipless', 'other')}
    marks = {arm: re.findall(r'x1="([^"]*)"[^>]*class="reference"', row) for arm, row in rows.items()}
    means = {arm: re.findall(r'x1="([^"]*)"[^>]*class="mean"', row) for arm, row in rows.items()}
    assert marks['skip'] == means['other']
    assert not marks['other']
    assert marks['skipless'] != marks['skip']
    assert 'Baseline “other weights”: of skip + AdamW.' in notes(results)


def test_a_page_without_pictures_says_nothing_of_them(made: tuple[Comparison, list[Run]]) -> None:
    comparison, runs = made
    finish_all(runs)
    text = page(collect(replace(comparison, pictures=0), runs), [], '')
    assert 'id="predictions"' not in text
    assert 'no pictures' not in text


def test_supervised_training_is_said_to_be_by_labels(tmp_path: Path) -> None:
    comparison, runs = planned(tmp_path)
    for run in runs:
        finish(run, method='Supervised', steps=600)
    assert 'were pretrained by labels for 600 steps' in ' '.join(statement(collect(comparison, runs)))


def test_the_words_say_what_was_compared_and_found(made: tuple[Comparison, list[Run]]) -> None:
    results = results_of(made)
    said = ' '.join(statement(results))
    assert 'Three arms were pretrained by MAE for 600 steps.' in said
    assert 'probed for segmentation and depth' in said
    assert 'mean over 2 seeds' in said
    verdicts = check_expectations(results)
    assert [verdict.confirmed for verdict in verdicts] == [True, True]
    assert headline(verdicts) == 'Both expectations came true.'
    assert verdicts[0].evidence == (
        'Segmentation, mIoU: 42.6 % against 23.1 %, ahead by 19.5 points (at least 3.0 points expected); '
        'ahead in 2 of 2 seeds'
    )


def test_an_expectation_without_results_is_open(made: tuple[Comparison, list[Run]]) -> None:
    comparison, runs = made
    for seed in (0, 1):
        lose(find(runs, 'random', seed, 'segmentation'), 1, 'ValueError: no such model')
    verdicts = check_expectations(collect(comparison, runs))
    assert [verdict.confirmed for verdict in verdicts] == [None, None]
    assert 'random weights has no result (it ended with exit status 1: ValueError: no such' in verdicts[0].evidence
    assert headline(verdicts) == '0 of 2 expectations came true, 2 cannot be told yet.'


# Tables


def test_the_table_is_aligned_text_and_valid_markdown(made: tuple[Comparison, list[Run]]) -> None:
    results = results_of(made)
    lines = as_text(results).splitlines()
    row = next(line for line in lines if line.startswith('skipless + init'))
    column = lines[3].index('mIoU [%] ↑')
    assert row[column:].startswith('42.6 ± 0.2 (+19.5)')
    assert all(len(line) <= len(lines[1]) for line in lines[1:9])
    table = [line for line in as_markdown(results, []).splitlines() if line.startswith('|')]
    assert {line.count('|') for line in table} == {len(results.comparison.columns) + 3}
    assert '| **47.1 ± 0.2 (+24.0)** |' in table[2]
    assert table[-1].startswith('| random weights | — | 23.1 ± 0.2 |')


def test_only_what_differs_between_the_arms_is_listed(made: tuple[Comparison, list[Run]]) -> None:
    assert config_differences(results_of(made)) == {
        'model.backbone.init': {'skip': 'vit_small', 'skipless': 'vit_small', 'control': 'timm'},
        'model.backbone.attention_skip': {'skip': True},
        'model.backbone.mlp_skip': {'skip': True},
        'optim_wrapper.optimizer.type': {'skip': 'AdamW', 'skipless': 'SOAP', 'control': 'AdamW'},
        'optim_wrapper.optimizer.lr': {'skip': 1e-3, 'skipless': 3e-3, 'control': 3e-3},
    }


# Curves


def test_curves_are_means_over_seeds_with_their_range(made: tuple[Comparison, list[Run]]) -> None:
    comparison, runs = made
    for seed, loss in ((0, 1.0), (1, 3.0)):
        write_history(find(runs, 'skip', seed, None), [{'step': s, 'loss': loss, 'knn': 0.5} for s in (1, 2)])
    loss, knn = learning_curves(collect(comparison, runs))[:2]
    assert '"2 (1 to 3)"' in loss
    assert '50 (50 to 50)' in knn


def test_blocks_are_compared_before_and_after_on_one_axis(made: tuple[Comparison, list[Run]]) -> None:
    comparison, runs = made
    rows = [{'step': step, 'condition_number': [10.0, value]} for step, value in ((0, 1e3), (5, None))]
    for run in runs:
        if run.probe is None:
            write_history(run, rows)
    ((before, after),) = block_charts(collect(comparison, runs))
    assert 'Condition of the tokens, at initialisation' in before
    assert 'Condition of the tokens, after step 5' in after
    assert 'linearly dependent' in after

    def tick_labels(chart: str) -> list[str]:
        return re.findall(r'text-anchor="end" class="tick">([^<]+)<', chart)

    assert tick_labels(before) == tick_labels(after) != []


# The page


def test_text_is_escaped_wherever_it_goes() -> None:
    nasty = '<script>alert("1")</script> & \'quotes\''
    made = element('p', nasty, title=nasty)
    parser = HTMLParser()
    seen: list[object] = []
    parser.handle_starttag = lambda tag, attributes: seen.append((tag, dict(attributes)))  # type: ignore[method-assign]
    parser.handle_data = seen.append  # type: ignore[method-assign]
    parser.feed(made)
    parser.close()
    assert seen[0] == ('p', {'title': nasty})
    assert ''.join(map(str, seen[1:])) == nasty
    assert '</script' not in data({'a': '</script>'})[:-9]
    assert json.loads(data({'a': '</script>'}).partition('>')[2][:-9]) == {'a': '</script>'}
    assert element('i', None, [Markup('<b>'), 1, '<b>'], hidden=True, id=None) == '<i hidden><b>1&lt;b&gt;</i>'


def test_the_page_holds_everything_and_asks_for_nothing(drawn: tuple[Comparison, list[Run]], tmp_path: Path) -> None:
    report = write_report(*drawn, tmp_path / 'work', 'python tools/compare.py x.py')
    text = report.page.read_text(encoding='utf-8')
    page = Page(text)
    assert 'Condition of value and output, after step 600' in page.text
    sections = ['results', 'predictions', 'features', 'curves', 'blocks', 'differences', 'execution', 'words']
    assert [name for name in page.ids if name in sections] == sections
    assert len(page.ids) == len(set(page.ids))
    assert all(re.match(r'data:|#', address) for address in page.addresses)
    assert {address[1:] for address in page.addresses if address[0] == '#'} <= set(page.ids)
    assert not re.search(r'https?://|url\(|@import', text)
    assert all(image['alt'] for image in page.images)
    # 3 scenes: image, truth and 4 arms for each of two probes, and image and 4 arms for the features
    assert len(page.images) == 3 * (2 * 6 + 5)
    for said in (
        'Both expectations came true.',
        '47.1 ± 0.2',
        '+24.0',
        'depth in metres',
        'python tools/compare.py x.py',
        'Three arms were pretrained',
        'skipless + init + SOAP',
        'model.backbone.init',
        'Validation images at',
    ):
        assert said in page.text
    written = json.loads(report.data.read_text())
    assert written['arms']['skip']['results']['segmentation.mIoU']['mean'] == pytest.approx(47.15)
    assert [verdict['confirmed'] for verdict in written['verdicts']] == [True, True]
    assert written['runs'][0]['config']['train_cfg'] == {'max_iters': 600}
    assert written['environments'] == [{'processor': 'a processor', 'cores': '2', 'torch': '2.14.1'}]
    assert report.markdown.read_text(encoding='utf-8').startswith('## Do skipless features segment?')
    assert 'Expected, and found' in report.text


def test_gaps_are_shown_with_their_reason_and_names_are_escaped(tmp_path: Path) -> None:
    config = COMPARISON_CONFIG.replace("'skip + AdamW'", "'skip <b>&amp; AdamW'")
    comparison, runs = planned(tmp_path, config)
    finish_all(runs, pictures=True)
    lose(find(runs, 'skipless', 0, None), 1, 'Traceback\nValueError: loss <stayed> non-finite\n')
    lose(find(runs, 'skipless', 0, 'segmentation'), None)
    lose(find(runs, 'control', 0, 'depth'), -9)
    lose(find(runs, 'control', 1, 'depth'), 0)
    (find(runs, 'skip', 1, None).directory / 'monitor.jsonl').unlink()
    (find(runs, 'control', 0, None).directory / 'monitor.jsonl').write_text('not json\n[1]\n{"step": "x"}\n')
    report = write_report(comparison, runs, tmp_path / 'work')
    page = Page(report.page.read_text(encoding='utf-8'))
    for said in (
        'skip <b>&amp; AdamW',
        'skipless / seed 0 / pretrain: it ended with exit status 1: ValueError: loss <stayed> non-finite',
        'its pretraining has no result',
        'it was killed by signal 9 (SIGKILL)',
        'it ended without a finished summary.json',
        '1 of 2 seeds',
    ):
        assert said in page.text
    assert '<b>&amp;' not in report.page.read_text(encoding='utf-8')


def test_a_damaged_summary_is_a_gap(tmp_path: Path) -> None:
    comparison, runs = planned(tmp_path)
    for run in runs:
        finish(run, metrics=[1.0])
    write_report(comparison, runs, tmp_path / 'work')
    cell = collect(comparison, runs).cell('random', 'segmentation.mIoU')
    assert cell.mean is None
    assert cell.reasons == ("it reports no finite 'mIoU'",)


def test_a_report_can_be_written_before_anything_has_run(tmp_path: Path) -> None:
    comparison, runs = planned(tmp_path)
    report = write_report(comparison, runs, tmp_path / 'work')
    page = Page(report.page.read_text(encoding='utf-8'))
    assert 'it has not been run' in page.text
    assert 'no pictures: its pretraining has no result; it has not been run' in page.text
    assert 'not measured in any of these runs' in page.text
    assert '0 of 2 expectations came true, 2 cannot be told yet.' in page.text


def test_a_comparison_of_pretraining_alone_needs_no_probes(tmp_path: Path) -> None:
    text = COMPARISON_CONFIG.partition('    probes')[0]
    comparison, runs = planned(tmp_path, text.replace("['knn']", 'dict(top1=dict(), loss=dict())'))
    for run in runs:
        finish(run, method='Supervised', steps=600, metrics={'top1': 0.5 + run.seed / 10, 'loss': 1.0})
    report = write_report(comparison, runs, tmp_path / 'work')
    assert '55.0 ± 7.1' in report.text
    page = Page(report.page.read_text(encoding='utf-8'))
    assert 'accuracy' in page.text
    assert 'predictions' not in page.ids


def test_the_page_opens_in_a_browser_without_errors(drawn: tuple[Comparison, list[Run]], tmp_path: Path) -> None:
    browser = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
    if browser is None:
        pytest.skip('no Chromium here')
    report = write_report(*drawn, tmp_path / 'work')
    flags = ['headless', 'no-sandbox', 'disable-gpu', 'no-first-run', 'disable-background-networking']
    seen = subprocess.run(
        [browser, *(f'--{flag}' for flag in flags), '--enable-logging=stderr', '--virtual-time-budget=1000',
         f'--user-data-dir={tmp_path / "profile"}', '--dump-dom', report.page.as_uri()],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert 'CONSOLE' not in seen.stderr
    assert 'Both expectations came true.' in seen.stdout
