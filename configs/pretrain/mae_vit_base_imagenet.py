# MAE, ViT-B/16 without skips in the encoder, ImageNet-1k, 800 epochs, on 16 GPUs of 64 images each.
# Its twin: --cfg-options model.backbone.attention_skip=True model.backbone.mlp_skip=True
_base_ = ['_base_/mae.py', '_base_/imagenet.py']

model = dict(
    decoder_dim=512,
    decoder_depth=8,
    decoder_heads=16,
    backbone=dict(name='skipless_vit_base_patch16_224', init='mae'),
)
train_dataloader = dict(dataset=dict(crops=dict(type='random_resized', size=224, scale=(0.2, 1.0))))
train_cfg = dict(type='PretrainLoop', max_epochs=800)
optim_wrapper = dict(
    optimizer=dict(
        type='SOAP',
        lr=1.5e-3,
        betas=(0.9, 0.95),
        weight_decay=0.05,
        precondition_frequency=100,
        max_precondition_dim=8192,
    ),
    precision='bfloat16',
)
default_hooks = dict(
    schedule=dict(warmup=40 / 800, final_lr=0.0),
    monitor=dict(interval=50, statistics_interval=2500),
    checkpoint=dict(interval=2500),
)
