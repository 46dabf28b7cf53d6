"""Optimizers for both stages: AdamW, SOAP, which is part of the method for residual-free ViTs, and Muon."""

from skipless.optim.build import OPTIMIZERS, build_optimizer, parameter_groups
from skipless.optim.muon import Muon
from skipless.optim.soap import SOAP

__all__ = ['OPTIMIZERS', 'SOAP', 'Muon', 'build_optimizer', 'parameter_groups']
