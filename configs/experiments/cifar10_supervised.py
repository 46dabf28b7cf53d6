# Supervised CIFAR-10: what trains without skips, and what does not.
#
#   CIFAR10=.../cifar10_jpeg.npz python tools/compare.py configs/experiments/cifar10_supervised.py
title = 'Supervised CIFAR-10'
description = 'ViT-micro (d 96, 12 layers, 3 heads, patch 8) trained for 1200 steps of 128 images.'
seeds = [0, 1, 2]
jobs = 2

_config = '../pretrain/supervised_vit_micro_cifar10.py'
_skip = {'model.backbone.name': 'vit_tiny_patch16_224'}
_soap = {'optim_wrapper.optimizer.type': 'SOAP', 'optim_wrapper.optimizer.lr': 3e-3}
_adamw = {'optim_wrapper.optimizer.type': 'AdamW', 'optim_wrapper.optimizer.lr': 1e-3}
_adamw_low = {'optim_wrapper.optimizer.type': 'AdamW', 'optim_wrapper.optimizer.lr': 3e-4}
_paper = {'model.backbone.init': 'vit_small'}
_default = {'model.backbone.init': 'timm'}

arms = dict(
    skip_adamw=dict(label='skip, AdamW 1e-3', pretrain=_config, options={**_skip, **_adamw}),
    skip_soap=dict(label='skip, SOAP 3e-3', pretrain=_config, options={**_skip, **_soap}),
    skipless_soap=dict(label='skipless, init, SOAP 3e-3', pretrain=_config, options={**_paper, **_soap}),
    skipless_adamw=dict(label='skipless, init, AdamW 3e-4', pretrain=_config, options={**_paper, **_adamw_low}),
    default_adamw=dict(
        label='skipless, default init, AdamW 3e-4', pretrain=_config, options={**_default, **_adamw_low}
    ),
    default_soap=dict(label='skipless, default init, SOAP 3e-3', pretrain=_config, options={**_default, **_soap}),
    no_attention_skip=dict(
        label='attention skip removed, default init, AdamW 3e-4',
        pretrain=_config,
        options={**_default, **_adamw_low, 'model.backbone.mlp_skip': True},
    ),
    no_mlp_skip=dict(
        label='MLP skip removed, default init, AdamW 1e-3',
        pretrain=_config,
        options={**_default, **_adamw, 'model.backbone.attention_skip': True},
    ),
    # The sub-layer that keeps its skip keeps timm's default init.
    no_attention_skip_soap=dict(
        label='attention skip removed, init, SOAP 3e-3',
        pretrain=_config,
        options={**_paper, **_soap, 'model.backbone.mlp_skip': True},
    ),
    no_mlp_skip_soap=dict(
        label='MLP skip removed, init, SOAP 3e-3',
        pretrain=_config,
        options={**_paper, **_soap, 'model.backbone.attention_skip': True},
    ),
)
pretrain_metrics = ['top1', 'loss']
expectations = [
    dict(better='skipless_soap', than='default_soap', metric='pretrain.top1', margin=15.0),
    dict(better='skipless_adamw', than='default_adamw', metric='pretrain.top1', margin=10.0),
    dict(better='skipless_soap', than='skipless_adamw', metric='pretrain.top1', margin=5.0),
    # The ablation of arXiv 2505.01996: attention needs its skip more than the MLP does.
    dict(better='no_mlp_skip_soap', than='no_attention_skip_soap', metric='pretrain.top1', margin=5.0),
]
