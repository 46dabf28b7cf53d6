"""Options that have no place in a config, and failures as one sentence."""

import pytest

from skipless.command_line import (
    check_options,
    option_text,
    parse_options,
    parse_value,
    reading_config,
    run_command,
    training_words,
    value_at,
)

CONFIG = {
    'model': {'backbone': {'init': 'distinct', 'name': 'vit'}, 'neck': None},
    'hooks': [{'interval': 1}],
    'size': 3,
}
KNOWN = {'model', 'hooks', 'resume'}


@pytest.mark.parametrize(
    'keys',
    [
        ['model'],
        ['resume'],
        ['model.backbone.depth'],
        ['hooks.0.interval'],
        ['model.head.width', 'model.head.depth'],
        ['resume.from'],
    ],
)
def test_options_with_a_place_pass(keys):
    check_options(keys, CONFIG, KNOWN)


@pytest.mark.parametrize(
    ('keys', 'message'),
    [
        (['modle.backbone.name'], "modle.backbone.name: no 'modle' in the config; did you mean 'model'?"),
        (['model.bakbone.name'], "no 'model.bakbone' in the config; did you mean 'model.backbone'?"),
        (['nothing.like.it'], "no 'nothing' in the config$"),
        (['resum'], "resum: no such key; did you mean 'resume'?"),
        (['size'], 'size: other keys were made from it'),
        (['model.backbone.init.beta'], "model.backbone.init is 'distinct', which holds no keys"),
        (['model.neck.width'], 'model.neck is None, which holds no keys'),
        (['model.head.a', 'model.head'], 'model.head.a: model.head is given as well'),
    ],
)
def test_options_without_a_place_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        check_options(keys, CONFIG, KNOWN)


@pytest.mark.parametrize(
    ('error', 'line'),
    [
        (ValueError('one\n  thing'), 'error: one thing\n'),
        (FileNotFoundError('no such file'), 'error: no such file\n'),
        (OSError(28, 'No space left on device', 'a.pth'), "error: [Errno 28] No space left on device: 'a.pth'\n"),
        (IsADirectoryError(21, 'Is a directory', 'runs'), "error: [Errno 21] Is a directory: 'runs'\n"),
    ],
)
def test_bad_input_is_one_line_and_status_2(error, line, capsys, monkeypatch):
    monkeypatch.delenv('SKIPLESS_TRACEBACK', raising=False)

    def fail():
        raise error

    assert run_command(fail) == 2
    assert capsys.readouterr().err.endswith(line)


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.delenv('SKIPLESS_TRACEBACK', raising=False)
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 // 0)
    monkeypatch.setenv('SKIPLESS_TRACEBACK', '1')
    with pytest.raises(ValueError, match='invalid literal'):
        run_command(int, 'x')


def test_what_goes_wrong_while_a_registry_builds_is_bad_input(capsys, monkeypatch):
    registry = pytest.importorskip('mmengine.registry')
    monkeypatch.delenv('SKIPLESS_TRACEBACK', raising=False)
    things = registry.Registry('things')

    @things.register_module()
    class Thing:
        def __init__(self, size):
            self.size = size

    assert run_command(things.build, {'type': 'Thing', 'sise': 1}) == 2
    assert 'sise' in capsys.readouterr().err


def test_no_failure_is_status_0():
    assert run_command(print) == 0


@pytest.mark.parametrize(
    ('text', 'value'),
    [
        ('3', 3),
        ('007', 7),
        ('-1e-3', -1e-3),
        ('false', False),
        ('None', None),
        ('none', 'none'),
        ('vit_small', 'vit_small'),
        ('3/4', '3/4'),
        ('', ''),
        ('1,2', [1, 2]),
        ('[a,b]', ['a', 'b']),
        ('(0.9,0.95)', (0.9, 0.95)),
        ('[(1,2),[x]]', [(1, 2), ['x']]),
        ('/my photos/ü', '/my photos/ü'),
        ('[/my photos/a,/b]', ['/my photos/a', '/b']),
        ('"/a,b"', '/a,b'),
        ('dict(preset=vit_base, centred=True)', {'preset': 'vit_base', 'centred': True}),
        ('[dict(type="Hook",at=[1,2])]', [{'type': 'Hook', 'at': [1, 2]}]),
        ('dict(a=1', 'dict(a=1'),
        ('dict(**x)', 'dict(**x)'),
    ],
)
def test_values_of_options(text, value):
    found = parse_value(text)
    assert (found, type(found)) == (value, type(value))


