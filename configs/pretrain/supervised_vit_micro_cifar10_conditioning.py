# The same network, pooled over patches, on a smaller budget, with its conditioning measured at the start and the end.
_base_ = ['supervised_vit_micro_cifar10.py']

model = dict(backbone=dict(global_pool='avg', fc_norm=False))
train_dataloader = dict(batch_size=64)
train_cfg = dict(max_iters=600)
custom_hooks = [*_base_.custom_hooks, dict(type='ConditioningHook', interval=600, images=8)]
