# A linear probe converges fast: AdamW, a short warm-up, then a cosine to zero.
optim_wrapper = dict(
    type='OptimWrapper',
    constructor='SkiplessOptimWrapperConstructor',
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=1e-4),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=100),
    dict(type='CosineAnnealingLR', eta_min=0, by_epoch=False, begin=100, end=2000),
]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=2000, val_interval=500)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
