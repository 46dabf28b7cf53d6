"""Decoding: every awkward or broken file becomes what a person expects, or a reason."""

from __future__ import annotations

import io
import os

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from pretrain.data.images import (
    EncodedPicture,
    UndecodableImage,
    is_image_name,
    largest_reduction,
    open_picture,
)


def encode(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def decode(data: bytes) -> np.ndarray:
    return EncodedPicture(data, 'test').decode().numpy()


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), np.uint8)


GOOD_FILES = {
    'animated.gif': (120, 90),
    'animated.webp': (120, 90),
    'bmp.bmp': (96, 72),
    'cmyk.jpg': (320, 213),
    'exif_orientation3.jpg': (256, 320),
    'exif_orientation6.jpg': (240, 320),
    'exif_reference_upright.jpg': (256, 320),
    'gray.jpg': (320, 211),
    'gray.png': (320, 213),
    'gray16.png': (320, 240),
    'lossy.webp': (320, 214),
    'name with space ü 图.jpg': (256, 320),
    'one_by_one.jpg': (1, 1),
    'palette.png': (213, 320),
    'progressive.jpg': (256, 320),
    'rgba.png': (320, 214),
    'tiff.tif': (160, 120),
    'wide_4000x16.jpg': (4000, 16),
}
BAD_FILES = {'text.png': 'not an image', 'truncated.jpg': 'truncated', 'zero_byte.jpg': 'empty file'}


@pytest.mark.parametrize('name', GOOD_FILES)
def test_awkward_files_decode_to_upright_rgb(shared_data, name):
    picture = open_picture(str(shared_data / 'broken' / name))
    pixels = picture.decode()
    assert picture.size == GOOD_FILES[name]
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (picture.size[1], picture.size[0], 3)


@pytest.mark.parametrize('name', BAD_FILES)
def test_broken_files_raise_one_sentence_with_path_and_reason(shared_data, name):
    path = str(shared_data / 'broken' / name)
    with pytest.raises(UndecodableImage, match=BAD_FILES[name]) as caught:
        open_picture(path).decode()
    assert str(caught.value).startswith(f'{path}: ')
    assert '\n' not in str(caught.value)


def test_the_shared_folder_holds_nothing_else(shared_data):
    names = {path.name for path in (shared_data / 'broken').iterdir()} - {'README.txt'}
    assert names == GOOD_FILES.keys() | BAD_FILES.keys()


def test_exif_orientation_shows_the_upright_picture(shared_data):
    turned = open_picture(str(shared_data / 'broken' / 'exif_orientation3.jpg')).decode().float()
    upright = open_picture(str(shared_data / 'broken' / 'exif_reference_upright.jpg')).decode().float()
    assert (turned - upright).abs().mean() < 3
    assert (turned.flip(0, 1) - upright).abs().mean() > 30


@pytest.mark.parametrize('orientation', range(1, 9))
def test_every_exif_orientation_agrees_with_pillow(orientation):
    image = Image.fromarray(noise(24, 40))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(image, 'JPEG', exif=exif, quality=95)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    picture = EncodedPicture(data, 'test')
    assert picture.size == expected.size
    assert np.array_equal(picture.decode().numpy(), np.asarray(expected))


def test_tiff_orientation_is_applied_once():
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = noise(4, 6)
    assert np.array_equal(decode(encode(Image.fromarray(pixels), 'TIFF', exif=exif)), np.rot90(pixels, -1))


def test_damaged_exif_does_not_hide_the_picture():
    data = encode(Image.new('RGB', (9, 5), 'red'), 'JPEG', exif=b'Exif\0\0' + b'MM\0*\xff\xff\xff\xff' + b'\xff' * 9)
    assert decode(data).shape == (5, 9, 3)


def test_sixteen_bit_gray_uses_the_whole_range(shared_data):
    pixels = open_picture(str(shared_data / 'broken' / 'gray16.png')).decode()
    raw = np.asarray(Image.open(shared_data / 'broken' / 'gray16.png')).astype(float)
    expected = (raw - raw.min()) / (raw.max() - raw.min()) * 255
    assert np.abs(pixels[..., 1].numpy() - expected).max() <= 0.5
    assert (pixels.min(), pixels.max()) == (0, 255)


def test_float_and_constant_images():
    values = np.array([[0.5, np.nan], [1.0, 0.0]], np.float32)
    assert decode(encode(Image.fromarray(values), 'TIFF'))[..., 0].tolist() == [[128, 0], [255, 0]]
    assert not decode(encode(Image.fromarray(np.full((2, 2), 700, np.uint16)), 'PNG')).any()


