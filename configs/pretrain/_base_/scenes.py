# Procedural RGB-D scenes as unlabelled images: no files.
train_dataloader = dict(
    batch_size=64,
    num_workers=0,
    sampler=dict(type='StreamSampler'),
    collate_fn=dict(type='collate_crops'),
    dataset=dict(type='Scenes', split='train', length=4000, size=96),
)
custom_hooks = []
