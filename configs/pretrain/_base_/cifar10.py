# CIFAR-10 in one file of arrays or JPEG bytes; CIFAR10 names it.
cifar10 = '{{$CIFAR10:data/cifar10/cifar10_jpeg.npz}}'
evaluation_crop = dict(type='centre', size=32, resize=32)

train_dataloader = dict(
    batch_size=128,
    num_workers=0,
    sampler=dict(type='StreamSampler'),
    collate_fn=dict(type='collate_crops'),
    dataset=dict(type='PackedArrays', path=cifar10, split='train'),
)
custom_hooks = [
    dict(
        type='EvaluationHook',
        train=dict(type='PackedArrays', path=cifar10, split='train', crops=evaluation_crop, limit=5000),
        val=dict(type='PackedArrays', path=cifar10, split='test', crops=evaluation_crop),
    )
]
