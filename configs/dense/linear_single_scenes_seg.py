_base_ = [
    '_base_/runtime.py',
    '_base_/schedule_probe_short.py',
    '_base_/linear_seg.py',
    '_base_/scenes_seg.py',
]

model = dict(
    backbone=dict(name='skipless_vit_tiny_patch8_224', img_size=96),
    decode_head=dict(in_channels=192, num_classes=12),
)
