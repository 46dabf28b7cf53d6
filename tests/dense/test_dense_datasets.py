from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mmengine.dataset import pseudo_collate
from mmseg.datasets.transforms import LoadAnnotations
from mmseg.registry import DATASETS, MODELS, TRANSFORMS
from PIL import Image

import dense.datasets
from dense.datasets import ADE20KSegmentation, CamVidSegmentation, NYUDepth, ScenesDepth, ScenesSegmentation
from dense.transforms import LoadDepthMap, LoadLabelMap
from skipless.scenes import CLASSES, SceneSplit

PACK = [dict(type='PackSegInputs')]


# ---------------------------------------------------------------------------------------------- embedded scenes


def test_scenes_carry_image_class_and_depth() -> None:
    scene = SceneSplit(seed=3, split='val', length=4, size=(24, 32))[2]
    options: dict[str, Any] = dict(split='val', length=4, size=[24, 32], seed=3, pipeline=PACK)
    item = ScenesSegmentation(**options)[2]
    assert np.array_equal(item['inputs'].permute(1, 2, 0).numpy()[..., ::-1], scene.image)  # BGR, as mmseg has it
    assert np.array_equal(item['data_samples'].gt_sem_seg.data[0].numpy(), scene.label)
    assert item['data_samples'].ori_shape == (24, 32)
    depth = ScenesDepth(**options)[2]['data_samples'].gt_depth_map.data[0].numpy()
    sky = scene.label == CLASSES.index('sky')
    assert np.array_equal(depth[~sky], scene.depth[~sky])
    assert not depth[sky].any()
    assert depth.dtype == np.float32


def test_some_scene_has_sky_whose_depth_is_unknown() -> None:
    data = ScenesDepth(length=12, size=16, pipeline=PACK)
    assert any((item['data_samples'].gt_depth_map.data == 0).any() for item in data)


def test_the_network_sees_rgb_normalised_as_in_pretraining() -> None:
    item = ScenesSegmentation(length=1, size=16, pipeline=PACK)[0]
    preprocessor = MODELS.build(
        dict(
            type='SegDataPreProcessor',
            mean=[123.675, 116.28, 103.53],
            std=[58.395, 57.12, 57.375],
            bgr_to_rgb=True,
            size_divisor=1,
        )
    )
    inputs = preprocessor(pseudo_collate([item]), training=True)['inputs'][0].numpy()
    image = SceneSplit(seed=0, split='train', length=1, size=16)[0].image / 255.0
    expected = (image - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(inputs.transpose(1, 2, 0), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('cache', [True, False])
def test_cache_renders_each_scene_once(cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[int] = []

    class Counted(SceneSplit):
        def __getitem__(self, position: Any) -> Any:
            rendered.append(position)
            return super().__getitem__(position)

    monkeypatch.setattr(dense.datasets, 'SceneSplit', Counted)
    data = ScenesSegmentation(length=3, size=16, cache=cache, pipeline=PACK)
    first = data[1]
    first['inputs'].zero_()
    first['data_samples'].gt_sem_seg.data.zero_()
    again = data[1]
    assert again['inputs'].any()  # a consumer cannot spoil the cache
    assert again['data_samples'].gt_sem_seg.data.any()
    assert rendered == ([1] if cache else [1, 1])


def test_flips_move_image_and_target_together() -> None:
    for kind in (ScenesSegmentation, ScenesDepth):
        plain = kind(length=1, size=16, pipeline=PACK)[0]
        flipped = kind(length=1, size=16, pipeline=[dict(type='RandomFlip', prob=1.0), *PACK])[0]
        key = 'gt_sem_seg' if kind is ScenesSegmentation else 'gt_depth_map'
        assert torch.equal(flipped['inputs'], plain['inputs'].flip(-1))
        assert torch.equal(flipped['data_samples'].get(key).data, plain['data_samples'].get(key).data.flip(-1))


def test_scenes_of_fewer_classes() -> None:
    plain = ScenesSegmentation(length=1, size=24, pipeline=PACK)[0]['data_samples'].gt_sem_seg.data
    chosen = ('wall', 'floor')
    fewer = ScenesSegmentation(length=1, size=24, metainfo=dict(classes=chosen), pipeline=PACK)[0]
    expected = torch.full_like(plain, 255)
    for new, name in enumerate(chosen):
        expected[plain == CLASSES.index(name)] = new
    assert torch.equal(fewer['data_samples'].gt_sem_seg.data, expected)


# ------------------------------------------------------------------------------------------------ label maps


def label_results(path: Path, array: np.ndarray, **more: Any) -> dict:
    Image.fromarray(array).save(path)
    return {'seg_map_path': str(path), 'seg_fields': [], 'reduce_zero_label': False, **more}


@pytest.mark.parametrize(
    'more', [{}, {'reduce_zero_label': True}, {'label_map': {0: 2, 1: 255, 2: 0}}, {'label_map': {2: 0, 0: 1, 1: 2}}]
)
def test_labels_are_loaded_as_mmseg_does(tmp_path: Path, more: dict[str, Any]) -> None:
    labels = np.random.default_rng(0).choice([0, 1, 2, 255], (9, 7)).astype(np.uint8)
    results = label_results(tmp_path / 'a.png', labels, **more)
    ours = LoadLabelMap(num_classes=3)({**results, 'seg_fields': []})
    theirs = LoadAnnotations()({**results, 'seg_fields': []})
    assert np.array_equal(ours['gt_seg_map'], theirs['gt_seg_map'])
    assert ours['seg_fields'] == ['gt_seg_map']


@pytest.mark.parametrize('value', [3, 254, 300])
def test_a_label_outside_the_classes_is_named(tmp_path: Path, value: int) -> None:
    """300 would be 44 after mmseg's cast to 8 bit."""
    labels = np.zeros((4, 4), np.uint16)
    labels[1, 2] = value
    with pytest.raises(ValueError, match=rf'b\.png: value {value} is no class \(1 pixels'):
        LoadLabelMap(num_classes=3)(label_results(tmp_path / 'b.png', labels))


def test_a_label_map_that_is_a_picture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'c\.png is uint8 of shape \(4, 4, 3\)'):
        LoadLabelMap(num_classes=3)(label_results(tmp_path / 'c.png', np.zeros((4, 4, 3), np.uint8)))
    (tmp_path / 'd.png').write_text('no image')
    with pytest.raises(ValueError, match=r'd\.png cannot be read'):
        LoadLabelMap(num_classes=3)({'seg_map_path': str(tmp_path / 'd.png'), 'seg_fields': []})


def test_palette_labels_are_indices(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 1], [2, 1]], np.uint8), mode='P')
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    image.save(tmp_path / 'p.png')
    loaded = LoadLabelMap(num_classes=3)({'seg_map_path': str(tmp_path / 'p.png'), 'seg_fields': []})
    assert loaded['gt_seg_map'].tolist() == [[0, 1], [2, 1]]


