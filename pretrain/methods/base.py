"""What all pretraining methods share: the contract with the training loop, and a backbone taken in two halves."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from typing import Any

import torch
from mmengine.model import BaseModel
from timm.models import checkpoint_seq
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import skipless
from pretrain.data import DeviceAugment
from skipless.checks import check_flag
from skipless.models import model_class


class Method(BaseModel):
    """A pretraining method: a backbone, what is trained with it, and the loss.

    The training loop calls, for every optimizer step, `set_schedule`; then ``train_step`` (mmengine's own,
    once per micro-step); `before_optimizer_step` between the last backward and clipping;
    `after_optimizer_step`. Everything that must happen once per update, and not once per micro-step, is in
    the last.

    Weights are initialised by constructors. mmengine's ``init_weights`` is therefore a no-op here: it would
    call timm's method of the same name, drawing the backbone anew and the teacher's apart from the student's.

    Args:
        data_preprocessor: Config or module that turns a collated batch into the arguments of `forward`, on
            the device; `DeviceAugment` without augmentation when absent.
    """

    def __init__(self, data_preprocessor: dict[str, Any] | nn.Module | None = None) -> None:
        super().__init__(DeviceAugment() if data_preprocessor is None else data_preprocessor)

    def init_weights(self) -> None:
        """Nothing: see the class."""

    def forward(
        self,
        global_crops: Tensor,
        local_crops: Tensor | None = None,
        label: Tensor | None = None,
        index: Tensor | None = None,
        mode: str = 'loss',
    ) -> Any:
        """Losses of a batch, or its features.

        Args:
            global_crops: ``(G, B, 3, H, W)`` normalised images, crop-major.
            local_crops: ``(L, B, 3, h, w)``, for methods that use them.
            label: ``(B,)`` int64.
            index: ``(B,)`` position of each sample in the dataset; not used.
            mode: ``'loss'`` for `loss`; ``'tensor'`` for `embed` of the global crops, ``(G B, D)``.
        """
        if mode == 'loss':
            return self.loss(global_crops, local_crops, label)
        if mode == 'tensor':
            return self.embed(global_crops.flatten(0, 1))
        raise ValueError(f"mode={mode!r}: expected 'loss' or 'tensor'")

    @abstractmethod
    def loss(self, global_crops: Tensor, local_crops: Tensor | None, label: Tensor | None) -> dict[str, Tensor]:
        """0-d tensors: those named ``*loss*`` are summed and trained on, the others are detached monitors."""

    def parse_losses(self, losses: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Their sum, to train on, and what to log, detached: a log must not hold on to the graph."""
        total, log = super().parse_losses(losses)
        return total, {key: value.detach() for key, value in log.items()}

    @property
    @abstractmethod
    def monitored_backbone(self) -> nn.Module:
        """The backbone that is evaluated and exported."""

    def set_schedule(self, step: int, total_steps: int) -> None:
        """Set what depends on time for optimizer step ``step``, counted from 0."""

    def before_optimizer_step(self) -> None:
        """Last change to gradients, before they are clipped and applied."""

    def after_optimizer_step(self) -> None:
        """Follow an update of the parameters."""

    @torch.no_grad()
    def embed(self, images: Tensor) -> Tensor:
        """Features ``(B, D)`` of images ``(B, 3, H, W)``, without dropout, for k-NN and linear evaluation."""
        backbone = self.monitored_backbone
        training = backbone.training
        backbone.eval()
        features = self.pooled(forward_features(backbone, images))
        backbone.train(training)
        return features

    def pooled(self, features: Tensor) -> Tensor:
        """One vector per image ``(B, D)`` from the monitored backbone's features, by its own pooling."""
        return pool_features(self.monitored_backbone, features)


def build_backbone(
    backbone: dict[str, Any], grad_checkpointing: bool = False, vit_for: str | None = None, **preferred: Any
) -> Any:
    """Build a backbone from its config and check that it can be pretrained.

    Args:
        backbone: Arguments of `skipless.build_backbone`.
        grad_checkpointing: Recompute its blocks in the backward pass.
        vit_for: What only a timm ``VisionTransformer`` can be used for, where one is needed.
        **preferred: Arguments that the config may override, for models that have them.

    Raises:
        ValueError: The config has a classifier, no pooling or other than 3 channels, names no ViT where one is needed,
            or is none for `skipless.build_backbone`.
    """
    if not isinstance(backbone, dict) or not isinstance(backbone.get('name', ''), str):
        raise ValueError(f'backbone={backbone!r}: expected a dict such as dict(name="skipless_vit_small_patch16_224")')
    check_flag('grad_checkpointing', grad_checkpointing)
    if backbone.get('num_classes', 0) != 0:
        raise ValueError(
            f'backbone num_classes={backbone["num_classes"]}: the backbone of a pretraining method has no '
            'classifier; leave the key out (Supervised has a num_classes of its own)'
        )
    if 'name' not in backbone:
        raise ValueError(f'backbone={dict(backbone)} has no name; expected e.g. name="skipless_vit_small_patch16_224"')
    found = model_class(backbone['name'])
    if vit_for is not None and not issubclass(found, VisionTransformer):
        raise ValueError(
            f'{vit_for} needs a timm VisionTransformer and backbone {backbone["name"]!r} is a {found.__name__}; use a '
            'ViT, or train this one by Supervised or by DINO without iBOT'
        )
    preferred = {key: value for key, value in preferred.items() if _takes(found, key)}
    model = skipless.build_backbone(**{**preferred, **backbone})
    if model.in_chans != 3:
        raise ValueError(f'backbone in_chans={model.in_chans}: images have 3 channels; leave the key out')
    # Where timm keeps the pooling depends on the family, and in some it is a module.
    pool = getattr(model, 'global_pool', getattr(getattr(model, 'head', None), 'global_pool', None))
    if getattr(pool, 'pool_type', pool) == '':
        raise ValueError("backbone global_pool='': pretraining needs one vector per image; use 'token' or 'avg'")
    try:
        if grad_checkpointing:
            model.set_grad_checkpointing(True)
    except AssertionError as error:
        raise ValueError(f'grad_checkpointing=True: timm cannot do it for a {found.__name__}; set False') from error
    return model


