_base_ = [
    '_base_/runtime.py',
    '_base_/schedule_probe.py',
    '_base_/linear_depth.py',
    '_base_/scenes_depth.py',
]

model = dict(
    backbone=dict(name='skipless_vit_tiny_patch8_224', img_size=96),
    decode_head=dict(in_channels=192, num_bins=64),
)
optim_wrapper = dict(optimizer=dict(lr=1e-2))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=20),
    dict(type='CosineAnnealingLR', eta_min=0, by_epoch=False, begin=20, end=300),
]
train_cfg = dict(max_iters=300, val_interval=300)
