"""Attention backends: PyTorch's fused attention, or xformers where it is asked for and usable."""

from __future__ import annotations

import importlib
import logging
from functools import cache

import torch
from timm.layers import Attention

_logger = logging.getLogger(__name__)


class XformersAttention(Attention):
    """timm's attention, computed by ``xformers.ops.memory_efficient_attention`` for CUDA tensors.

    Same parameters and same function as the base class, to which it leaves CPU tensors, masks, and attention whose
    output is normalised or gated.
    """

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False) -> torch.Tensor:
        """Map tokens ``(B, N, D)`` to tokens ``(B, N, D)``."""
        plain = isinstance(self.norm, torch.nn.Identity) and self.gate is None
        if attn_mask is not None or is_causal or not plain or not _has_kernels(x.device):
            return super().forward(x, attn_mask=attn_mask, is_causal=is_causal)
        ops = importlib.import_module('xformers.ops')
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).unbind(2)
        q, k = self.q_norm(q), self.k_norm(k)
        dropout = self.attn_drop.p if self.training else 0.0
        # xformers takes (B, N, H, h), so nothing has to be transposed.
        x = ops.memory_efficient_attention(q.to(v.dtype), k.to(v.dtype), v, p=dropout)
        return self.proj_drop(self.proj(x.reshape(batch, tokens, self.attn_dim)))


def attention_layer(backend: str) -> type[Attention]:
    """The attention class for a backend name.

    Args:
        backend: ``'sdpa'`` or ``'xformers'``. When xformers is not usable here, one warning is logged and SDPA used.
    """
    if backend == 'sdpa':
        return Attention
    if backend != 'xformers':
        raise ValueError(f'attention={backend!r} is not known; use "sdpa" or "xformers"')
    problem = _xformers_problem()
    if problem is None:
        return XformersAttention
    _warn_once(problem)
    return Attention


def _xformers_problem() -> str | None:
    try:
        importlib.import_module('xformers.ops')
    except Exception as error:  # a broken binary raises anything from ImportError to OSError
        return f'it cannot be imported ({type(error).__name__}: {error})'
    if not torch.cuda.is_available():
        return 'it has kernels for CUDA only and no CUDA device is visible'
    return _kernel_problem('cuda')


@cache
def _kernel_problem(device: str) -> str | None:
    """Why attention fails, forward or backward; it imports also where its kernels do not fit the device or torch."""
    try:
        ops = importlib.import_module('xformers.ops')
        with torch.enable_grad():
            x = torch.zeros(1, 8, 1, 32, device=device, dtype=torch.float16, requires_grad=True)
            (gradient,) = torch.autograd.grad(ops.memory_efficient_attention(x, x, x).sum(), x)
            gradient.sum().item()  # kernels fail when they run, which is waited for here
    except Exception as error:
        return f'its kernels do not run here ({type(error).__name__}: {(str(error).splitlines() or [""])[0]})'
    return None


def _has_kernels(device: torch.device) -> bool:
    return device.type == 'cuda'


@cache
def _warn_once(problem: str) -> None:
    _logger.warning('attention="xformers" was asked for, but %s; using SDPA', problem)
