"""Data of stage 1: sources, crops, the sample stream and augmentation on the device.

Importing this package registers the datasets, `StreamSampler`, `collate_crops` and `DeviceAugment` in
mmengine.
"""

from pretrain.data.augment import DeviceAugment, ViewAugment
from pretrain.data.collate import BadFiles, collate_crops
from pretrain.data.crops import build_crops
from pretrain.data.datasets import CropDataset, ImageFolder, PackedArrays, Scenes, evenly_spaced
from pretrain.data.sampler import Draw, StreamSampler, check_batch

__all__ = [
    'BadFiles',
    'CropDataset',
    'DeviceAugment',
    'Draw',
    'ImageFolder',
    'PackedArrays',
    'Scenes',
    'StreamSampler',
    'ViewAugment',
    'build_crops',
    'check_batch',
    'collate_crops',
    'evenly_spaced',
]
