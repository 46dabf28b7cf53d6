# DINO, ViT-micro (d 96, 12 layers), CIFAR-10, 64 patches.
_base_ = ['_base_/cifar10.py', '_base_/dino.py']

model = dict(
    backbone=dict(name='skipless_vit_tiny_patch16_224', img_size=32, patch_size=4, embed_dim=96, depth=12, num_heads=3)
)
train_dataloader = dict(dataset=dict(crops=dict(type='multi', global_size=32, local_size=16, local_count=2)))
train_cfg = dict(type='PretrainLoop', max_iters=800)
