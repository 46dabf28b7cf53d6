# A short probe of small backbones on CamVid: small crops, evaluated on whole images.
_base_ = [
    '_base_/runtime.py',
    '_base_/schedule_probe_short.py',
    '_base_/linear_seg.py',
    '_base_/camvid.py',
]

model = dict(
    backbone=dict(name='skipless_vit_tiny_patch8_224', img_size=96, embed_dim=96),
    decode_head=dict(in_channels=96, num_classes=11),
)
train_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadLabelMap'),
            dict(type='RandomCrop', crop_size=(128, 160)),
            dict(type='RandomFlip', prob=0.5),
            dict(type='PackSegInputs'),
        ]
    ),
)
val_dataloader = dict(num_workers=0, persistent_workers=False)
test_dataloader = val_dataloader
