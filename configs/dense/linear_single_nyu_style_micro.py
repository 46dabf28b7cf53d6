# A short probe of small backbones on indoor depth: small crops, evaluated on whole images.
_base_ = [
    '_base_/runtime.py',
    '_base_/schedule_probe_short.py',
    '_base_/linear_depth.py',
    '_base_/nyu_style.py',
]

model = dict(
    backbone=dict(name='skipless_vit_tiny_patch8_224', img_size=96, embed_dim=96),
    decode_head=dict(in_channels=96),
)
train_dataloader = dict(
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
test_dataloader = val_dataloader
