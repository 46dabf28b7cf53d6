"""What a backbone is trained on: DINO, MAE or labels, each an mmengine model registered in ``MODELS``."""

from pretrain.methods.base import Method
from pretrain.methods.dino import DINO
from pretrain.methods.mae import MAE
from pretrain.methods.supervised import Supervised

__all__ = ['DINO', 'MAE', 'Method', 'Supervised']
