# 300 steps: enough for a linear probe on the features of a small backbone.
optim_wrapper = dict(
    type='OptimWrapper',
    constructor='SkiplessOptimWrapperConstructor',
    optimizer=dict(type='AdamW', lr=1e-2, weight_decay=1e-4),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=20),
    dict(type='CosineAnnealingLR', eta_min=0, by_epoch=False, begin=20, end=300),
]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=300, val_interval=300)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
