_base_ = [
    '_base_/runtime.py',
    '_base_/schedule_probe.py',
    '_base_/linear_seg.py',
    '_base_/camvid.py',
]

model = dict(decode_head=dict(num_classes=11))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=100),
    dict(type='CosineAnnealingLR', eta_min=0, by_epoch=False, begin=100, end=2000),
]
train_cfg = dict(max_iters=2000, val_interval=500)
