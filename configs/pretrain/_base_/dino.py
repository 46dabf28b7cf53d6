# DINO on top of a data file; sizes are those of small images.
_base_ = ['runtime.py']

model = dict(
    type='DINO',
    prototypes=1024,
    head_hidden=512,
    bottleneck=128,
    ema_momentum=0.99,
    freeze_last_layer=0.05,
    data_preprocessor=dict(type='DeviceAugment', views='dino'),
)
optim_wrapper = dict(
    constructor='PretrainOptimConstructor',
    optimizer=dict(type='SOAP', lr=1e-3, weight_decay=0.04),
    max_norm=3.0,
)
default_hooks = dict(schedule=dict(final_weight_decay=0.2))
