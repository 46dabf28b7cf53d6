"""Sources of images: folders, packed arrays, scenes; what they refuse and how they replace broken files."""

from __future__ import annotations

import io
import os
import pickle
import shutil

import numpy as np
import pytest
import torch
from mmengine.registry import DATASETS
from PIL import Image

from pretrain.data import Draw, ImageFolder, PackedArrays, Scenes, collate_crops
from pretrain.data.images import UndecodableImage
from skipless.scenes import SceneSplit

WHOLE = dict(type='centre', size=8, resize=8)
RANDOM = dict(type='random_resized', size=8)


def picture(colour: int, size: tuple[int, int] = (8, 8)) -> Image.Image:
    return Image.new('RGB', size, (colour, 0, 0))


@pytest.fixture
def tree(tmp_path):
    for name in (
        'dog/b.jpg',
        'dog/sub/A.PNG',
        'cat/c.webp',
        'cat/d.tif',
        'cat/e.gif',
        'emu/f.BMP',
        'emu/g.JPeG',
    ):
        path = tmp_path / 'set' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(50).save(path)
    (tmp_path / 'set' / 'cat' / 'notes.txt').write_text('no image')
    (tmp_path / 'set' / 'cat' / '._c.webp').write_text('resource fork')
    (tmp_path / 'set' / '.cache').mkdir()
    picture(1).save(tmp_path / 'set' / '.cache' / 'x.png')
    return tmp_path / 'set'


def names(dataset: ImageFolder) -> list[str]:
    return [os.path.basename(path) for path in dataset.paths]


def test_class_folders_give_sorted_labels(tree):
    dataset = ImageFolder(tree, WHOLE)
    assert names(dataset) == ['c.webp', 'd.tif', 'e.gif', 'b.jpg', 'A.PNG', 'f.BMP', 'g.JPeG']
    assert dataset.labels.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert dataset.classes == ('cat', 'dog', 'emu')
    assert dataset.metainfo == {'classes': ('cat', 'dog', 'emu')}
    batch = collate_crops([dataset[i] for i in range(7)])
    assert batch['global_crops'].shape == (7, 1, 3, 8, 8)
    assert batch['label'].tolist() == dataset.labels.tolist()
    assert batch['bad'] == []


def test_images_at_the_top_make_the_folder_unlabelled(tree):
    picture(9).save(tree / 'top.png')
    dataset = ImageFolder(str(tree), WHOLE)
    assert len(dataset) == 8
    assert dataset.labels is None
    assert dataset[0]['label'] == -1
    with pytest.raises(ValueError, match=r"one folder per class, but 'top\.png' lies directly in .*labelled=False"):
        ImageFolder(tree, WHOLE, labelled=True)


def test_labels_can_be_ignored(tree):
    assert ImageFolder(tree, WHOLE, labelled=False).labels is None


def test_symbolic_links_are_followed_once_even_in_circles(tree, tmp_path):
    (tmp_path / 'link').symlink_to(tree)
    (tree / 'dog' / 'sub' / 'back').symlink_to(tree)
    (tree / 'emu' / 'alias.png').symlink_to(tree / 'emu' / 'f.BMP')
    assert len(ImageFolder(tmp_path / 'link', WHOLE)) == 8


def test_several_roots_are_joined(tree, tmp_path):
    (tmp_path / 'more' / 'cat').mkdir(parents=True)
    picture(7).save(tmp_path / 'more' / 'cat' / 'z.png')
    dataset = ImageFolder([tree, tmp_path / 'more'], WHOLE)
    assert len(dataset) == 8
    assert dataset.labels[-1] == 0
    with pytest.raises(ValueError, match='root is an empty list'):
        ImageFolder([], WHOLE)


def test_missing_empty_and_file_roots(tree, tmp_path):
    with pytest.raises(FileNotFoundError, match=r'there is no folder .*nowhere'):
        ImageFolder(tmp_path / 'nowhere', WHOLE)
    (tmp_path / 'empty').mkdir()
    with pytest.raises(FileNotFoundError, match=r'holds no image; .*\*\.jpg .*\*\.gif \(any case\)'):
        ImageFolder(tmp_path / 'empty', WHOLE)
    with pytest.raises(NotADirectoryError, match=r'b\.jpg is a file'):
        ImageFolder(tree / 'dog' / 'b.jpg', WHOLE)


