data_root = '{{$ADE20K_ROOT:data/ade/ADEChallengeData2016}}'
crop_size = (512, 512)

train_dataloader = dict(
    batch_size=16,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        type='ADE20KSegmentation',
        data_root=data_root,
        data_prefix=dict(img_path='images/training', seg_map_path='annotations/training'),
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadLabelMap'),
            dict(type='RandomResize', scale=(2048, 512), ratio_range=(0.5, 2.0), keep_ratio=True),
            dict(type='RandomCrop', crop_size=crop_size, cat_max_ratio=0.75),
            dict(type='RandomFlip', prob=0.5),
            dict(type='PhotoMetricDistortion'),
            dict(type='PackSegInputs'),
        ],
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='ADE20KSegmentation',
        data_root=data_root,
        data_prefix=dict(img_path='images/validation', seg_map_path='annotations/validation'),
        test_mode=True,
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='Resize', scale=(2048, 512), keep_ratio=True),
            # After the resizing: labels keep the original size, at which predictions are compared.
            dict(type='LoadLabelMap'),
            dict(type='PackSegInputs'),
        ],
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(type='SegmentationIoU')
test_evaluator = val_evaluator

tta_model = dict(type='SegTTAModel')
tta_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(
        type='TestTimeAug',
        transforms=[
            [dict(type='Resize', scale=(2048, int(512 * s)), keep_ratio=True) for s in (1.0, 0.75, 1.25)],
            [dict(type='RandomFlip', prob=0.0), dict(type='RandomFlip', prob=1.0)],
            [dict(type='LoadLabelMap')],
            [dict(type='PackSegInputs')],
        ],
    ),
]
