# The embedded scenes, rendered once and kept in memory; no files.
train_dataloader = dict(
    batch_size=16,
    num_workers=0,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        type='ScenesDepth',
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
        type='ScenesDepth',
        split='val',
        length=100,
        size=96,
        test_mode=True,
        pipeline=[dict(type='PackSegInputs')],
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(type='DepthErrors', max_depth=10.0)
test_evaluator = val_evaluator
