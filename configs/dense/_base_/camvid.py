data_root = '{{$CAMVID_ROOT:data/camvid}}'
crop_size = (224, 288)

train_dataloader = dict(
    batch_size=16,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        type='CamVidSegmentation',
        data_root=data_root,
        split='train',
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadLabelMap'),
            dict(type='RandomResize', scale=(320, 240), ratio_range=(0.75, 1.5), keep_ratio=True),
            dict(type='RandomCrop', crop_size=crop_size, cat_max_ratio=0.75),
            dict(type='RandomFlip', prob=0.5),
            dict(type='PackSegInputs'),
        ],
    ),
)
val_dataloader = dict(
    batch_size=8,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='CamVidSegmentation',
        data_root=data_root,
        split='val',
        test_mode=True,
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadLabelMap'),
            dict(type='PackSegInputs'),
        ],
    ),
)
test_dataloader = {**val_dataloader, 'dataset': {**val_dataloader['dataset'], 'split': 'test'}}
val_evaluator = dict(type='SegmentationIoU')
test_evaluator = val_evaluator

tta_model = dict(type='SegTTAModel')
tta_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(
        type='TestTimeAug',
        transforms=[
            [dict(type='Resize', scale_factor=s, keep_ratio=True) for s in (1.0, 0.75, 1.25)],
            [dict(type='RandomFlip', prob=0.0), dict(type='RandomFlip', prob=1.0)],
            [dict(type='LoadLabelMap')],
            [dict(type='PackSegInputs')],
        ],
    ),
]
