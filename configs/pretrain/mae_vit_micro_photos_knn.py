# MAE on photographs at 64 px, its features judged by k-NN on CIFAR-10.
_base_ = ['mae_vit_micro_photos.py', '_base_/cifar10_knn.py']

model = dict(backbone=dict(img_size=64))
train_dataloader = dict(dataset=dict(crops=dict(size=64)))
