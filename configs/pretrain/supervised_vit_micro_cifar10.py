# Supervised ViT-micro (d 96, 12 layers) on CIFAR-10: the trial in which the method shows within minutes on a CPU.
_base_ = ['_base_/runtime.py', '_base_/cifar10.py']

model = dict(
    type='Supervised',
    num_classes=10,
    backbone=dict(name='skipless_vit_tiny_patch16_224', img_size=32, patch_size=8, embed_dim=96, depth=12, num_heads=3),
    data_preprocessor=dict(type='DeviceAugment', views='flip'),
)
train_dataloader = dict(dataset=dict(crops=dict(type='pad_crop', size=32, padding=4)))
train_cfg = dict(type='PretrainLoop', max_iters=1200)
optim_wrapper = dict(
    constructor='PretrainOptimConstructor',
    optimizer=dict(type='SOAP', lr=3e-3, weight_decay=0.05),
    max_norm=1.0,
)