def _takes(model: type[nn.Module], option: str) -> bool:
    """Whether a class or one that it is derived from has an option of that name."""
    return any(option in inspect.signature(kind).parameters for kind in model.__mro__[:-1])


def drops_patches(vit: VisionTransformer) -> bool:
    """Whether the backbone drops random patches in training, which loses track of their places."""
    return getattr(vit.patch_drop, 'prob', 0) > 0


def check_image_size(vit: VisionTransformer, height: int, width: int) -> None:
    """Raise a ``ValueError`` when the backbone cannot take images of this size."""
    embed = vit.patch_embed
    rows, columns = embed.patch_size
    if (height % rows or width % columns) and not embed.dynamic_img_pad:
        raise ValueError(
            f'images of {height}x{width} pixels cannot be cut into patches of {rows}x{columns}; '
            'make the image or crop size a multiple of the patch size'
        )
    if not vit.dynamic_img_size and (height, width) != tuple(embed.img_size):
        built = 'x'.join(map(str, embed.img_size))
        raise ValueError(
            f'images of {height}x{width} pixels given to a backbone built for {built}; '
            'set its img_size to the crop size, or dynamic_img_size=True'
        )


def embed_tokens(
    vit: VisionTransformer, images: Tensor, mask: Tensor | None = None, mask_token: Tensor | None = None
) -> Tensor:
    """First half of a ViT: patch embedding, class and register tokens, position.

    Args:
        images: ``(B, C, H, W)``.
        mask: ``(B, N)`` bool; patches whose embedding ``mask_token`` replaces, before position is added.
        mask_token: ``(D,)``.

    Returns:
        ``(B, P + N, D)``, the P prefix tokens (class, registers) first.
    """
    check_image_size(vit, *images.shape[-2:])
    patches = vit.patch_embed(images)  # (B, N, D), or (B, rows, columns, D) for a dynamic image size
    if mask is not None and mask_token is not None:
        mask = mask.reshape(*patches.shape[:-1], 1)
        patches = torch.where(mask, mask_token.to(patches.dtype), patches)
    return vit._pos_embed(patches)


def encode_tokens(vit: VisionTransformer, tokens: Tensor) -> Tensor:
    """Second half of a ViT, blocks and final norm, on any subset of tokens ``(B, n, D)``."""
    tokens = vit.norm_pre(vit.patch_drop(tokens))
    tokens = checkpoint_seq(vit.blocks, tokens) if vit.grad_checkpointing else vit.blocks(tokens)
    return vit.norm(tokens)


def forward_tokens(
    vit: VisionTransformer, images: Tensor, mask: Tensor | None = None, mask_token: Tensor | None = None
) -> Tensor:
    """timm's ``forward_features`` with the option of masking patches; arguments as for `embed_tokens`."""
    return encode_tokens(vit, embed_tokens(vit, images, mask, mask_token))


def forward_features(model: Any, images: Tensor) -> Tensor:
    """Features of images ``(B, 3, H, W)`` in the model's own layout, normalised: tokens of a ViT, else maybe a map.

    Raises:
        ValueError: The model cannot take images of this size.
    """
    if isinstance(model, VisionTransformer):
        return forward_tokens(model, images)
    try:
        return model.forward_features(images)
    except (AssertionError, RuntimeError) as error:  # how timm and torch say that a size does not fit
        if type(error) not in (AssertionError, RuntimeError):
            raise  # as for memory that is exhausted
        height, width = images.shape[-2:]
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f'a {type(model).__name__} as it is built does not take images of {height}x{width} pixels ({reason}); set '
            'its img_size to the crop size, use larger crops or another model'
        ) from error


def pool_features(model: Any, features: Tensor) -> Tensor:
    """One vector per image ``(B, D)``, by the backbone's own pooling, of the output of `forward_features`."""
    return model.forward_head(features, pre_logits=True)


def patch_tokens(vit: VisionTransformer, tokens: Tensor) -> Tensor:
    """Normalised patch tokens ``(B, N, D)`` of the output ``(B, P + N, D)`` of `encode_tokens`.

    timm moves the final norm behind the pooling for some poolings; the tokens then lack it.
    """
    return vit.fc_norm(tokens[:, vit.num_prefix_tokens :])
