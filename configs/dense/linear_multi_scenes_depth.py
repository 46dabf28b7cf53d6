_base_ = './linear_single_scenes_depth.py'

model = dict(
    backbone=dict(out_indices=(2, 5, 8, 11)),
    decode_head=dict(in_channels=[192, 192, 192, 192]),
)