# ------------------------------------------------------------------------------------------------ depth maps


def depth_results(path: Path, array: np.ndarray) -> dict:
    Image.fromarray(array).save(path)
    return {'depth_map_path': str(path), 'seg_fields': []}


def test_depth_is_in_metres_and_capped(tmp_path: Path) -> None:
    raw = np.array([[0, 1, 1500, 10000, 10001, 65535]], np.uint16)
    results = depth_results(tmp_path / 'a.png', raw)
    depth = LoadDepthMap(scale=1e-3, max_depth=10.0)(results)['gt_depth_map']
    np.testing.assert_allclose(depth, [[0, 0.001, 1.5, 10, 0, 0]], rtol=1e-6)
    assert depth.dtype == np.float32
    kitti = LoadDepthMap(scale=1 / 256)(depth_results(tmp_path / 'a.png', raw))['gt_depth_map']
    np.testing.assert_allclose(kitti, raw / 256.0, rtol=1e-6)


@pytest.mark.parametrize('array', [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3), np.uint8)])
def test_depth_of_another_type_is_refused(tmp_path: Path, array: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r'x\.png is uint8 .* expected one 16-bit channel'):
        LoadDepthMap()(depth_results(tmp_path / 'x.png', array))


@pytest.mark.parametrize('options', [dict(scale=0), dict(scale='mm'), dict(scale=-1.0), dict(max_depth=0)])
def test_a_unit_of_depth_that_is_none_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf'LoadDepthMap\.{next(iter(options))}='):
        LoadDepthMap(**options)


