"""Files appear whole or not at all."""

import json
import subprocess
import sys
import time

import pytest

from skipless.files import appears_whole, finite, remove_unfinished, write_json


def test_an_exception_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / 'a.txt'
    path.write_text('old')

    def fail():
        with appears_whole(path) as part:
            part.write_text('half')
            raise RuntimeError('full disk')

    with pytest.raises(RuntimeError, match='full disk'):
        fail()
    assert path.read_text() == 'old'
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_told_with_the_file(tmp_path):
    def fail():
        with appears_whole(tmp_path / 'a.txt') as part:
            part.write_text('half')
            raise OSError(28, 'No space left on device')

    with pytest.raises(OSError, match=r'No space left on device.*a\.txt'):
        fail()
    assert not list(tmp_path.iterdir())


def test_a_killed_writer_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / 'a.txt'
    path.write_text('old')
    code = (
        'import sys, time; from skipless.files import appears_whole\n'
        'with appears_whole(sys.argv[1]) as part:\n'
        '    part.write_text("half"); print("written", flush=True); time.sleep(60)'
    )
    with subprocess.Popen([sys.executable, '-c', code, str(path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == b'written\n'
        writer.kill()
    assert path.read_text() == 'old'
    assert len(list(tmp_path.iterdir())) == 2
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_readers_never_see_half_a_file(tmp_path):
    path, size = tmp_path / 'a.json', 200_000
    write_json(path, [0] * size)
    code = (
        'import sys; from skipless.files import write_json\n'
        'for i in range(1, 30): write_json(sys.argv[1], [i % 10] * int(sys.argv[2]))'
    )
    with subprocess.Popen([sys.executable, '-c', code, str(path), str(size)]) as writer:
        seen = set()
        while writer.poll() is None:
            content = json.loads(path.read_text())
            assert len(content) == size
            seen.add(content[0])
            time.sleep(0.01)
    assert writer.returncode == 0
    assert len(seen) > 1


def test_json_says_null_where_it_has_no_number(tmp_path):
    nan, infinity = float('nan'), float('inf')
    content = {'a': nan, 'b': [1.5, -infinity, (infinity, 2)], 'c': {'d': True, 'e': 'x'}}
    assert finite(content) == {'a': None, 'b': [1.5, None, [None, 2]], 'c': {'d': True, 'e': 'x'}}
    write_json(tmp_path / 'a.json', content | {'path': tmp_path})
    assert json.loads((tmp_path / 'a.json').read_text()) == finite(content) | {'path': str(tmp_path)}
