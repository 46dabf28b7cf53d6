# Rivals by name, with and without skips, under three optimizers: what trains, and what of the start foretells it?
#
#   CIFAR10=.../cifar10_jpeg.npz python tools/compare.py configs/experiments/cifar10_rivals.py
#
# RATES=low and RATES=high give all arms of an optimizer one rate, which is how the better of the two was found:
#
#   RATES=low CIFAR10=... python tools/compare.py configs/experiments/cifar10_rivals.py \
#       --work-dir work_dirs/cifar10_rivals_low --cfg-options seeds=[0]
import os

title = 'Rivals on CIFAR-10'
description = 'ViT-micro (d 96, 12 layers, 3 heads, patch 8, mean of patches), supervised, 600 steps of 64 images.'
seeds = [0, 1, 2]
jobs = 2

_config = '../pretrain/supervised_vit_micro_cifar10_conditioning.py'
_name, _init, _rival = 'model.backbone.name', 'model.backbone.init', 'model.backbone.rival'
_graying = {'model.backbone.graying': dict(kind='dct', eps=0.9, at='patches')}
_skip = {_name: 'vit_tiny_patch16_224'}
_networks = {
    'skip': _skip,
    'skip, Token Graying': {**_skip, **_graying},
    'skip, mimetic': {**_skip, _rival: 'mimetic'},
    'skip, structured': {**_skip, _rival: 'structured'},
    'skip, LayerScale': {**_skip, _rival: 'layerscale'},
    'skip, ReZero': {**_skip, _rival: 'rezero'},
    'skip, SkipInit': {**_skip, _rival: 'skipinit'},
    'skip, conditioned tokens': {**_skip, _rival: 'conditioned_tokens'},
    'skip, spectral conditioning': {**_skip, _rival: dict(type='spectral_conditioning', correction='svd')},
    'skipless, default init': {_init: 'timm'},
    "skipless, paper's init": {_init: 'vit_small'},
    'skipless, centred': {_init: 'centred'},
    'skipless, distinct': {_init: 'distinct'},
    'skipless, near-linear MLP': {_init: dict(preset='centred', fc1_gain=0.3, fc2_gain=6.7)},
    "skipless, paper's init, Token Graying": {_init: 'vit_small', **_graying},
    'skipless, mimetic': {_init: 'vit_small', _rival: 'mimetic'},
    'skipless, structured': {_init: 'vit_small', _rival: 'structured'},
    'skipless, value-skipinit': {_init: 'vit_small', _rival: 'value_skipinit'},
    'skipless, E-SPA': {_init: 'vit_small', _rival: 'e_spa'},
    'skipless, shaped': {_init: 'vit_small', _rival: 'shaped'},
    'skipless, orthogonal attention': {_init: 'vit_small', _rival: 'orthogonal_attention'},
    "skipless, paper's init, conditioned tokens": {_init: 'vit_small', _rival: 'conditioned_tokens'},
    'skipless, default init, spectral conditioning': {
        _init: 'timm',
        _rival: dict(type='spectral_conditioning', correction='svd'),
    },
}
_rates = {
    'AdamW': dict(low=3e-4, high=1e-3),
    'SOAP': dict(low=1e-3, high=3e-3),
    'Muon': dict(low=1e-3, high=3e-3),
}
arms = {
    f'{name}, {optimizer}'.lower().replace("'", '').replace(', ', '_').replace(' ', '_').replace('-', '_'): dict(
        label=f'{name}, {optimizer}',
        pretrain=_config,
        options={
            **network,
            'optim_wrapper.optimizer.type': optimizer,
            'optim_wrapper.optimizer.lr': _rates[optimizer][os.environ.get('RATES', 'high')],
        },
    )
    for name, network in _networks.items()
    for optimizer in _rates
}
pretrain_metrics = ['top1', 'loss', 'token_cosine']
