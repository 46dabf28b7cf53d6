# Which learning rate does AdamW need without skips? The one of cifar10_supervised.py is chosen by this.
#
#   CIFAR10=.../cifar10_jpeg.npz python tools/compare.py configs/experiments/cifar10_adamw_rate.py
title = 'AdamW without skips: the learning rate'
description = "Supervised CIFAR-10, skipless ViT-micro with the paper's init, 600 steps of 128 images."
seeds = [0]
jobs = 2

arms = {
    name: dict(
        label=f'AdamW {rate:g}',
        pretrain='../pretrain/supervised_vit_micro_cifar10.py',
        options={
            'model.backbone.init': 'vit_small',
            'optim_wrapper.optimizer.type': 'AdamW',
            'optim_wrapper.optimizer.lr': rate,
        },
    )
    for name, rate in dict(lowest=1e-4, low=3e-4, high=6e-4, highest=1e-3).items()
}
pretrain_options = {'train_cfg.max_iters': 600}
pretrain_metrics = ['top1', 'loss']
