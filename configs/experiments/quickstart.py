# The main job: on the embedded scenes, does a skipless ViT learn dense features, and does its init matter?
# Run by tools/compare.py; paths are relative to this file.
title = 'Cutting the skip, in minutes'
description = (
    'Do Vision Transformers without skip connections learn dense features? Three learn from procedural scenes by '
    'masked autoencoding, without labels, and linear probes read class and depth of every pixel from the frozen '
    'features. The optimizers differ as well, so this alone does not say what the skip does; the init is “distinct”, '
    'ours: with the constants of the paper the tokens of an image become equal here.'
)
seeds = [0]
jobs = 2  # runs at a time; they share the cores

_size = 64
_micro = dict(img_size=_size, patch_size=8, embed_dim=96, depth=12, num_heads=3)
_skip = dict(name='vit_tiny_patch16_224', **_micro)
_skipless = dict(name='skipless_vit_tiny_patch16_224', **_micro)

arms = dict(
    skip_adamw=dict(
        label='skip + AdamW',
        pretrain='../pretrain/mae_vit_micro_scenes.py',
        options=dict(
            model=dict(backbone=_skip),
            optim_wrapper=dict(optimizer=dict(type='AdamW', lr=1e-3)),
        ),
        baseline='random_skip',
    ),
    skipless_soap=dict(
        label='skipless + distinct init + SOAP',
        pretrain='../pretrain/mae_vit_micro_scenes.py',
        options=dict(
            model=dict(backbone=dict(**_skipless, init='distinct')),
            optim_wrapper=dict(optimizer=dict(type='SOAP', lr=1e-3)),
        ),
        baseline='random',
    ),
    control=dict(
        label='skipless + default init + AdamW',
        pretrain='../pretrain/mae_vit_micro_scenes.py',
        options=dict(
            model=dict(backbone=dict(**_skipless, init='timm')),
            optim_wrapper=dict(optimizer=dict(type='AdamW', lr=1e-3)),
        ),
        baseline='random_control',
    ),
    # The networks before they have learned anything.
    random_skip=dict(label='random weights, skip', backbone=_skip),
    random=dict(label='random weights, skipless, distinct init', backbone=dict(**_skipless, init='distinct')),
    random_control=dict(label='random weights, skipless, default init', backbone=dict(**_skipless, init='timm')),
)

_scenes = dict(size=_size, length=2000)
pretrain_options = dict(
    train_cfg=dict(max_iters=700),
    train_dataloader=dict(dataset=dict(crops=dict(size=_size), **_scenes)),
)
probe_options = dict(
    train_dataloader=dict(dataset=_scenes),
    val_dataloader=dict(dataset=dict(size=_size)),
)

probes = dict(
    segmentation=dict(
        label='single-layer segmentation',
        config='../dense/linear_single_scenes_seg.py',
        options=dict(model=dict(decode_head=dict(in_channels=96))),
        metrics=['mIoU'],
    ),
    segmentation_multi=dict(
        label='multi-scale segmentation',
        config='../dense/linear_multi_scenes_seg.py',
        options=dict(model=dict(decode_head=dict(in_channels=[96, 96, 96, 96]))),
        metrics=['mIoU'],
    ),
    depth=dict(
        label='single-layer depth',
        config='../dense/linear_single_scenes_depth.py',
        options=dict(model=dict(decode_head=dict(in_channels=96))),
        metrics=['delta1', 'abs_rel'],
    ),
)

# Checked at the end, and told in words. A negative control is expected not to lead.
expectations = [
    dict(better='skipless_soap', than='random', metric='segmentation.mIoU', margin=3.0),
    dict(better='skipless_soap', than='random', metric='depth.delta1', margin=3.0),
    dict(better='control', than='random_control', metric='segmentation.mIoU', margin=3.0, holds=False),
]

pictures = 4