def test_resizing_and_padding_keep_depth_true(tmp_path: Path) -> None:
    """Values of a resized map occur in the original one, and what a batch pads is unknown."""
    raw = np.random.default_rng(0).integers(500, 9000, (20, 30)).astype(np.uint16)
    results = LoadDepthMap()(depth_results(tmp_path / 'a.png', raw))
    results['img'] = np.zeros((20, 30, 3), np.uint8)
    resized = TRANSFORMS.build(dict(type='Resize', scale=(21, 14), keep_ratio=False))(results)
    assert resized['gt_depth_map'].shape == (14, 21)
    assert np.isin(resized['gt_depth_map'], raw.astype(np.float32) * np.float32(1e-3)).all()
    small = TRANSFORMS.build(dict(type='PackSegInputs'))(resized)
    large = ScenesDepth(length=1, size=32, pipeline=PACK)[0]
    preprocessor = MODELS.build(dict(type='SegDataPreProcessor', size_divisor=1, seg_pad_val=0))
    batch = preprocessor(pseudo_collate([small, large]), training=True)
    padded = batch['data_samples'][0].gt_depth_map.data[0]
    assert padded.shape == (32, 32)
    assert not padded[14:].any()
    assert not padded[:, 21:].any()


# -------------------------------------------------------------------------------------------- image folders


def write_image(path: Path, array: np.ndarray | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((8, 10, 3), np.uint8) if array is None else array).save(path)


@pytest.fixture
def camvid(tmp_path: Path) -> Path:
    root = tmp_path / 'camvid'
    for split, names in (('train', ('a', 'b', 'c')), ('val', ('d',))):
        for name in names:
            write_image(root / split / f'{name}.jpg')
            write_image(root / f'{split}annot' / f'{name}.png', np.full((8, 10), 11, np.uint8))
    return root


def names(dataset: Any) -> list[str]:
    return [Path(dataset.get_data_info(i)['img_path']).name for i in range(len(dataset))]


def test_camvid_by_folders_or_lists(camvid: Path) -> None:
    assert names(CamVidSegmentation(data_root=str(camvid), split='train')) == ['a.jpg', 'b.jpg', 'c.jpg']
    assert names(CamVidSegmentation(data_root=str(camvid), split='val')) == ['d.jpg']
    (camvid / 'train.txt').write_text('train/c.jpg trainannot/c.png\n/SegNet/CamVid/train/a.jpg /x/trainannot/a.png\n')
    listed = CamVidSegmentation(data_root=str(camvid), split='train')
    assert names(listed) == ['c.jpg', 'a.jpg']
    assert listed.get_data_info(1)['seg_map_path'] == str(camvid / 'trainannot' / 'a.png')


@pytest.mark.parametrize('loader', [dict(type='LoadLabelMap', num_classes=11), dict(type='LoadAnnotations')])
def test_camvid_void_is_ignored(camvid: Path, loader: dict) -> None:
    pipeline = [dict(type='LoadImageFromFile'), loader, *PACK]
    item = CamVidSegmentation(data_root=str(camvid), split='val', pipeline=pipeline)[0]
    assert (item['data_samples'].gt_sem_seg.data == 255).all()


def test_ade20k_pairs_by_stem(tmp_path: Path) -> None:
    write_image(tmp_path / 'images' / 'training' / 'ADE_1.jpg', np.zeros((1, 3, 3), np.uint8))
    write_image(tmp_path / 'annotations' / 'training' / 'ADE_1.png', np.array([[0, 1, 150]], np.uint8))
    prefix = dict(img_path='images/training', seg_map_path='annotations/training')
    pipeline = [dict(type='LoadImageFromFile'), dict(type='LoadLabelMap'), *PACK]
    item = ADE20KSegmentation(data_root=str(tmp_path), data_prefix=prefix, pipeline=pipeline)[0]
    assert item['data_samples'].gt_sem_seg.data.tolist() == [[[255, 0, 149]]]
    assert item['data_samples'].reduce_zero_label is True  # so that predictions are written as 1-150


def ade20k(root: Path, count: int, **options: Any) -> ADE20KSegmentation:
    for number in range(count):
        write_image(root / 'images' / f'{number:02d}.png')
        write_image(root / 'annotations' / f'{number:02d}.png', np.ones((8, 10), np.uint8))
    pipeline = [dict(type='LoadImageFromFile'), dict(type='LoadLabelMap'), *PACK]
    prefix = dict(img_path='images', seg_map_path='annotations')
    return ADE20KSegmentation(data_root=str(root), data_prefix=prefix, pipeline=pipeline, **options)


