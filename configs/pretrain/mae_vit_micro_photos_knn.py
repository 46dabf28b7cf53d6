# MAE on photographs, its features judged by k-NN on CIFAR-10.
_base_ = ['mae_vit_micro_photos.py', '_base_/cifar10_knn.py']