def test_what_was_being_built_is_named_where_the_exception_does_not_say(capsys, monkeypatch):
    registry = pytest.importorskip('mmengine.registry')
    monkeypatch.delenv('SKIPLESS_TRACEBACK', raising=False)
    things = registry.Registry('named things')

    @things.register_module()
    class Wheel:
        def __init__(self, size):
            self.size = size + 1

    assert run_command(things.build, {'type': 'Wheel', 'size': 'x'}) == 2
    assert 'error: Wheel cannot be made from the config: can only concatenate' in capsys.readouterr().err


def test_an_interruption_is_one_line(capsys):
    def interrupted():
        raise KeyboardInterrupt

    assert run_command(interrupted) == 130
    assert capsys.readouterr().err == 'interrupted; what was written before is whole\n'


@pytest.mark.parametrize(
    'value',
    [1, 0.25, 1e-05, -2, True, None, 'soap', 'a/b.py', 'two words', 'a,b', '1', 'None', "it's", '', ' ', '[', 'nan',
     [4], [], (3,), (), (1, 'x'), [[1, 2], [3.5]], {}, dict(a=1, b=dict(c=[None, 'd,e'])), [dict(a=(1,))],
     float('inf')],
)  # fmt: skip
def test_an_option_is_read_back_as_it_was(value):
    found = parse_options([f'a.b={option_text(value)}'])
    assert found == {'a.b': value}
    assert type(found['a.b']) is type(value)


def test_of_an_option_given_twice_the_last_counts():
    assert parse_options(['a=1', 'b=x=y', 'a=2']) == {'a': 2, 'b': 'x=y'}


@pytest.mark.parametrize('word', ['a', '=1', ''])
def test_an_option_without_key_or_value_is_told(word):
    with pytest.raises(ValueError, match='expected KEY=VALUE'):
        parse_options([word])


@pytest.mark.parametrize(
    ('place', 'found'),
    [('size', 3), ('model.backbone.name', 'vit'), ('model.neck.width', None), ('size.x', None), ('nothing.here', None)],
)
def test_a_place_in_a_config(place, found):
    assert value_at(CONFIG, place) == found


def test_reading_a_config_fails_in_one_sentence(tmp_path):
    path = tmp_path / 'config.py'
    with pytest.raises(FileNotFoundError, match=r'config .*config.py does not exist'), reading_config(path):
        pytest.fail('the block must not run')
    path.write_text('x = (\n')
    with (
        pytest.raises(ValueError, match=r'config .*config.py cannot be read \(SyntaxError: .*\)$'),
        reading_config(path),
    ):
        compile(path.read_text(), str(path), 'exec')


@pytest.mark.parametrize(
    ('words', 'config', 'resume'),
    [
        (['a.py'], 'a.py', None),
        (['a.py', '--resume'], 'a.py', 'auto'),
        (['--resume', 'a.py'], 'a.py', 'auto'),
        (['--resume', 'x.pth', 'a.py'], 'a.py', 'x.pth'),
        (['a.py', '--resume', 'x.pth'], 'a.py', 'x.pth'),
    ],
)
def test_resume_stands_before_or_behind_the_config(words, config, resume):
    found = training_words('', ('none',), words)
    assert (found['config'], found['resume']) == (config, resume)


def test_a_command_line_without_a_config_is_refused(capsys):
    with pytest.raises(SystemExit):
        training_words('', ('none',), ['--resume', 'x.pth'])
    assert 'required: config' in capsys.readouterr().err
