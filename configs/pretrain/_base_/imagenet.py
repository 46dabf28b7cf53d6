# ImageNet-1k as an image folder; IMAGENET names the folder that holds train/ and val/.
imagenet = '{{$IMAGENET:data/imagenet}}'
evaluation_crop = dict(type='centre', size=224, resize=256)
train_dataloader = dict(
    batch_size=64,
    num_workers=8,
    persistent_workers=True,
    pin_memory=True,
    sampler=dict(type='StreamSampler'),
    collate_fn=dict(type='collate_crops'),
    dataset=dict(type='ImageFolder', root=imagenet + '/train'),
)
custom_hooks = [
    dict(
        type='EvaluationHook',
        interval=25000,
        num_workers=8,
        train=dict(type='ImageFolder', root=imagenet + '/train', crops=evaluation_crop, limit=100000),
        val=dict(type='ImageFolder', root=imagenet + '/val', crops=evaluation_crop),
    )
]
