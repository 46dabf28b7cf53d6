"""How well a ViT is conditioned: token matrices, attention, gradients and Jacobians, block by block.

`diagnose` measures all of it. The parts serve other purposes too: `lanczos_extremes` bounds the extreme singular values
of the `Jacobian` of any function.
"""

from skipless.conditioning.blocks import (
    Captured,
    NotFiniteError,
    SplitBlock,
    SubBlock,
    capture_blocks,
    measuring,
    tangent_part,
    undone,
)
from skipless.conditioning.diagnosis import Diagnosis, diagnose
from skipless.conditioning.jacobians import (
    PARAMETER_JACOBIANS,
    TOKEN_JACOBIANS,
    Effort,
    parameter_jacobians,
    token_jacobians,
)
from skipless.conditioning.measures import (
    STAGES,
    SoftmaxMaps,
    attention_statistics,
    gradient_norms,
    kurtosis,
    token_stages,
    token_statistics,
)
from skipless.conditioning.singular import DENSE_ENTRIES, FAILURE, Extremes, Jacobian, dense_extremes, lanczos_extremes

__all__ = [
    'DENSE_ENTRIES',
    'FAILURE',
    'PARAMETER_JACOBIANS',
    'STAGES',
    'TOKEN_JACOBIANS',
    'Captured',
    'Diagnosis',
    'Effort',
    'Extremes',
    'Jacobian',
    'NotFiniteError',
    'SoftmaxMaps',
    'SplitBlock',
    'SubBlock',
    'attention_statistics',
    'capture_blocks',
    'dense_extremes',
    'diagnose',
    'gradient_norms',
    'kurtosis',
    'lanczos_extremes',
    'measuring',
    'parameter_jacobians',
    'tangent_part',
    'token_jacobians',
    'token_stages',
    'token_statistics',
    'undone',
]
