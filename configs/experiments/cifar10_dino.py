# DINO on CIFAR-10: do tokens collapse without skips, and what keeps them apart?
#
#   CIFAR10=.../cifar10_jpeg.npz python tools/compare.py configs/experiments/cifar10_dino.py
title = 'DINO on CIFAR-10'
description = 'ViT-micro (d 96, 12 layers, patch 8), 600 steps of 64 images, 2 global and 2 local crops.'
seeds = [0]
jobs = 2

_config = '../pretrain/dino_vit_micro_cifar10.py'
_skip = {'model.backbone.name': 'vit_tiny_patch16_224'}
_paper = {'model.backbone.init': 'vit_small'}
_distinct = {'model.backbone.init': 'distinct'}
_pool = {'model.backbone.global_pool': 'avg', 'model.backbone.fc_norm': False}
_ibot = {'model.ibot_weight': 1.0, 'model.ibot_separate_head': True}
_soap = {'optim_wrapper.optimizer.type': 'SOAP', 'optim_wrapper.optimizer.lr': 1e-3}
_adamw = {'optim_wrapper.optimizer.type': 'AdamW', 'optim_wrapper.optimizer.lr': 1e-3}

arms = dict(
    skip_adamw=dict(label='skip, AdamW', pretrain=_config, options={**_skip, **_adamw}),
    skip_soap=dict(label='skip, SOAP', pretrain=_config, options={**_skip, **_soap}),
    skip_pool=dict(label='skip, SOAP, mean of patches', pretrain=_config, options={**_skip, **_soap, **_pool}),
    paper=dict(label='skipless, init, SOAP', pretrain=_config, options={**_paper, **_soap}),
    paper_pool=dict(
        label='skipless, init, SOAP, mean of patches', pretrain=_config, options={**_paper, **_soap, **_pool}
    ),
    paper_ibot=dict(label='skipless, init, SOAP, iBOT', pretrain=_config, options={**_paper, **_soap, **_ibot}),
    distinct_pool=dict(
        label='skipless, distinct init, SOAP, mean of patches',
        pretrain=_config,
        options={**_distinct, **_soap, **_pool},
    ),
    distinct_pool_ibot=dict(
        label='skipless, distinct init, SOAP, mean of patches, iBOT',
        pretrain=_config,
        options={**_distinct, **_soap, **_pool, **_ibot},
    ),
)
pretrain_options = {
    'model.backbone.patch_size': 8,
    'train_dataloader.batch_size': 64,
    'train_cfg.max_iters': 600,
}
pretrain_metrics = [
    'knn@start',
    'knn',
    'token_cosine@start',
    'token_cosine',
    'effective_rank',
    'teacher_entropy',
    'teacher_kl',
    'feature_std',
]
