# MAE on CIFAR-10, 64 patches of which 16 are seen.
#
#   CIFAR10=.../cifar10_jpeg.npz python tools/compare.py configs/experiments/cifar10_mae.py
title = 'MAE on CIFAR-10'
description = 'ViT-micro (d 96, 12 layers, patch 4) trained for 800 steps of 128 images, 75 % of the patches masked.'
seeds = [0]
jobs = 2

_config = '../pretrain/mae_vit_micro_cifar10.py'
_skip = {'model.backbone.name': 'vit_tiny_patch16_224'}
_soap = {'optim_wrapper.optimizer.type': 'SOAP', 'optim_wrapper.optimizer.lr': 3e-3}
_adamw = {'optim_wrapper.optimizer.type': 'AdamW', 'optim_wrapper.optimizer.lr': 1e-3}

arms = dict(
    skip_adamw=dict(label='skip, AdamW 1e-3', pretrain=_config, options={**_skip, **_adamw}),
    skip_soap=dict(label='skip, SOAP 3e-3', pretrain=_config, options={**_skip, **_soap}),
    paper=dict(
        label='skipless, init, SOAP 3e-3', pretrain=_config, options={**_soap, 'model.backbone.init': 'vit_small'}
    ),
    centred=dict(
        label='skipless, centred init, SOAP 3e-3', pretrain=_config, options={**_soap, 'model.backbone.init': 'centred'}
    ),
    distinct=dict(
        label='skipless, distinct init, SOAP 1e-3',
        pretrain=_config,
        options={**_soap, 'optim_wrapper.optimizer.lr': 1e-3, 'model.backbone.init': 'distinct'},
    ),
    control=dict(
        label='skipless, default init, AdamW 1e-3', pretrain=_config, options={**_adamw, 'model.backbone.init': 'timm'}
    ),
)
pretrain_metrics = ['knn@start', 'knn', 'loss', 'token_cosine@start', 'token_cosine', 'effective_rank', 'feature_std']
