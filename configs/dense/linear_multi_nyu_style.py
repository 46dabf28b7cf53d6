_base_ = './linear_single_nyu_style.py'

model = dict(
    backbone=dict(out_indices=(2, 5, 8, 11)),
    decode_head=dict(in_channels=[384, 384, 384, 384]),
)
