"""What others have proposed against ill-conditioned or collapsing transformers, by name and on equal terms.

Each rival changes a timm ViT in place: its initialisation, or its modules while shapes of tokens stay.
"""

from skipless.rivals import conditioned, gates, initialisations, orthogonal, shortcut_free, temperature
from skipless.rivals.registry import RIVALS, apply_rival, check_masked

__all__ = [
    'RIVALS',
    'apply_rival',
    'check_masked',
    'conditioned',
    'gates',
    'initialisations',
    'orthogonal',
    'shortcut_free',
    'temperature',
]
