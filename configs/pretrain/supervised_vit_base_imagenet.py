# Supervised ViT-B/16 without skips, ImageNet-1k, 300 epochs, on 16 GPUs of 64 images each
# (arXiv 2510.00345).
# Its twin: --cfg-options model.backbone.attention_skip=True model.backbone.mlp_skip=True
_base_ = ['_base_/runtime.py', '_base_/imagenet.py']

model = dict(
    type='Supervised',
    num_classes=1000,
    label_smoothing=0.1,
    mixup_alpha=0.8,
    cutmix_alpha=1.0,
    backbone=dict(name='skipless_vit_base_patch16_224', init='vit_base'),
    data_preprocessor=dict(
        type='DeviceAugment', views=dict(global_crops=dict(flip=0.5, jitter=0.8, gray=0.1, blur=0.1, solarise=0.1))
    ),
)
train_dataloader = dict(dataset=dict(crops=dict(type='random_resized', size=224, scale=(0.08, 1.0))))
train_cfg = dict(type='PretrainLoop', max_epochs=300)
optim_wrapper = dict(
    constructor='PretrainOptimConstructor',
    optimizer=dict(type='SOAP', lr=1e-3, weight_decay=0.05, max_precondition_dim=8192),
    max_norm=1.0,
    precision='bfloat16',
)
default_hooks = dict(
    schedule=dict(warmup=5 / 300, final_lr=0.01),
    monitor=dict(interval=50, statistics_interval=2500),
    checkpoint=dict(interval=2500),
)
