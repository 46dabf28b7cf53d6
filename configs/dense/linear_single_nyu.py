_base_ = [
    '_base_/runtime.py',
    '_base_/schedule_probe.py',
    '_base_/linear_depth.py',
    '_base_/nyu.py',
]
