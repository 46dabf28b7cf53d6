"""Optimizers for both stages: AdamW, and SOAP, which is part of the method for residual-free ViTs."""

from skipless.optim.build import OPTIMIZERS, build_optimizer, parameter_groups
from skipless.optim.soap import SOAP

__all__ = ['OPTIMIZERS', 'SOAP', 'build_optimizer', 'parameter_groups']
