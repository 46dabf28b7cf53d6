# DINO, ViT-S/16 without skips, ImageNet-1k, 300 epochs: the recipe of arXiv 2510.00345 on 16 GPUs of 64 images each.
# Its twin: --cfg-options model.backbone.attention_skip=True model.backbone.mlp_skip=True
_base_ = ['_base_/dino.py', '_base_/imagenet.py']

model = dict(
    prototypes=65536,
    head_hidden=2048,
    bottleneck=256,
    teacher_temperature=0.07,
    teacher_temperature_warmup=0.1,
    ema_momentum=0.996,
    freeze_last_layer=1 / 300,
    backbone=dict(name='skipless_vit_small_patch16_224', init='vit_small'),
)
train_dataloader = dict(dataset=dict(crops=dict(type='multi', global_size=224, local_size=96, local_count=8)))
train_cfg = dict(type='PretrainLoop', max_epochs=300)
# A side of 65,536 prototypes is too long for an eigenbasis; max_precondition_dim leaves it out.
optim_wrapper = dict(
    optimizer=dict(type='SOAP', lr=2e-3, weight_decay=0.04, max_precondition_dim=8192),
    max_norm=3.0,
    precision='bfloat16',
)
default_hooks = dict(
    schedule=dict(warmup=10 / 300, final_lr=5e-4, final_weight_decay=0.4),
    monitor=dict(interval=50, statistics_interval=2500),
    checkpoint=dict(interval=2500),
)
