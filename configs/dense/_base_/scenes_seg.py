# The embedded scenes, rendered once and kept in memory; no files.
train_dataloader = dict(
    batch_size=16,
    num_workers=0,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        type='ScenesSegmentation',
        split='train',
        length=2000,
        size=96,
        pipeline=[dict(type='RandomFlip', prob=0.5), dict(type='PackSegInputs')],
    ),
)
val_dataloader = dict(
    batch_size=25,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='ScenesSegmentation',
        split='val',
        length=100,
        size=96,
        test_mode=True,
        pipeline=[dict(type='PackSegInputs')],
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(type='SegmentationIoU')
test_evaluator = val_evaluator

tta_model = dict(type='SegTTAModel')
tta_pipeline = [
    dict(
        type='TestTimeAug',
        transforms=[
            [dict(type='RandomFlip', prob=0.0), dict(type='RandomFlip', prob=1.0)],
            [dict(type='PackSegInputs')],
        ],
    )
]