def test_limit_is_evenly_spaced(tree):
    dataset = ImageFolder(tree, WHOLE, limit=3)
    assert len(dataset) == 3
    assert dataset.labels.tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match='limit=8 but there are 7 images'):
        ImageFolder(tree, WHOLE, limit=8)


def test_a_path_that_is_not_unicode(tmp_path):
    with open(os.fsencode(tmp_path) + b'/caf\xe9.png', 'wb') as file:
        picture(3).save(file, 'PNG')
    assert ImageFolder(tmp_path, WHOLE)[0]['global_crops'][0, 0, 0].tolist() == [3, 0, 0]


def test_the_folder_of_broken_files_is_usable_and_names_them(shared_data):
    dataset = ImageFolder(shared_data / 'broken', dict(type='multi', global_size=16, local_size=8, local_count=2))
    assert len(dataset) == 21
    items = [dataset[Draw(i, 100 + i)] for i in range(21)]
    batch = collate_crops(items)
    assert batch['global_crops'].shape == (21, 2, 3, 16, 16)
    named = {os.path.basename(message.split(': ')[0]) for message in batch['bad']}
    assert named == {'text.png', 'truncated.jpg', 'zero_byte.jpg'}
    for i, item in enumerate(items):
        assert (item['index'] != i) == (os.path.basename(dataset.paths[i]) in named)


def test_substitutes_are_repeatable_and_vary_with_the_key(tmp_path):
    (tmp_path / 'a.jpg').write_bytes(b'')
    for colour in range(1, 60):
        picture(colour).save(tmp_path / f'b{colour:02}.png')
    dataset = ImageFolder(tmp_path, WHOLE)
    chosen = [dataset[Draw(0, key)]['index'] for key in range(40)]
    assert chosen == [dataset[Draw(0, key)]['index'] for key in range(40)]
    assert len(set(chosen)) > 15
    item = dataset[Draw(0, 5)]
    assert item['global_crops'][0, 0, 0, 0] == item['index']
    assert item['bad'] == [f'{tmp_path / "a.jpg"}: empty file (0 bytes)']


def test_when_everything_is_broken_there_is_an_end(tmp_path):
    for i in range(3):
        (tmp_path / f'{i}.jpg').write_bytes(b'')
    with pytest.raises(ValueError, match=r'32 images drawn in a row cannot be decoded .*empty file'):
        ImageFolder(tmp_path, WHOLE)[0]


def test_a_file_removed_after_the_scan_is_replaced(tree):
    dataset = ImageFolder(tree, WHOLE)
    os.remove(dataset.paths[0])
    assert 'cannot be read' in dataset[0]['bad'][0]


def test_files_come_out_as_pillow_reads_them(shared_data):
    folder = shared_data / 'imagenet1k_sample' / 'train'
    dataset = ImageFolder(folder, dict(type='centre', size=64, resize=64), limit=4)
    assert len(dataset) == 4
    for i, path in enumerate(dataset.paths[int(row)] for row in dataset._rows):
        with Image.open(path) as image:
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            expected = np.asarray(image.crop((left, top, left + side, top + side)).resize((64, 64))).astype(float)
        assert np.abs(dataset[i]['global_crops'][0].numpy() - expected).mean() < 4


def encode(colour: int, size: tuple[int, int] = (8, 8)) -> bytes:
    buffer = io.BytesIO()
    picture(colour, size).save(buffer, 'PNG')
    return buffer.getvalue()


def pack(files: list[bytes], **others) -> dict[str, np.ndarray]:
    return {
        'train_bytes': np.frombuffer(b''.join(files), np.uint8),
        'train_offsets': np.cumsum([0, *map(len, files)]),
        **others,
    }


def saved(tmp_path, save=np.savez, **arrays) -> str:
    path = str(tmp_path / 'set.npz')
    save(path, **arrays)
    return path


@pytest.mark.parametrize('save', [np.savez, np.savez_compressed])
@pytest.mark.parametrize('gray', [False, True])
def test_packed_pixels(tmp_path, save, gray):
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8) if gray else (5, 8, 8, 3), np.uint8)
    path = saved(tmp_path, save, val_images=images, val_labels=np.array([2, 0, 1, 1, 0]), class_names=['a', 'b', 'c'])
    dataset = DATASETS.build(dict(type='PackedArrays', path=path, split='val', crops=WHOLE))
    assert dataset.classes == ('a', 'b', 'c')
    for i in range(5):
        expected = np.repeat(images[i][..., None], 3, -1) if gray else images[i]
        assert np.array_equal(dataset[i]['global_crops'][0].numpy(), expected)
    assert [dataset[i]['label'] for i in range(5)] == [2, 0, 1, 1, 0]
    assert isinstance(dataset._arrays['val_images'], np.memmap) == (save is np.savez)


