# One feature map, that of the last block; the multi-scale configs replace out_indices and in_channels.
model = dict(
    type='DepthEstimator',
    data_preprocessor=dict(
        type='SegDataPreProcessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_val=0,
        seg_pad_val=0,  # mmseg pads depth with it, and 0 is unknown depth; its default would be 255 metres
        size_divisor=1,
    ),
    backbone=dict(
        type='SkiplessViT',
        name='skipless_vit_small_patch16_224',
        checkpoint=None,
        which='teacher',
        out_indices=(-1,),
        frozen=True,
    ),
    decode_head=dict(
        type='LinearDepthHead',
        in_channels=384,
        min_depth=1e-3,
        max_depth=10.0,
        loss_decode=dict(type='ScaleInvariantLogLoss'),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode='whole'),
)
