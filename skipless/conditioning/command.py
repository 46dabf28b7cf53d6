"""The command line of ``tools/diagnose.py``: a model, images, and the files that come of them."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from torch import Tensor, nn

from skipless.checkpoint import load_backbone, read_backbone
from skipless.checks import check_seed, check_whole
from skipless.command_line import parse_options
from skipless.conditioning.blocks import Captured
from skipless.conditioning.diagnosis import Diagnosis, diagnose
from skipless.conditioning.jacobians import Effort
from skipless.conditioning.plots import plot
from skipless.conditioning.singular import DENSE_ENTRIES
from skipless.files import write_json
from skipless.models import build_backbone
from skipless.scenes import SceneSplit

_SUFFIXES = {'.jpg', '.jpeg', '.png', '.webp', '.bmp', '.ppm', '.tif', '.tiff'}


def diagnose_words(description: str, words: Sequence[str] | None = None) -> dict[str, Any]:
    """The command line: arguments of `run` by name; ``words`` are those of the process when absent."""
    effort = Effort()
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument('target', metavar='MODEL_OR_CKPT', help="timm's name of a model, or a checkpoint file")
    parser.add_argument('--out', required=True, type=Path, metavar='DIR', help='where results go')
    parser.add_argument('--images', type=Path, metavar='DIR', help='images to use instead of the embedded scenes')
    parser.add_argument('--count', type=int, default=4, help='images (default: 4)')
    parser.add_argument(
        '--model-options',
        nargs='+',
        default=[],
        metavar='KEY=VALUE',
        help='arguments of the model, as in model.backbone of a config, e.g. img_size=96 init.preset=centred',
    )
    parser.add_argument('--which', choices=('teacher', 'student'), default='teacher', help='of a checkpoint with both')
    parser.add_argument(
        '--jacobian-images', type=int, default=1, help='images whose Jacobians are measured; 0 for none (default: 1)'
    )
    parser.add_argument('--no-parameters', action='store_true', help='leave out Jacobians by parameters')
    parser.add_argument(
        '--steps',
        type=int,
        default=effort.steps,
        help=f'Lanczos steps: more bring bounds nearer (default: {effort.steps})',
    )
    parser.add_argument(
        '--dense-entries',
        type=int,
        default=DENSE_ENTRIES,
        help=f'entries up to which a Jacobian is formed (default: {DENSE_ENTRIES})',
    )
    parser.add_argument('--device', help='default: cuda where there is one, else cpu')
    parser.add_argument('--seed', type=int, default=0, help='of weights that are not loaded, and of starts')
    return vars(parser.parse_args(words))


def run(
    target: str,
    out: Path,
    images: Path | None = None,
    count: int = 4,
    model_options: Sequence[str] = (),
    which: str = 'teacher',
    jacobian_images: int = 1,
    no_parameters: bool = False,
    steps: int = 12,
    dense_entries: int = DENSE_ENTRIES,
    device: str | None = None,
    seed: int = 0,
    progress: Callable[[Sequence[Captured]], Iterable[Captured]] = iter,
    say: Callable[[str], None] = lambda text: None,
) -> Diagnosis:
    """Diagnose a model or checkpoint and write ``diagnosis.json`` and ``conditioning.png``.

    Args:
        target: Name of a model, with fresh weights unless ``pretrained=True`` is among the options; or a checkpoint of
            this project, which says how its model is built.
        out: Folder, made if need be.
        images: Folder of images, searched at every depth; the embedded scenes when absent.
        count: Images, evenly spread over those of the folder.
        model_options: ``KEY=VALUE``, over what a checkpoint says.
        which, jacobian_images, steps, dense_entries: See `read_backbone`, `diagnose` and `Effort`.
        no_parameters: Leave out Jacobians by parameters.
        device, seed: Where to compute; of fresh weights and of random starts.
        progress: See `diagnose`.
        say: Takes lines for the user.

    Raises:
        ValueError, FileNotFoundError: Something that was given cannot be used.
    """
    check_whole('--count', count, 1)
    check_seed('--seed', seed)
    effort = Effort(dense_entries=dense_entries, steps=steps, seed=seed)
    place = _device(device)
    model, (mean, std) = _model(target, parse_options(model_options), which, seed, say)
    size = _image_size(model)
    batch = embedded_images(count, size) if images is None else folder_images(images, count, size)
    batch = (batch - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    diagnosis = diagnose(
        model.to(place),
        batch.to(place),
        jacobian_images=jacobian_images,
        parameters=not no_parameters,
        effort=effort,
        progress=progress,
    )
    out.mkdir(parents=True, exist_ok=True)
    source = 'embedded scenes' if images is None else str(images)
    about = {'target': target, 'model_options': list(model_options), 'seed': seed, 'image_source': source}
    write_json(out / 'diagnosis.json', {**about, 'size': list(size), **diagnosis.as_json()})
    say(diagnosis.table())
    try:
        plot(diagnosis, out / 'conditioning.png', f'{target}, {len(batch)} images ({source})')
    except ModuleNotFoundError as error:
        say(f'no picture: {error}; install matplotlib')
    say(f'wrote {out}')
    return diagnosis


def embedded_images(count: int, size: tuple[int, int]) -> Tensor:
    """The first procedural scenes of the val split, ``(B, 3, H, W)`` in [0, 1]."""
    views = np.stack([scene.image for scene in SceneSplit(seed=0, split='val', length=count, size=size)])
    return torch.from_numpy(views).permute(0, 3, 1, 2) / 255


def folder_images(folder: Path, count: int, size: tuple[int, int]) -> Tensor:
    """Images of a folder and those below it, resized and cropped about their centre, ``(B, 3, H, W)`` in [0, 1].

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: It has no images, or one that cannot be read.
    """
    from PIL import Image

    if not folder.is_dir():
        raise FileNotFoundError(f'--images {folder} is no folder')
    files = sorted(path for path in folder.rglob('*') if path.suffix.lower() in _SUFFIXES)
    if not files:
        raise ValueError(f'--images {folder} holds no images; expected files such as {sorted(_SUFFIXES)}')
    chosen = np.linspace(0, len(files) - 1, min(count, len(files))).round().astype(int)
    transform: Any = create_transform(
        (3, *size), is_training=False, mean=(0, 0, 0), std=(1, 1, 1), interpolation='bicubic', crop_pct=1.0
    )
    found = []
    for path in (files[i] for i in chosen):
        try:
            with Image.open(path) as image:
                found.append(transform(image.convert('RGB')))
        except OSError as error:
            raise ValueError(f'image {path} cannot be read ({error}); remove it') from error
    return torch.stack(found)


def _model(
    target: str, options: dict[str, Any], which: str, seed: int, say: Callable[[str], None]
) -> tuple[nn.Module, tuple[Sequence[float], Sequence[float]]]:
    """A model, and the mean and standard deviation of the images that it is for."""
    torch.manual_seed(seed)
    if not Path(target).exists():
        if Path(target).suffix in ('.pth', '.safetensors') or '/' in target:
            raise FileNotFoundError(f'checkpoint {target} does not exist')
        model = build_backbone(target, **nested(options))
        config = getattr(model, 'pretrained_cfg', None) or {}
        return model, (config.get('mean', IMAGENET_DEFAULT_MEAN), config.get('std', IMAGENET_DEFAULT_STD))
    config = read_backbone(target, which).config
    if config is None and 'name' not in options:
        raise ValueError(
            f'checkpoint {target} does not say how its backbone is built; do so by --model-options, e.g. '
            'name=vit_small_patch16_224'
        )
    model = build_backbone(**nested(options, config))
    say(str(load_backbone(model, target, which)))
    return model, (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)


def nested(options: dict[str, Any], base: dict[str, Any] | None = None) -> dict[str, Any]:
    """Options with dotted keys as dicts in dicts, over those of a base.

    Raises:
        ValueError: A key is below one that holds a value.
    """
    merged = copy.deepcopy(dict(base or {}))
    for key, value in options.items():
        node = merged
        *parents, leaf = key.split('.')
        for name in parents:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                raise ValueError(f'--model-options {key}: {name} is {node!r}, which holds no keys')
        node[leaf] = value
    return merged


def _image_size(model: nn.Module) -> tuple[int, int]:
    config = getattr(model, 'pretrained_cfg', None) or {}
    size = getattr(getattr(model, 'patch_embed', None), 'img_size', None) or config.get('input_size', (3, 224, 224))[1:]
    return int(size[0]), int(size[1])


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ('cuda' if torch.cuda.is_available() else 'cpu'))
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f'--device {name} cannot be used ({error}); try cpu') from error
    return device
