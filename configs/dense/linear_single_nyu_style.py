_base_ = [
    '_base_/runtime.py',
    '_base_/schedule_probe.py',
    '_base_/linear_depth.py',
    '_base_/nyu_style.py',
]

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=100),
    dict(type='CosineAnnealingLR', eta_min=0, by_epoch=False, begin=100, end=2000),
]
train_cfg = dict(max_iters=2000, val_interval=500)
