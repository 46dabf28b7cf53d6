# NYU Depth v2 as it is usually prepared: 640x480, depth as 16-bit PNG in millimetres, and no lists. Evaluated, as is
# customary, on the part of an image that has valid depth (Eigen et al., 2014).
_base_ = './nyu_style.py'
data_root = '{{$NYU_ROOT:data/nyu}}'

train_dataloader = dict(
    dataset=dict(
        data_root=data_root,
        ann_file='',
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadDepthMap', scale=1e-3, max_depth=10.0),
            dict(type='RandomCrop', crop_size=(416, 544)),
            dict(type='RandomFlip', prob=0.5),
            dict(type='PackSegInputs'),
        ],
    )
)
val_dataloader = dict(dataset=dict(data_root=data_root, subsets=None))
test_dataloader = val_dataloader
val_evaluator = dict(crop='nyu_eigen')
test_evaluator = val_evaluator