@pytest.mark.parametrize('mode', ['RGBA', 'LA'])
def test_transparency_is_composited_on_white(mode):
    channels = len(mode)
    pixels = noise(8, 8, channels)
    alpha = pixels[..., -1:] / 255.0
    expected = pixels[..., :-1] * alpha + 255 * (1 - alpha)
    decoded = decode(encode(Image.fromarray(pixels, mode=mode), 'PNG'))
    assert np.abs(decoded - expected).max() <= 1


def test_palette_and_rgb_with_a_transparent_colour_are_white_there():
    palette = Image.new('P', (2, 1))
    palette.putpalette([10, 20, 30, 200, 100, 0])
    palette.putpixel((1, 0), 1)
    expected = [[[255, 255, 255], [200, 100, 0]]]
    assert decode(encode(palette, 'PNG', transparency=0)).tolist() == expected
    assert decode(encode(palette, 'GIF', transparency=0)).tolist() == expected
    assert decode(encode(palette.convert('RGB'), 'PNG', transparency=(10, 20, 30))).tolist() == expected


def test_one_bit_and_cmyk():
    assert decode(encode(Image.fromarray(np.eye(3) > 0), 'PNG'))[..., 2].tolist() == (np.eye(3) * 255).tolist()
    red = decode(encode(Image.new('CMYK', (8, 8), (0, 255, 255, 0)), 'JPEG'))[4, 4]
    assert red[0] > 240
    assert red[1:].max() < 20


def test_animation_gives_the_first_frame():
    frames = [Image.new('RGB', (4, 4), colour) for colour in ('red', 'blue')]
    data = encode(frames[0], 'GIF', save_all=True, append_images=frames[1:])
    assert decode(data)[0, 0].tolist() == [255, 0, 0]


def test_decompression_limit_is_an_error_not_a_warning(monkeypatch):
    data = encode(Image.new('RGB', (60, 50)), 'PNG')
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 2999)
    with pytest.raises(UndecodableImage, match='60 x 50 pixels exceed the decompression limit of 2999'):
        EncodedPicture(data, 'bomb.png')
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 3000)
    assert EncodedPicture(data, 'fine.png').size == (60, 50)


def test_formats_outside_the_list_are_refused():
    with pytest.raises(UndecodableImage, match='not an image of a known format'):
        EncodedPicture(b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n', 'sly.jpg')


def test_missing_file_is_undecodable(tmp_path):
    with pytest.raises(UndecodableImage, match='cannot be read'):
        open_picture(str(tmp_path / 'gone.jpg'))


@pytest.mark.parametrize('reduction', [1, 2, 4, 8])
def test_reduced_jpeg_is_the_box_average(reduction):
    ramp = np.linspace(0, 255, 128)[None, :, None] * np.linspace(0.2, 1, 64)[:, None, None] * np.ones(3)
    picture = EncodedPicture(encode(Image.fromarray(ramp.astype(np.uint8)), 'JPEG', quality=98), 'test')
    pixels = picture.decode(reduction).numpy().astype(float)
    assert picture.size == (128, 64)
    blocks = ramp.reshape(64 // reduction, reduction, 128 // reduction, reduction, 3).mean((1, 3))
    assert np.abs(pixels - blocks).max() < 6


def test_reduction_combines_with_orientation(shared_data):
    path = str(shared_data / 'broken' / 'exif_orientation6.jpg')
    full, half = open_picture(path).decode().float(), open_picture(path).decode(2).float()
    averaged = full.reshape(160, 2, 120, 2, 3).mean((1, 3))
    assert (half - averaged).abs().mean() < 2


def test_largest_reduction_never_exceeds_the_ratio():
    assert [largest_reduction(ratio) for ratio in (0.3, 1, 1.99, 2, 3.9, 4, 7.9, 8, 100)] == [
        1, 1, 1, 2, 2, 4, 4, 8, 8]  # fmt: skip


def test_image_names():
    assert all(is_image_name(f'a.{end}') for end in ['jpg', 'JPEG', 'Png', 'BMP', 'webp', 'TIF', 'tiff', 'gif'])
    assert not any(is_image_name(name) for name in ('a.txt', 'jpg', '._a.jpg', 'a.jpg.part', 'README'))


def test_a_pipe_with_an_image_name_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / 'pipe.png')
    with pytest.raises(UndecodableImage, match=r'pipe\.png: empty file'):
        open_picture(str(tmp_path / 'pipe.png'))
