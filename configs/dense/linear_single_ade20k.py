_base_ = [
    '_base_/runtime.py',
    '_base_/schedule_probe.py',
    '_base_/linear_seg.py',
    '_base_/ade20k.py',
]

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=1500),
    dict(type='CosineAnnealingLR', eta_min=0, by_epoch=False, begin=1500, end=40000),
]
train_cfg = dict(max_iters=40000, val_interval=4000)
