# k-NN accuracy on CIFAR-10 at 64 px, for pretraining on images without labels. CIFAR10 names the file.
cifar10 = '{{$CIFAR10:data/cifar10/cifar10_jpeg.npz}}'
enlarged = dict(type='centre', size=64, resize=64)

custom_hooks = [
    dict(
        type='EvaluationHook',
        train=dict(type='PackedArrays', path=cifar10, split='train', crops=enlarged, limit=4000),
        val=dict(type='PackedArrays', path=cifar10, split='test', crops=enlarged, limit=2000),
    )
]
