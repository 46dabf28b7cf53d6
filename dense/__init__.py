"""Stage 2: dense prediction with a pretrained ViT in mmsegmentation.

Importing the package registers its classes with mmseg, so that ``custom_imports = dict(imports=['dense'])``
is all a config needs.
"""

from dense import backbone, datasets, heads, hooks, losses, metrics, optim, transforms

__all__ = ['backbone', 'datasets', 'heads', 'hooks', 'losses', 'metrics', 'optim', 'transforms']
