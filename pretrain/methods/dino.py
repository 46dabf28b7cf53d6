"""Self-distillation without labels: DINO, with iBOT's patch loss as an option."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from mmengine.registry import MODELS
from torch import Tensor, nn

from pretrain.losses import Centre, cross_entropy, dino_loss, feature_std, teacher_distribution
from pretrain.masking import PatchMask, blockwise_mask
from pretrain.methods.base import (
    Method,
    build_backbone,
    drops_patches,
    forward_features,
    forward_tokens,
    patch_tokens,
    pool_features,
)
from pretrain.methods.heads import ProjectionHead
from pretrain.schedules import cosine, linear_warmup, resolve_steps
from skipless.checks import check_flag, check_number, check_pair, check_whole


class Branch(nn.Module):
    """Student or teacher: a backbone with a head for images and one for patches, which may be the same.

    State-dict keys are ``backbone.*``, ``head.*`` and, where patches have their own, ``patch_head.*``.
    """

    def __init__(self, backbone: Any, head: ProjectionHead, patch_head: ProjectionHead | None) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.patch_head = patch_head

    @property
    def heads(self) -> list[ProjectionHead]:
        return [self.head] if self.patch_head is None else [self.head, self.patch_head]

    def patch_logits(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Logits ``(M, K)`` of the patches at places ``(M,)`` of the flattened ``n N``; of a ViT."""
        patches = patch_tokens(self.backbone, tokens).flatten(0, 1)
        return self.heads[-1](patches[places])


