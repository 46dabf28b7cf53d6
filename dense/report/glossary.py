"""What the words on the page mean."""

from __future__ import annotations

from dense.comparison import AT_START
from dense.report.collect import Results

TERMS = {
    'skip, skipless': 'The two architectures: a Vision Transformer with the residual connections around '
    'attention and MLP, and the same network without them.',
    'arm': 'One side of the comparison: an architecture, its initialisation and its optimizer. What else '
    'differs is listed under "What differs".',
    'baseline': 'A network with random weights that was never pretrained, probed like the others. What an '
    'arm has learned is its lead over the baseline that the config names for it, one of its own architecture and '
    'initialisation where there is one.',
    'probe': 'A linear head trained on the frozen backbone, so that the score speaks of the features.',
    'single-layer, multi-scale': 'The probe reads the features of one block, or of several blocks concatenated.',
    'seed': 'What all random choices of a run follow from. Differences smaller than the spread over seeds mean little.',
}
METRICS = {
    'knn': (
        'k-NN accuracy',
        'Share of validation images whose class the nearest training images in feature space vote for; '
        'nothing is trained.',
    ),
    'top1': ('accuracy', 'Share of validation images whose class is predicted first.'),
    'mIoU': (
        'mIoU',
        'Intersection over union of the predicted and the true pixels of a class, averaged over the classes.',
    ),
    'mAcc': (
        'mean class accuracy',
        'Share of the pixels of a class that are predicted as such, averaged over the classes.',
    ),
    'aAcc': ('pixel accuracy', 'Share of all pixels with the right class.'),
    'delta1': ('δ1', 'Share of pixels whose predicted depth is within a factor of 1.25 of the true one.'),
    'delta2': ('δ2', 'As δ1, within a factor of 1.25².'),
    'delta3': ('δ3', 'As δ1, within a factor of 1.25³.'),
    'abs_rel': ('AbsRel', 'Absolute depth error relative to the true depth, on average.'),
    'rmse': ('RMSE', 'Root of the mean squared depth error, in metres.'),
    'log10': ('log10', 'Absolute difference of the decimal logarithms of depth, on average.'),
    'silog': ('SILog', 'Spread of the logarithmic depth error: an error in overall scale is not counted.'),
}
BLOCKS = {
    'token cosine': 'Mean cosine between the patch tokens of one image. At 1 all tokens are the same and '
    'the map of features is blank (rank collapse).',
    'effective rank': 'Number of directions that the tokens of an image really use: the exponential of the '
    'entropy of their normalised squared singular values.',
    'condition of the tokens': 'Largest over smallest singular value of the token matrix of an image. It is high where '
    'tokens agree, and says how the tokens are spread, not how well a layer trains.',
    'condition of value and output': 'Largest over smallest singular value of W_V W_O, the map of the whole attention '
    'layer from values to outputs. A skipless network trains through it; the initialisation makes it 1.',
}
PICTURES = {
    'PCA of features': 'The three directions in which the patch features of the shown images vary most, as '
    'red, green and blue. Parts of one colour have similar features.',
}


def glossary(results: Results, blocks: bool, pictures: bool) -> dict[str, str]:
    """The words that this page uses, with their meaning: metrics only where they are reported."""
    keys = dict.fromkeys(
        metric.key.rpartition('/')[2].partition(AT_START)[0] for metric in results.comparison.columns.values()
    )
    metrics = dict(METRICS[key] for key in keys if key in METRICS)
    return TERMS | metrics | (BLOCKS if blocks else {}) | (PICTURES if pictures else {})
