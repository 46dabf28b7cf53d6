# Does SOAP stay as good when it is made cheap? Supervised CIFAR-10 with the published algorithm, with one-sided pieces,
# and with blocks of half the width, on both networks.
#
#   CIFAR10=.../cifar10_jpeg.npz python tools/compare.py configs/experiments/cifar10_soap.py
title = 'Cheaper SOAP on CIFAR-10'
description = 'ViT-micro (d 96, 12 layers, 3 heads, patch 8) trained for 1200 steps of 128 images; SOAP 3e-3.'
seeds = [0, 1, 2]
jobs = 2

_config = '../pretrain/supervised_vit_micro_cifar10.py'
_networks = dict(skip={'model.backbone.name': 'vit_tiny_patch16_224'}, skipless={'model.backbone.init': 'vit_small'})
_optimizers = dict(
    published={},
    one_sided={'optim_wrapper.optimizer.one_sided': True, 'optim_wrapper.optimizer.split_qkv': True},
    blocks={'optim_wrapper.optimizer.block_size': 48},
)
arms = {
    f'{network}_{optimizer}': dict(
        label=f'{network}, {optimizer.replace("_", "-")}', pretrain=_config, options={**net, **options}
    )
    for network, net in _networks.items()
    for optimizer, options in _optimizers.items()
}
pretrain_metrics = ['top1', 'loss']
