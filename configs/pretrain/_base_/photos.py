# Folders of photographs without labels; PHOTOS and MORE_PHOTOS name two of them.
photos = ['{{$PHOTOS:data/imagenet1k_sample/train}}', '{{$MORE_PHOTOS:data/ade20k/unlabelled}}']
train_dataloader = dict(
    batch_size=64,
    num_workers=0,
    sampler=dict(type='StreamSampler'),
    collate_fn=dict(type='collate_crops'),
    dataset=dict(type='ImageFolder', root=photos, labelled=False),
)
