# 300 steps: enough for a linear probe on the features of a small backbone.
_base_ = './schedule_probe.py'

optim_wrapper = dict(optimizer=dict(lr=1e-2))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=20),
    dict(type='CosineAnnealingLR', eta_min=0, by_epoch=False, begin=20, end=300),
]
train_cfg = dict(max_iters=300, val_interval=300)