def test_a_pickled_dataset_carries_no_pixels(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (200, 32, 32, 3), np.uint8)
    dataset = PackedArrays(saved(tmp_path, train_images=images), WHOLE)
    expected = dataset[3]['global_crops']
    data = pickle.dumps(dataset)
    assert len(data) < 10_000
    assert torch.equal(pickle.loads(data)[3]['global_crops'], expected)


def test_packed_files_are_decoded_once(tmp_path, monkeypatch):
    dataset = PackedArrays(saved(tmp_path, **pack([encode(c) for c in range(6)])), WHOLE)
    monkeypatch.delattr('pretrain.data.datasets.EncodedPicture')
    assert [int(dataset[i]['global_crops'][0, 0, 0, 0]) for i in range(6)] == list(range(6))
    assert dataset.labels is None


def test_packed_files_of_several_sizes_are_decoded_when_drawn(tmp_path):
    files = [encode(1), encode(2, (20, 9)), b'', encode(3)]
    dataset = PackedArrays(saved(tmp_path, **pack(files)), WHOLE)
    assert [int(dataset[i]['global_crops'][0, 0, 0, 0]) for i in (0, 1, 3)] == [1, 2, 3]


def test_damaged_packed_files_are_named_and_replaced(tmp_path):
    path = saved(tmp_path, **pack([encode(1), b'no image', encode(3)]))
    item = PackedArrays(path, WHOLE)[1]
    assert item['bad'][0] == f'{path}[train, 1]: not an image of a known format'
    assert item['index'] in (0, 2)


def test_damaged_image_is_raised_anew_each_time_and_survives_pickling(tmp_path):
    dataset = PackedArrays(saved(tmp_path, **pack([encode(1), b'no image', encode(3)])), WHOLE)
    dataset = pickle.loads(pickle.dumps(dataset))  # as a started worker process gets it
    raised = []
    for _ in range(2):
        with pytest.raises(UndecodableImage) as caught:
            dataset.open(1)
        raised.append(caught.value)
    assert raised[0] is not raised[1]
    assert str(raised[0]) == f'{dataset.name_of(1)}: not an image of a known format'
    copy = pickle.loads(pickle.dumps(raised[0]))
    assert (str(copy), copy.reason) == (str(raised[0]), 'not an image of a known format')


def test_cifar10(shared_data):
    path = shared_data / 'cifar10' / 'cifar10_jpeg.npz'
    dataset = PackedArrays(path, dict(type='centre', size=32, resize=32), split='test', limit=50)
    assert dataset.classes[6] == 'frog'
    assert np.bincount(dataset.labels).tolist() == [5] * 10
    with np.load(path) as arrays:
        offsets = arrays['test_offsets']
        data = arrays['test_bytes'][offsets[200] : offsets[201]].tobytes()
    expected = np.asarray(Image.open(io.BytesIO(data)).convert('RGB'))
    assert np.array_equal(dataset[1]['global_crops'][0].numpy(), expected)


SOUND = pack([encode(c) for c in range(3)])


