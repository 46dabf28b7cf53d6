"""Reading images of any kind as upright 8-bit RGB, decoding each at most once."""

from __future__ import annotations

import io
import os
from typing import Protocol

import numpy as np
import torch
from PIL import Image, ImageFile, JpegImagePlugin, UnidentifiedImageError
from torch import Tensor

EXTENSIONS = ('.jpg', '.jpeg', '.png', '.bmp', '.webp', '.tif', '.tiff', '.gif')

# Restricting the formats keeps Pillow from trying decoders nobody trains on (EPS would start Ghostscript).
FORMATS = ('JPEG', 'PNG', 'BMP', 'WEBP', 'TIFF', 'GIF')

ORIENTATION_TAG = 0x0112
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
REDUCTIONS = (8, 4, 2)


class UndecodableImage(ValueError):
    """An image file that cannot be shown; the message reads "path: reason"."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)  # the arguments that a worker process makes it from again
        self.reason = reason

    def __str__(self) -> str:
        return ': '.join(self.args)


class Picture(Protocol):
    """An image whose size is known before its pixels are."""

    @property
    def size(self) -> tuple[int, int]:
        """Upright (width, height) in pixels."""

    def decode(self, reduction: int = 1) -> Tensor:
        """uint8 RGB (H, W, 3), smaller than `size` by up to `reduction` where the format makes that cheap."""


class PixelPicture:
    """A picture that is decoded already: uint8 (H, W, 3)."""

    def __init__(self, pixels: Tensor) -> None:
        self.pixels = pixels

    @property
    def size(self) -> tuple[int, int]:
        return self.pixels.shape[1], self.pixels.shape[0]

    def decode(self, reduction: int = 1) -> Tensor:
        return self.pixels


class EncodedPicture:
    """An image file held in memory; opening it reads the header, `decode` the pixels.

    What a file becomes: EXIF orientation is applied; of an animation the first frame is taken; CMYK, gray and
    palette images become RGB; transparency is composited on white, as a page would show it; gray of more than
    8 bits (16-bit, integer, float) is stretched from the image's own minimum and maximum to 0-255, since such
    files rarely use their full range.

    Args:
        data: The bytes of the file.
        name: What to call it in messages (a path).

    Raises:
        UndecodableImage: here or in `decode`: empty, truncated or damaged file, not an image, or more pixels
            than Pillow's `Image.MAX_IMAGE_PIXELS`.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self.name = name
        if not data:
            raise UndecodableImage(name, 'empty file (0 bytes)')
        try:
            self._image: ImageFile.ImageFile = Image.open(io.BytesIO(data), formats=FORMATS)
            self._reducible = isinstance(self._image, JpegImagePlugin.JpegImageFile)
            self._check_pixels()
            if not self._reducible:
                self._image.load()  # only JPEG puts size and orientation in front of the pixels for certain
            self._orientation = _orientation(self._image)
            width, height = self._image.size  # which a reduced decoding will change
            self._size = (height, width) if self._orientation >= 5 else (width, height)
        except UndecodableImage:
            raise
        except Exception as error:  # Pillow's decoders raise almost any type on damaged bytes
            raise UndecodableImage(name, _reason(error)) from error

    @property
    def size(self) -> tuple[int, int]:
        return self._size

    def decode(self, reduction: int = 1) -> Tensor:
        """The pixels, uint8 (H, W, 3); for JPEG 1 / `reduction` (1, 2, 4 or 8) of the size, rounded up.

        Meant to be called once: the reduction of a JPEG cannot be changed after its first decoding.
        """
        image: Image.Image = self._image
        try:
            if self._reducible and reduction > 1:
                width, height = image.size
                self._image.draft(None, (max(1, width // reduction), max(1, height // reduction)))
            image.load()
            if self._orientation in UPRIGHT:
                image = image.transpose(UPRIGHT[self._orientation])
            return torch.from_numpy(_to_rgb(image))
        except Exception as error:
            raise UndecodableImage(self.name, _reason(error)) from error

    def _check_pixels(self) -> None:
        width, height = self._image.size
        limit = Image.MAX_IMAGE_PIXELS
        if limit is not None and width * height > limit:
            raise UndecodableImage(
                self.name,
                f'{width} x {height} pixels exceed the decompression limit of {limit} pixels '
                "(Pillow's Image.MAX_IMAGE_PIXELS)",
            )


def open_picture(path: str) -> EncodedPicture:
    """Open an image file.

    Raises:
        UndecodableImage: also when the file cannot be read.
    """
    try:
        with open(path, 'rb', opener=_open_at_once) as file:
            data = file.read()
    except OSError as error:
        raise UndecodableImage(path, f'cannot be read ({error.strerror})') from error
    return EncodedPicture(data, path)


def _open_at_once(path: str, flags: int) -> int:
    """As `open` does, but a pipe that has an image's name is empty instead of waited for."""
    return os.open(path, flags | getattr(os, 'O_NONBLOCK', 0))


def is_image_name(name: str) -> bool:
    """Whether a file name has one of `EXTENSIONS`, in any case, and is not hidden."""
    return os.path.splitext(name)[1].lower() in EXTENSIONS and not name.startswith('.')


def largest_reduction(ratio: float) -> int:
    """The largest JPEG reduction (8, 4, 2 or 1) that does not exceed `ratio`."""
    return next((reduction for reduction in REDUCTIONS if reduction <= ratio), 1)


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(ORIENTATION_TAG, 1)
    except Exception:  # damaged metadata do not make the pixels unusable
        return 1
    return value if value in UPRIGHT else 1


def _to_rgb(image: Image.Image) -> np.ndarray:
    if image.mode.startswith('I') or image.mode == 'F':
        gray = _stretch(np.asarray(image).astype(np.float64))
        return np.repeat(gray[:, :, None], 3, axis=2)
    if 'transparency' in image.info or image.mode in ('RGBA', 'LA', 'PA', 'RGBa'):
        rgba = image.convert('RGBA')
        image = Image.alpha_composite(Image.new('RGBA', rgba.size, 'white'), rgba)
    return np.array(image.convert('RGB'))


def _stretch(values: np.ndarray) -> np.ndarray:
    finite = np.isfinite(values)
    if not finite.any():
        return np.zeros(values.shape, np.uint8)
    low, high = values[finite].min(), values[finite].max()
    scale = 255.0 / (high - low) if high > low else 0.0
    return np.rint(np.where(finite, values - low, 0.0) * scale).astype(np.uint8)


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return 'not an image of a known format'
    text = ' '.join(str(error).split())
    return f'{type(error).__name__}: {text}' if text else type(error).__name__
