# Indoor RGB and depth in the layout of NYU, about 320x240, with lists of what is trained on and tested on.
# The two test lists are reported apart: rooms that training has seen, and rooms that it has not.
data_root = '{{$NYU_STYLE_ROOT:data/nyu_style}}'
crop_size = (224, 288)
meta_keys = (
    'img_path',
    'ori_shape',
    'img_shape',
    'pad_shape',
    'scale_factor',
    'flip',
    'flip_direction',
    'subset',
)

train_dataloader = dict(
    batch_size=16,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        type='NYUDepth',
        data_root=data_root,
        ann_file='splits/train.txt',
        data_prefix=dict(img_path='images/train', depth_map_path='annotations/train'),
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadDepthMap', scale=1e-3, max_depth=10.0),
            # No random scale: a magnified picture shows the same depths, which a probe would have to unlearn.
            dict(type='RandomCrop', crop_size=crop_size),
            dict(type='RandomFlip', prob=0.5),
            dict(type='PackSegInputs'),
        ],
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='NYUDepth',
        data_root=data_root,
        subsets=dict(in_scene='splits/test_inscene.txt', cross_scene='splits/test_crossscene.txt'),
        data_prefix=dict(img_path='images/test', depth_map_path='annotations/test'),
        test_mode=True,
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadDepthMap', scale=1e-3, max_depth=10.0),
            dict(type='PackSegInputs', meta_keys=meta_keys),
        ],
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(type='DepthErrors', max_depth=10.0)
test_evaluator = val_evaluator