@pytest.mark.parametrize(
    ('arrays', 'message'),
    [
        (dict(other=np.zeros(3)), "no array 'train_bytes', needed for the split 'train' .*it holds other"),
        (dict(train_bytes=SOUND['train_bytes']), "no array 'train_offsets'"),
        ({**SOUND, 'train_offsets': SOUND['train_offsets'] + 1}, 'train_offsets of .* is inconsistent'),
        ({**SOUND, 'train_offsets': SOUND['train_offsets'][::-1]}, 'never decrease'),
        ({**SOUND, 'train_offsets': SOUND['train_offsets'] * 1.0}, 'inconsistent'),
        ({**SOUND, 'train_bytes': np.zeros((3, 2), np.uint8)}, r'train_bytes of .* is uint8 \(3, 2\)'),
        (dict(train_images=np.zeros((2, 4, 4, 3))), r'is float64 \(2, 4, 4, 3\); expected uint8'),
        (dict(train_images=np.zeros((2, 3, 4, 4), np.uint8)), r'is uint8 \(2, 3, 4, 4\)'),
        (dict(train_images=np.zeros((2, 0, 4, 3), np.uint8)), r'is uint8 \(2, 0, 4, 3\)'),
        ({**SOUND, 'train_labels': np.zeros(2, int)}, 'expected one integer for each of the 3 images'),
        ({**SOUND, 'train_labels': np.zeros(3)}, 'train_labels of .* is float64'),
        ({**SOUND, 'train_labels': np.array([0, 2, 1]), 'class_names': ['a', 'b']},
         r'label 2 of image 1 \(train_labels of .*set.npz\) is outside the classes \(0 to 1\)'),
        ({**SOUND, 'train_labels': np.array([0, 1, -1])}, r'label -1 of image 2 .*\(0 and up\)'),
        (dict(train_images=np.array([None, 'x'], dtype=object)), "'train_images' of .* cannot be read"),
    ],
)  # fmt: skip
def test_bad_arrays_are_one_sentence(tmp_path, arrays, message):
    with pytest.raises(ValueError, match=message) as caught:
        PackedArrays(saved(tmp_path, **arrays), WHOLE)
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize('root', [None, 3, [3]])
def test_a_root_is_a_path_or_several(root):
    with pytest.raises(ValueError, match=r'ImageFolder: root=.*; expected the path'):
        ImageFolder(root, WHOLE)


@pytest.mark.parametrize('limit', [0, 1.5, '2'])
def test_a_limit_is_a_whole_number(tmp_path, limit):
    with pytest.raises(ValueError, match=r'PackedArrays: limit=.*: expected a whole number >= 1'):
        PackedArrays(saved(tmp_path, **SOUND), WHOLE, limit=limit)


def test_labels_can_be_demanded_or_ignored(tmp_path):
    path = saved(tmp_path, **SOUND)
    with pytest.raises(ValueError, match="no array 'train_labels', needed for labelled=True"):
        PackedArrays(path, WHOLE, labelled=True)
    path = saved(tmp_path, **SOUND, train_labels=np.array([1, 0, 1]))
    assert PackedArrays(path, WHOLE, labelled=False)[0]['label'] == -1
    assert PackedArrays(path, WHOLE)[0]['label'] == 1


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r'there is no file .*gone\.npz'):
        PackedArrays(tmp_path / 'gone.npz', WHOLE)
    (tmp_path / 'text.npz').write_text('hello')
    with pytest.raises(ValueError, match=r'text\.npz is not an \.npz file'):
        PackedArrays(tmp_path / 'text.npz', WHOLE)
    shutil.make_archive(str(tmp_path / 'zip'), 'zip', tmp_path, 'text.npz')
    with pytest.raises(ValueError, match='it holds nothing'):
        PackedArrays(tmp_path / 'zip.zip', WHOLE)


@pytest.mark.parametrize('cache', [True, False])
def test_scenes_are_those_of_the_split(cache):
    dataset = Scenes(dict(type='centre', size=24, resize=24), split='val', length=3, size=24, seed=5, cache=cache)
    assert len(dataset) == 3
    expected = SceneSplit(seed=5, split='val', length=3, size=24)
    for i in range(3):
        assert np.array_equal(dataset[i]['global_crops'][0].numpy(), expected[i].image)
    assert dataset[0]['label'] == -1
    assert (dataset._rendered is not None) == cache


@pytest.mark.parametrize('text', ['no', 'False', 0])
def test_text_is_no_flag(tmp_path, tree, text):
    with pytest.raises(ValueError, match=r'Scenes: cache=.*: expected True or False'):
        Scenes(WHOLE, length=2, size=16, cache=text)
    with pytest.raises(ValueError, match=r'ImageFolder: labelled=.*: expected True or False'):
        ImageFolder(tree, WHOLE, labelled=text)
    with pytest.raises(ValueError, match=r'PackedArrays: labelled=.*: expected True or False'):
        PackedArrays(saved(tmp_path, **SOUND), WHOLE, labelled=text)


def test_scenes_refuse_an_unknown_split():
    with pytest.raises(ValueError, match='tset'):
        Scenes(RANDOM, split='tset', length=2, size=16)
