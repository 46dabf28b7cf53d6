_base_ = './linear_single_nyu.py'

model = dict(
    backbone=dict(out_indices=(2, 5, 8, 11)),
    decode_head=dict(in_channels=[384, 384, 384, 384]),
)
