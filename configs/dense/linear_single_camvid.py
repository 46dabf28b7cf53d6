_base_ = [
    '_base_/runtime.py',
    '_base_/schedule_probe.py',
    '_base_/linear_seg.py',
    '_base_/camvid.py',
]

model = dict(decode_head=dict(num_classes=11))
