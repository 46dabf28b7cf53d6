# A short probe of small backbones on indoor depth: 300 steps of small crops, evaluated on whole images.
_base_ = './linear_single_nyu_style.py'

model = dict(
    backbone=dict(name='skipless_vit_tiny_patch8_224', img_size=96, embed_dim=96),
    decode_head=dict(in_channels=96),
)
train_dataloader = dict(
    batch_size=16,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadDepthMap', scale=1e-3, max_depth=10.0),
            dict(type='RandomCrop', crop_size=(128, 160)),
            dict(type='RandomFlip', prob=0.5),
            dict(type='PackSegInputs'),
        ]
    ),
)
val_dataloader = dict(num_workers=0, persistent_workers=False)
test_dataloader = dict(num_workers=0, persistent_workers=False)
optim_wrapper = dict(optimizer=dict(lr=1e-2))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=20),
    dict(type='CosineAnnealingLR', eta_min=0, by_epoch=False, begin=20, end=300),
]
train_cfg = dict(max_iters=300, val_interval=300)
