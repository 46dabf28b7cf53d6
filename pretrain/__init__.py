"""Stage 1: self-supervised and supervised pretraining, driven by mmengine's Runner.

Importing the package registers its datasets, methods, hooks and runner, so ``custom_imports =
dict(imports=['pretrain'])`` is all a config needs.
"""

from pretrain import data, diagnostics, evaluation, hooks, methods, optim, runner

__all__ = ['data', 'diagnostics', 'evaluation', 'hooks', 'methods', 'optim', 'runner']