@MODELS.register_module()
class DINO(Method):
    """DINO (arXiv 2104.14294), optionally with the patch loss of iBOT (arXiv 2111.07832).

    A student sees all crops of an image, a teacher, its exponential moving average, the global ones; every
    student view is trained to predict the teacher's output for every other view. With ``ibot_weight > 0``
    some patches of the student's global crops are replaced by a mask token and predicted as the teacher, who
    sees them, puts them.

    Lengths are in optimizer steps (``int``) or a fraction of the run (``float``).

    Args:
        backbone: Arguments of `skipless.build_backbone`, for any model that takes images of several sizes, and a ViT
            for iBOT. ``dynamic_img_size`` is on where there is such an option, for local crops.
        data_preprocessor: See `Method`.
        prototypes: Outputs K of the heads.
        head_hidden, bottleneck, head_batch_norm: See `ProjectionHead`.
        student_temperature: Softmax temperature of the student.
        teacher_temperature: Softmax temperature of the teacher after its warm-up.
        warmup_teacher_temperature: The one it starts from.
        teacher_temperature_warmup: Length of the line between the two.
        centre_momentum: Momentum of the running mean of teacher outputs.
        ema_momentum: Momentum of the teacher at the start; it rises to 1 on a cosine.
        freeze_last_layer: Length of the time for which the prototypes stay as they are.
        ibot_weight: Weight of the patch loss; 0 leaves out all that belongs to it.
        ibot_separate_head: Give patches a head of their own (DINOv2) instead of sharing it (iBOT).
        ibot_mask_ratio: Lowest and highest share of masked patches in a masked crop.
        ibot_mask_probability: Share of the global crops to mask.
        ibot_teacher_temperature: As ``teacher_temperature``, for patches; ``None`` for the same.
        grad_checkpointing: Recompute the student's blocks in the backward pass to save memory.
    """

    def __init__(
        self,
        backbone: dict[str, Any],
        data_preprocessor: dict[str, Any] | nn.Module | None = None,
        *,
        prototypes: int = 65536,
        head_hidden: int = 2048,
        bottleneck: int = 256,
        head_batch_norm: bool = False,
        student_temperature: float = 0.1,
        teacher_temperature: float = 0.04,
        warmup_teacher_temperature: float = 0.04,
        teacher_temperature_warmup: int | float = 0,
        centre_momentum: float = 0.9,
        ema_momentum: float = 0.996,
        freeze_last_layer: int | float = 0,
        ibot_weight: float = 0.0,
        ibot_separate_head: bool = False,
        ibot_mask_ratio: tuple[float, float] = (0.1, 0.5),
        ibot_mask_probability: float = 0.5,
        ibot_teacher_temperature: float | None = None,
        grad_checkpointing: bool = False,
    ) -> None:
        super().__init__(data_preprocessor)
        check_number('ibot_weight', ibot_weight, 0)
        check_flag('ibot_separate_head', ibot_separate_head)
        check_flag('head_batch_norm', head_batch_norm)
        sizes = dict(prototypes=prototypes, head_hidden=head_hidden, bottleneck=bottleneck)
        for name, size in sizes.items():
            check_whole(name, size, 1)
        for name, momentum in (('ema_momentum', ema_momentum), ('centre_momentum', centre_momentum)):
            check_number(name, momentum, 0, 1)
        lengths = dict(teacher_temperature_warmup=teacher_temperature_warmup, freeze_last_layer=freeze_last_layer)
        temperatures = dict(
            student_temperature=student_temperature,
            teacher_temperature=teacher_temperature,
            warmup_teacher_temperature=warmup_teacher_temperature,
            ibot_teacher_temperature=teacher_temperature
            if ibot_teacher_temperature is None
            else ibot_teacher_temperature,
        )
        for name, temperature in temperatures.items():
            check_number(name, temperature, 0, above=True)
        for name, length in lengths.items():
            check_number(name, length, 0)
        check_number('ibot_mask_probability', ibot_mask_probability, 0, 1, above=True)
        check_pair('ibot_mask_ratio', ibot_mask_ratio)
        if not 0 < ibot_mask_ratio[0] <= ibot_mask_ratio[1] < 1:
            raise ValueError(f'ibot_mask_ratio={ibot_mask_ratio}: expected 0 < lowest <= highest < 1')

        self.student_temperature = student_temperature
        self.teacher_temperatures = (warmup_teacher_temperature, teacher_temperature)
        self.patch_teacher_temperatures = (
            warmup_teacher_temperature,
            temperatures['ibot_teacher_temperature'],
        )
        self.teacher_temperature_warmup = teacher_temperature_warmup
        self.ema_momentum = ema_momentum
        self.freeze_last_layer = freeze_last_layer
        # What `set_schedule` sets, as at the start of a long run.
        self.teacher_temperature = self.patch_teacher_temperature = warmup_teacher_temperature
        self.momentum = ema_momentum
        self.last_layer_frozen = freeze_last_layer > 0

        self.ibot_weight = ibot_weight
        self.ibot_mask_ratio = ibot_mask_ratio
        self.ibot_mask_probability = ibot_mask_probability

        vit_for = 'ibot_weight > 0' if ibot_weight else None
        model = build_backbone(backbone, grad_checkpointing, vit_for, dynamic_img_size=True)

        def head() -> ProjectionHead:
            return ProjectionHead(model.head_hidden_size, prototypes, head_hidden, bottleneck, head_batch_norm)

        self.student = Branch(model, head(), head() if ibot_weight and ibot_separate_head else None)
        # Half-precision increments of (1 - momentum) would be lost, so the teacher is float32 whatever the
        # student is.
        self.teacher = deepcopy(self.student).float().requires_grad_(False).eval()
        self.centre = Centre(prototypes, centre_momentum)
        if ibot_weight:
            if drops_patches(model):
                raise ValueError('ibot_weight > 0 needs all patches; leave patch_drop_rate out of the backbone')
            self.mask_token = nn.Parameter(torch.zeros(model.embed_dim))
            self.patch_centre = Centre(prototypes, centre_momentum)

    def train(self, mode: bool = True) -> DINO:
        """As usual, but the teacher always predicts without dropout and with running statistics."""
        super().train(mode)
        self.teacher.eval()
        return self

    @property
    def monitored_backbone(self) -> nn.Module:
        return self.teacher.backbone

    def set_schedule(self, step: int, total_steps: int) -> None:
        warmup = resolve_steps(self.teacher_temperature_warmup, total_steps, 'teacher_temperature_warmup')
        self.teacher_temperature = linear_warmup(step, warmup, *self.teacher_temperatures)
        self.patch_teacher_temperature = linear_warmup(step, warmup, *self.patch_teacher_temperatures)
        self.momentum = cosine(step, total_steps, self.ema_momentum, 1.0)
        self.last_layer_frozen = step < resolve_steps(self.freeze_last_layer, total_steps, 'freeze_last_layer')

    def before_optimizer_step(self) -> None:
        """Keep frozen prototypes as they are: optimizers pass over what has no gradient, decay included.

        It is computed all the same: DistributedDataParallel counts on the same gradients at every step.
        """
        if self.last_layer_frozen:
            for head in self.student.heads:
                head.last_layer.weight.grad = None

    def after_optimizer_step(self) -> None:
        ema_update(self.teacher, self.student, self.momentum)
        for module in self.children():
            if isinstance(module, Centre):
                module.update()

    def loss(self, global_crops: Tensor, local_crops: Tensor | None, label: Tensor | None) -> dict[str, Tensor]:
        """See `Method.loss`; the losses are ``loss_dino`` and, with iBOT, ``loss_ibot``, weight included."""
        crops, batch = global_crops.shape[:2]
        images = global_crops.flatten(0, 1)
        masked = self._sample_mask(images)

        with torch.no_grad():
            teacher_tokens = forward_features(self.teacher.backbone, images)
            embeddings = self.pooled(teacher_tokens)
            targets, entropy = self._targets(self.teacher.head(embeddings), self.centre, self.teacher_temperature)

        # One forward per resolution, and one of the head for all views.
        student = self.student.backbone
        if masked is None:
            student_tokens = forward_features(student, images)
        else:
            student_tokens = forward_tokens(student, images, masked.mask, self.mask_token)
        features = [pool_features(student, student_tokens)]
        if local_crops is not None:
            features.append(pool_features(student, forward_features(student, local_crops.flatten(0, 1))))
        logits = self.student.head(torch.cat(features))

        loss = dino_loss(
            logits.unflatten(0, (-1, batch)), targets.unflatten(0, (crops, batch)), self.student_temperature
        )
        entropy = entropy.mean()
        results = {
            'loss_dino': loss,
            'teacher_entropy': entropy,
            'teacher_kl': loss.detach() - entropy,
            'feature_std': feature_std(embeddings),
            'teacher_temperature': loss.new_full((), self.teacher_temperature),
            'momentum': loss.new_full((), self.momentum),
        }
        if masked is not None:
            results |= self._patch_loss(student_tokens, teacher_tokens, masked)
        return results

    def _patch_loss(self, student_tokens: Tensor, teacher_tokens: Tensor, masked: PatchMask) -> dict[str, Tensor]:
        with torch.no_grad():
            logits = self.teacher.patch_logits(teacher_tokens, masked.indices)
            targets, entropy = self._targets(logits, self.patch_centre, self.patch_teacher_temperature)
        logits = self.student.patch_logits(student_tokens, masked.indices)
        loss = cross_entropy(logits, targets, self.student_temperature)
        return {
            'loss_ibot': self.ibot_weight * (masked.weight * loss).sum(),
            'patch_entropy': entropy.mean(),
            'patch_kl': (loss.detach() - entropy).mean(),
        }

    def _sample_mask(self, images: Tensor) -> PatchMask | None:
        if not self.ibot_weight:
            return None
        height, width = images.shape[-2:]
        grid = self.student.backbone.patch_embed.dynamic_feat_size((height, width))
        return blockwise_mask(len(images), grid, self.ibot_mask_ratio, self.ibot_mask_probability, images.device)

    def _targets(self, logits: Tensor, centre: Centre, temperature: float) -> tuple[Tensor, Tensor]:
        if self.training:
            centre.accumulate(logits)
        return teacher_distribution(logits, centre.value, temperature)


@torch.no_grad()
def ema_update(teacher: nn.Module, student: nn.Module, momentum: float) -> None:
    """Move a teacher's parameters by ``t <- m t + (1 - m) s``, in its own precision, and copy the buffers.

    Both modules have the same structure.
    """
    targets: list[Tensor] = list(teacher.parameters())
    sources = [source.to(target.dtype) for source, target in zip(student.parameters(), targets, strict=True)]
    torch._foreach_lerp_(targets, sources, 1 - momentum)
    for target, source in zip(teacher.buffers(), student.buffers(), strict=True):
        target.copy_(source)
