# MAE on top of a data file; sizes are those of small images.
_base_ = ['runtime.py']

model = dict(
    type='MAE',
    mask_ratio=0.75,
    decoder_dim=64,
    decoder_depth=2,
    decoder_heads=2,
    data_preprocessor=dict(type='DeviceAugment', views='flip'),
)
optim_wrapper = dict(
    constructor='PretrainOptimConstructor',
    optimizer=dict(type='SOAP', lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05),
    max_norm=1.0,
)