def test_an_annotation_of_another_size_than_its_image_is_refused(tmp_path: Path) -> None:
    data = ade20k(tmp_path, 1)
    write_image(tmp_path / 'annotations' / '00.png', np.ones((16, 20), np.uint8))
    with pytest.raises(ValueError, match=r'annotations/00.png is 20 x 16 and its image .*images/00.png is 10 x 8'):
        data[0]
    write_image(tmp_path / 'depth.png', np.ones((10, 8), np.uint16))  # the other way up
    results = dict(depth_map_path=tmp_path / 'depth.png', img_path='x.jpg', ori_shape=(8, 10), seg_fields=[])
    with pytest.raises(ValueError, match=r'depth\.png is 8 x 10 and its image x\.jpg is 10 x 8'):
        LoadDepthMap()(results)


@pytest.mark.parametrize('content', [b'', b'no image', None])
def test_an_unreadable_image_is_replaced_in_training_and_an_error_in_evaluation(
    tmp_path: Path, content: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(dense.datasets, 'print_log', lambda text, **_: told.append(text))
    data = ade20k(tmp_path, 20)
    bad = tmp_path / 'images' / '03.png'
    bad.write_bytes(bad.read_bytes()[:40] if content is None else content)
    for _ in range(3):  # one of 20, however often it is met
        assert data[3]['data_samples'].img_path != str(bad)
    assert [text.partition('03.png ')[2] for text in told] == [
        'cannot be decoded; others take its place (1 of 20 so far)'
    ]
    with pytest.raises(ValueError, match=r'image .*images/03.png cannot be decoded; results without it'):
        ade20k(tmp_path, 0, test_mode=True)[3]
    (tmp_path / 'images' / '07.png').write_bytes(b'')
    with pytest.raises(ValueError, match='so 2 of 20 images could not, more than 5%'):
        data[7]


@pytest.fixture
def nyu(tmp_path: Path) -> Path:
    root = tmp_path / 'nyu'
    for name in ('kitchen_0001_00', 'kitchen_0001_04', 'study_0002_00'):
        write_image(root / 'images' / 'test' / f'{name}.jpg')
        write_image(root / 'annotations' / 'test' / f'{name}.png', np.full((8, 10), 2000, np.uint16))
    (root / 'splits').mkdir()
    (root / 'splits' / 'near.txt').write_text('kitchen_0001_04\nkitchen_0001_00\n')
    (root / 'splits' / 'far.txt').write_text('study_0002_00\n')
    return root


def test_nyu_lists_and_subsets(nyu: Path) -> None:
    prefix = dict(img_path='images/test', depth_map_path='annotations/test')
    options: dict[str, Any] = dict(data_root=str(nyu), data_prefix=prefix)
    assert len(NYUDepth(**options)) == 3
    assert names(NYUDepth(ann_file='splits/far.txt', **options)) == ['study_0002_00.jpg']
    subsets = dict(far='splits/far.txt', near='splits/near.txt')
    meta_keys = ('img_path', 'ori_shape', 'subset')
    pipeline = [
        dict(type='LoadImageFromFile'),
        dict(type='LoadDepthMap'),
        dict(type='PackSegInputs', meta_keys=meta_keys),
    ]
    items = list(NYUDepth(subsets=subsets, pipeline=pipeline, **options))
    assert [item['data_samples'].subset for item in items] == ['far', 'near', 'near']
    assert (items[0]['data_samples'].gt_depth_map.data == 2).all()
    with pytest.raises(ValueError, match='either'):
        NYUDepth(subsets=subsets, ann_file='splits/far.txt', **options)


def remove(path: Path) -> Callable[[Path], None]:
    return lambda root: (root / path).unlink()


@pytest.mark.parametrize(
    ('spoil', 'message'),
    [
        (lambda root: (root / 'val' / 'd.jpg').unlink(), r'val holds no image.*trainannot|val holds no image'),
        (lambda root: (root / 'val').rename(root / 'other'), r'val does not exist.*data_root'),
        (remove(Path('valannot/d.png')), r'annotation .*valannot/d\.png of .*val/d\.jpg .* 1 of 1 images'),
        (
            lambda root: (root / 'val.txt').write_text('val/e.jpg valannot/e.png'),
            r'e\.jpg, listed in .*val\.txt line 1',
        ),
        (lambda root: (root / 'val.txt').write_text(''), r'val\.txt is empty'),
    ],
)
def test_missing_files_are_named(camvid: Path, spoil: Callable[[Path], Any], message: str) -> None:
    spoil(camvid)
    with pytest.raises(FileNotFoundError, match=message):
        CamVidSegmentation(data_root=str(camvid), split='val')


def test_a_line_that_is_no_pair_is_named(camvid: Path) -> None:
    (camvid / 'val.txt').write_text('val/d.jpg valannot/d.png\nval/d.jpg\n')
    with pytest.raises(ValueError, match=r'val\.txt line 2'):
        CamVidSegmentation(data_root=str(camvid), split='val')


def test_a_list_that_is_no_text_is_named(camvid: Path) -> None:
    (camvid / 'val.txt').write_bytes(b'\xff\xfe\x00')
    with pytest.raises(ValueError, match=r'list .*val\.txt is no UTF-8 text'):
        CamVidSegmentation(data_root=str(camvid), split='val')


def test_two_images_of_one_annotation_are_named(camvid: Path) -> None:
    (camvid / 'val.txt').unlink(missing_ok=True)
    (camvid / 'val' / 'd.png').write_bytes((camvid / 'val' / 'd.jpg').read_bytes())
    with pytest.raises(ValueError, match=r'd\.jpg and .*d\.png differ in nothing but the suffix'):
        CamVidSegmentation(data_root=str(camvid), split='val')


def test_a_slip_in_the_folders_is_named(nyu: Path) -> None:
    prefix = dict(img_path='images/test', depth_map_path='annotations/test', img_pth='images')
    with pytest.raises(ValueError, match='names depth_map_path, img_path, img_pth; expected depth_map_path, img_path'):
        NYUDepth(data_root=str(nyu), data_prefix=prefix)
    with pytest.raises(ValueError, match=r"dataset\.subsets='far'"):
        NYUDepth(data_root=str(nyu), subsets='far')  # type: ignore[arg-type]


def test_a_listed_stem_without_image_is_named(nyu: Path) -> None:
    (nyu / 'splits' / 'far.txt').write_text('study_0002_00\nstudy_0009_00\n')
    prefix = dict(img_path='images/test', depth_map_path='annotations/test')
    with pytest.raises(FileNotFoundError, match='study_0009_00'):
        NYUDepth(data_root=str(nyu), data_prefix=prefix, ann_file='splits/far.txt')
    with pytest.raises(FileNotFoundError, match=r'none\.txt does not exist; correct ann_file or subsets'):
        NYUDepth(data_root=str(nyu), data_prefix=prefix, ann_file='splits/none.txt')


# ------------------------------------------------------------------------------------------------- real data


@pytest.mark.parametrize(('split', 'count'), [('train', 367), ('val', 101), ('test', 233)])
def test_real_camvid(shared_data: Path, split: str, count: int) -> None:
    pipeline = [dict(type='LoadImageFromFile'), dict(type='LoadLabelMap', num_classes=11), *PACK]
    data = CamVidSegmentation(data_root=str(shared_data / 'camvid'), split=split, pipeline=pipeline)
    assert len(data) == count
    labels = data[count // 2]['data_samples'].gt_sem_seg.data
    assert labels.shape == (1, 240, 320)
    assert set(labels.unique().tolist()) <= {*range(11), 255}


def test_real_ade20k(shared_data: Path) -> None:
    prefix = dict(img_path='images/validation', seg_map_path='annotations/validation')
    pipeline = [dict(type='LoadImageFromFile'), dict(type='LoadLabelMap', num_classes=150), *PACK]
    options: dict[str, Any] = dict(data_root=str(shared_data / 'ade20k'), data_prefix=prefix)
    ours = ADE20KSegmentation(pipeline=pipeline, **options)
    pipeline = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'), *PACK]
    theirs = DATASETS.build(dict(type='ADE20KDataset', pipeline=pipeline, **options))
    assert len(ours) == len(theirs) == 3
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a['data_samples'].gt_sem_seg.data, b['data_samples'].gt_sem_seg.data)


def test_real_nyu_style(shared_data: Path) -> None:
    root = str(shared_data / 'nyu_style')
    assert len(NYUDepth(data_root=root, ann_file='splits/train.txt')) == 326
    data = NYUDepth(
        data_root=root,
        data_prefix=dict(img_path='images/test', depth_map_path='annotations/test'),
        subsets=dict(in_scene='splits/test_inscene.txt', cross_scene='splits/test_crossscene.txt'),
        pipeline=[dict(type='LoadImageFromFile'), dict(type='LoadDepthMap', max_depth=10.0), *PACK],
    )
    subsets = [data.get_data_info(i)['subset'] for i in range(len(data))]
    assert (subsets.count('in_scene'), subsets.count('cross_scene')) == (38, 16)
    depth = data[0]['data_samples'].gt_depth_map.data
    assert 0.3 < depth[depth > 0].median() < 8
    assert 0.3 < (depth > 0).float().mean() < 1
