# DINO, ViT-micro (d 96, 12 layers), procedural scenes at 96 px, 144 patches.
_base_ = ['_base_/scenes.py', '_base_/dino.py']

model = dict(
    backbone=dict(name='skipless_vit_tiny_patch16_224', img_size=96, patch_size=8, embed_dim=96, depth=12, num_heads=3)
)
train_dataloader = dict(dataset=dict(crops=dict(type='multi', global_size=96, local_size=48, local_count=2)))
train_cfg = dict(type='PretrainLoop', max_iters=600)
