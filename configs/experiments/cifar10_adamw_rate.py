# Which learning rate does AdamW need where skips are missing? Those of cifar10_supervised.py are chosen by this.
#
#   CIFAR10=.../cifar10_jpeg.npz python tools/compare.py configs/experiments/cifar10_adamw_rate.py
title = 'AdamW without skips: the learning rate'
description = 'Supervised CIFAR-10, ViT-micro, 600 steps of 128 images.'
seeds = [0]
jobs = 2

_skipless = {'model.backbone.init': 'vit_small'}
_no_attention_skip = {'model.backbone.init': 'timm', 'model.backbone.mlp_skip': True}
_no_mlp_skip = {'model.backbone.init': 'timm', 'model.backbone.attention_skip': True}

arms = {
    name: dict(
        label=f'{label}, AdamW {rate:g}',
        pretrain='../pretrain/supervised_vit_micro_cifar10.py',
        options={**kind, 'optim_wrapper.optimizer.type': 'AdamW', 'optim_wrapper.optimizer.lr': rate},
    )
    for name, label, kind, rate in (
        ('least', "skipless, paper's init", _skipless, 3e-5),
        ('lowest', "skipless, paper's init", _skipless, 1e-4),
        ('low', "skipless, paper's init", _skipless, 3e-4),
        ('high', "skipless, paper's init", _skipless, 6e-4),
        ('highest', "skipless, paper's init", _skipless, 1e-3),
        ('no_attention_skip_low', 'attention skip removed', _no_attention_skip, 3e-4),
        ('no_attention_skip_highest', 'attention skip removed', _no_attention_skip, 1e-3),
        ('no_mlp_skip_low', 'MLP skip removed', _no_mlp_skip, 3e-4),
        ('no_mlp_skip_highest', 'MLP skip removed', _no_mlp_skip, 1e-3),
    )
}
pretrain_options = {'train_cfg.max_iters': 600}
pretrain_metrics = ['top1', 'loss']
