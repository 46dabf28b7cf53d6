"""Residual-free Vision Transformers: the network, its initialisation and its mathematics.

Importing the package registers the ``skipless_vit_*`` and ``skipless_convmixer_*`` models with timm::

    import skipless, timm
    model = timm.create_model('skipless_vit_small_patch16_224')
"""

from skipless.block import ResidualFreeBlock, architecture
from skipless.convmixer import SkiplessConvMixer
from skipless.init import PRESETS, InitRecipe, init_residual_free_
from skipless.models import SkiplessVisionTransformer, build_backbone, build_vit

__version__ = '0.1.0'

__all__ = [
    'PRESETS',
    'InitRecipe',
    'ResidualFreeBlock',
    'SkiplessConvMixer',
    'SkiplessVisionTransformer',
    'architecture',
    'build_backbone',
    'build_vit',
    'init_residual_free_',
]
