"""Token Graying against its definition, at the points where a naive one breaks, and in front of real models."""

from __future__ import annotations

import copy
import math

import pytest
import timm
import torch
import torch.nn.functional as F

import skipless
from skipless.graying import Graying, apply_graying, dct, gray_dct, gray_svd, idct

TEST = 'skipless_vit_test_patch4_32'
SHAPES = [(3, 7, 5), (2, 5, 7), (2, 6, 6), (1, 8), (8, 1), (1, 1), (2, 2), (2, 3, 4, 9)]
FLOOR = torch.finfo(torch.float32).eps


def cosines(n):
    """The orthonormal DCT-II matrix, from the definition."""
    k, j = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    matrix = math.sqrt(2 / n) * torch.cos(math.pi * k * (2 * j + 1) / (2 * n))
    matrix[0] /= math.sqrt(2)
    return matrix


def dct_oracle(x, eps):
    x = x.double()
    rows, columns = cosines(x.shape[-2]), cosines(x.shape[-1])
    c = rows @ x @ columns.T
    largest = c.abs().amax(dim=(-2, -1), keepdim=True)
    return rows.T @ (c.sign() * largest * (c.abs() / largest) ** eps) @ columns


def svd_oracle(x, eps):
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return u @ torch.diag_embed(s[..., :1] * (s / s[..., :1]) ** eps) @ vh


ORACLES = {'dct': (gray_dct, dct_oracle), 'svd': (gray_svd, svd_oracle)}


def with_singular_values(values, rows, columns, generator, dtype=torch.float64):
    """A matrix of these singular values, and its singular vectors as columns."""
    count = len(values)
    u, _ = torch.linalg.qr(torch.randn(rows, count, generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(columns, count, generator=generator, dtype=torch.float64))
    return (u * torch.tensor(values, dtype=torch.float64) @ v.T).to(dtype), u, v


@pytest.mark.parametrize('n', [1, 2, 3, 4, 5, 8, 9, 30, 197])
def test_dct_is_the_cosine_matrix_and_idct_its_transpose(n, generator):
    x = torch.randn(2, 3, n, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(dct(x), x @ cosines(n).T, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(idct(x), x @ cosines(n), rtol=1e-12, atol=1e-12)


def test_dct_is_scipys(generator):
    fft = pytest.importorskip('scipy.fft')
    for n in (1, 6, 7):
        x = torch.randn(4, n, generator=generator, dtype=torch.float64)
        torch.testing.assert_close(dct(x), torch.from_numpy(fft.dct(x.numpy(), norm='ortho')))
        torch.testing.assert_close(idct(x), torch.from_numpy(fft.idct(x.numpy(), norm='ortho')))


@pytest.mark.parametrize('eps', [0.95, 0.5])
@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('kind', ORACLES)
def test_graying_is_the_formula(kind, shape, eps, generator):
    gray, oracle = ORACLES[kind]
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(gray(x, eps), oracle(x, eps), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(('rows', 'columns'), [(40, 12), (12, 40)])
def test_singular_values_follow_the_power_law_down_to_a_millionth(rows, columns, generator):
    values = [3.0 * 10 ** (-i / 2) for i in range(12)]
    x, _, _ = with_singular_values(values, rows, columns, generator)
    found = torch.linalg.svdvals(gray_svd(x, 0.8))
    expected = torch.tensor([3.0 * (v / 3.0) ** 0.8 for v in values], dtype=torch.float64)
    # 1e-5.5 is the smallest share; against it the floor, 1e-7, is felt by (1 - eps) / 2 times their squared ratio.
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=0)
    torch.testing.assert_close(found[:9], expected[:9], rtol=1e-6, atol=0)
    single = torch.linalg.svdvals(gray_svd(x.float(), 0.8).double())
    torch.testing.assert_close(single[:9], expected[:9], rtol=1e-3, atol=0)


@pytest.mark.parametrize('kind', ORACLES)
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_eps_1_is_the_identity(kind, dtype, generator):
    gray, _ = ORACLES[kind]
    ill, _, _ = with_singular_values([10.0, 1e-3, 1e-6, 0.0, 0.0], 60, 48, generator, dtype)
    image = torch.linspace(-2, 2, 48, dtype=dtype) * torch.linspace(-1, 1, 60, dtype=dtype)[:, None]
    for x in (ill, image, torch.randn(60, 48, generator=generator, dtype=dtype), torch.zeros(60, 48, dtype=dtype)):
        torch.testing.assert_close(gray(x, 1.0), x, rtol=0, atol=1e-5)


@pytest.mark.parametrize('kind', ORACLES)
def test_every_matrix_of_a_batch_is_grayed_by_itself(kind, generator):
    gray, _ = ORACLES[kind]
    x = torch.randn(3, 9, 6, generator=generator) * torch.tensor([1.0, 100.0, 0.01])[:, None, None]
    for together, alone in zip(gray(x, 0.7), x, strict=True):
        torch.testing.assert_close(together, gray(alone, 0.7), rtol=1e-5, atol=1e-6 * float(alone.abs().max()))


@pytest.mark.parametrize('kind', ORACLES)
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single_and_given_back_as_it_came(kind, dtype, generator):
    gray, oracle = ORACLES[kind]
    x = torch.randn(2, 50, 40, generator=generator).to(dtype)
    wanted = gray(x.float(), 0.7)
    torch.testing.assert_close(wanted.double(), oracle(x, 0.7), rtol=1e-4, atol=1e-4)
    assert torch.equal(gray(x, 0.7), wanted.to(dtype))
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert torch.equal(gray(x, 0.7), wanted.to(dtype))
        assert torch.equal(gray(x.float(), 0.7), wanted)


@pytest.mark.parametrize('kind', ORACLES)
@pytest.mark.parametrize('shape', [(2, 6, 4), (4, 6), (5, 5)])
def test_gradient_is_that_of_the_function(kind, shape, generator):
    gray, _ = ORACLES[kind]
    x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: gray(y, 0.6), x)


@pytest.mark.parametrize(
    'values',
    [[3.0, 1.0, 1.0, 1.0], [3.0, 1.0, 1.0 + 1e-9, 0.5], [2.0, 1.0, 1e-2, 1e-2]],
    ids=['equal', 'near', 'small'],
)
@pytest.mark.parametrize(('rows', 'columns'), [(6, 4), (4, 6), (4, 4)])
def test_gradient_with_equal_singular_values(values, rows, columns, generator):
    x, _, _ = with_singular_values(values, rows, columns, generator)
    assert torch.autograd.gradcheck(lambda y: gray_svd(y, 0.6), x.requires_grad_())


def test_gradient_at_zero_singular_values_is_the_slope_of_the_floor(generator):
    """Along u v^T, both vectors of a zero singular value, the derivative of ``s (s^2 + d^2)^p`` is ``d^(2 p)``."""
    x, u, v = with_singular_values([3.0, 1.0, 0.0, 0.0], 6, 4, generator)
    x.requires_grad_()
    for i, j in ((2, 2), (2, 3)):
        (gradient,) = torch.autograd.grad(u[:, i] @ gray_svd(x, 0.6) @ v[:, j], x)
        # A hundredth of the floor's square is where float64 rounds a Gram matrix.
        assert float(u[:, i] @ gradient @ v[:, j]) == pytest.approx(FLOOR ** (0.6 - 1), rel=1e-2)
        assert gradient.isfinite().all()
    # Of a largest one it is 1, and that of a middle one moves with the largest, to which all are relative.
    for i, along_own, along_first in ((0, 1.0, 1.0), (1, 0.6 * 3**0.4, 0.4 * 3 ** (0.4 - 1))):
        (gradient,) = torch.autograd.grad(u[:, i] @ gray_svd(x, 0.6) @ v[:, i], x)
        assert float(u[:, i] @ gradient @ v[:, i]) == pytest.approx(along_own, rel=1e-6)
        assert float(u[:, 0] @ gradient @ v[:, 0]) == pytest.approx(along_first, rel=1e-6)


def test_gradient_at_zero_coefficients_is_the_slope_of_the_floor():
    rows, columns = cosines(5), cosines(4)
    c = torch.zeros(5, 4, dtype=torch.float64)
    c[0, 0], c[1, 2] = 4.0, -1.0
    x = (rows.T @ c @ columns).requires_grad_()
    for place, expected in (((3, 3), FLOOR ** (0.6 - 1)), ((1, 2), 0.6 * 4**0.4), ((0, 0), 1.0)):
        (gradient,) = torch.autograd.grad((rows @ gray_dct(x, 0.6) @ columns.T)[place], x)
        assert gradient.isfinite().all()
        assert float((rows @ gradient @ columns.T)[place]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize('kind', ORACLES)
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_gradients_are_finite_where_tokens_are_equal_or_zero(kind, dtype):
    gray, _ = ORACLES[kind]
    for x in (torch.zeros(9, 6), torch.ones(9, 6), torch.eye(9, 6), 1e-30 * torch.eye(9, 6)):
        x = x.to(dtype).requires_grad_()
        (gradient,) = torch.autograd.grad(gray(x, 0.5).square().sum() + gray(x, 0.5).sum(), x)
        assert gradient.isfinite().all()
        assert gradient.dtype == dtype


@pytest.mark.parametrize('kind', ORACLES)
def test_what_is_not_finite_stays_so_and_harms_no_other_image(kind, generator):
    gray, _ = ORACLES[kind]
    x = torch.randn(3, 9, 6, generator=generator)
    whole = gray(x, 0.7)
    x[0, 2, 2], x[1, 0, 0] = math.nan, math.inf
    found = gray(x, 0.7)
    assert not found[0].isfinite().all()
    assert not found[1].isfinite().all()
    torch.testing.assert_close(found[2], whole[2])


@pytest.mark.parametrize('shape', [(2, 9, 4), (2, 4, 9)])
def test_the_smaller_gram_matrix_is_decomposed(shape, monkeypatch):
    sizes = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, 'eigh', lambda x: sizes.append((tuple(x.shape), x.dtype)) or eigh(x))
    gray_svd(torch.randn(shape), 0.7)
    assert sizes == [((2, 4, 4), torch.float64)]


def test_second_derivatives_of_the_svd_variant_are_refused_rather_than_wrong(generator):
    x = torch.randn(5, 4, generator=generator, requires_grad=True)
    with pytest.raises(NotImplementedError, match='no second derivative'):
        torch.autograd.grad(gray_svd(x, 0.7).square().sum(), x, create_graph=True)


def test_second_derivatives_of_the_dct_variant(generator):
    x = torch.randn(3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda y: gray_dct(y, 0.6), x)


@pytest.mark.parametrize('kind', ORACLES)
@pytest.mark.parametrize(('size', 'patch'), [((16, 24), (4, 4)), ((12, 12), (3, 6)), ((13, 10), (4, 4))])
def test_an_image_is_grayed_as_the_matrix_that_the_patch_embedding_sees(kind, size, patch, generator):
    _, oracle = ORACLES[kind]
    images = torch.randn(2, 3, *size, generator=generator)
    whole = [-(-length // step) * step for length, step in zip(size, patch, strict=True)]
    padded = F.pad(images, (0, whole[1] - size[1], 0, whole[0] - size[0])).double()
    patches = F.unfold(padded, patch, stride=patch).mT  # (B, N, C h w), in the order of a convolution's weight
    expected = F.fold(oracle(patches, 0.7).mT, whole, patch, stride=patch)[..., : size[0], : size[1]]
    found = Graying(kind, 0.7, patch)(images)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    assert found.shape == images.shape


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(kind='fft'), r"graying.kind='fft': expected one of \['dct', 'svd'\]"),
        (dict(kind=1), 'graying.kind=1'),
        (dict(eps=0), r'graying.eps=0: expected a finite number in \(0, 1\]'),
        (dict(eps=1.1), 'graying.eps=1.1'),
        (dict(eps='x'), "graying.eps='x'"),
        (dict(at='blocks'), "graying.at='blocks': expected 'patches' or 'tokens'"),
        (dict(epsilon=0.9), r"graying has no options \['epsilon'\]; it takes kind, eps and at"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        skipless.build_backbone(TEST, graying=options)


#: The families of the paper's table and ConvMixer, small, each with the size of its patches.
FAMILIES = {
    'stock ViT': (dict(name='vit_tiny_patch16_224', img_size=32, embed_dim=32, depth=2, num_heads=2), 16),
    'skipless ViT': (dict(name=TEST, depth=2), 4),
    'Swin': (
        dict(
            name='swin_tiny_patch4_window7_224',
            img_size=32,
            embed_dim=24,
            depths=(1, 1),
            num_heads=(2, 2),
            window_size=4,
        ),
        4,
    ),
    'CaiT': (dict(name='cait_xxs24_224', img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2), 8),
    'PVTv2': (dict(name='pvt_v2_b0', depths=(1,) * 4, embed_dims=(8, 16, 24, 32), num_heads=(1, 1, 2, 2)), 4),
    'ConvMixer': (dict(name='skipless_convmixer_768_32', dim=16, depth=2, skip=True), 7),
}


@pytest.mark.parametrize('kind', ORACLES)
@pytest.mark.parametrize('family', FAMILIES)
def test_a_model_with_graying_is_the_model_on_a_grayed_image(family, kind, generator):
    config, patch = FAMILIES[family]
    torch.manual_seed(0)
    plain = skipless.build_backbone(**config).eval()
    grayed = skipless.build_backbone(**config, graying=dict(kind=kind, eps=0.6)).eval()
    assert list(grayed.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in grayed.named_modules()] == [name for name, _ in plain.named_modules()]
    grayed.load_state_dict(plain.state_dict())
    assert grayed.graying == dict(kind=kind, eps=0.6, at='patches')
    images = torch.randn(2, 3, 32, 32, generator=generator)
    expected = plain(Graying(kind, 0.6, (patch, patch))(images))
    torch.testing.assert_close(grayed(images), expected)
    torch.testing.assert_close(grayed.forward_head(grayed.forward_features(images)), expected)
    assert not torch.allclose(grayed.forward_features(images), plain.forward_features(images), atol=1e-2)
    maps = grayed.forward_intermediates(images, intermediates_only=True)
    wanted = plain.forward_intermediates(Graying(kind, 0.6, (patch, patch))(images), intermediates_only=True)
    for found, map_ in zip(maps, wanted, strict=True):
        torch.testing.assert_close(found, map_)


def seen_by_the_first_block(model, run):
    inputs = []
    handle = model.blocks[0].register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    with torch.no_grad():
        run(model)
    handle.remove()
    return inputs[-1]


@pytest.mark.parametrize('kind', ORACLES)
@pytest.mark.parametrize('family', ['stock ViT', 'skipless ViT', 'CaiT'])
def test_tokens_are_grayed_on_every_path_before_the_first_block(family, kind, generator):
    config, _ = FAMILIES[family]
    _, oracle = ORACLES[kind]
    plain = skipless.build_backbone(**config)
    grayed = skipless.build_backbone(**config, graying=dict(kind=kind, eps=0.6, at='tokens'))
    assert list(grayed.state_dict()) == list(plain.state_dict())
    grayed.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, 32, 32, generator=generator)
    tokens = seen_by_the_first_block(plain, lambda model: model(images))
    for run in (
        lambda model: model(images),
        lambda model: model.forward_features(images),
        lambda model: model.forward_intermediates(images),
    ):
        found = seen_by_the_first_block(grayed, run)
        torch.testing.assert_close(found.double(), oracle(tokens, 0.6), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(found, tokens, atol=1e-2)


@pytest.mark.parametrize('at', ['patches', 'tokens'])
def test_a_copy_is_grayed_too_and_by_itself(at, generator):
    images = torch.randn(2, 3, 32, 32, generator=generator)
    model = skipless.build_backbone(TEST, graying=dict(eps=0.6, at=at))
    twin = copy.deepcopy(model)
    assert torch.equal(twin(images), model(images))
    # Neither shares a hook's state with the other.
    (ours,), (theirs,) = (
        {hook.__self__ for module in net.modules() for hook in hooks(module)} for net in (model, twin)
    )
    assert ours is not theirs


def hooks(module):
    found = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return [hook for hook in found if isinstance(getattr(hook, '__self__', None), Graying)]


@pytest.mark.parametrize('kind', ORACLES)
@pytest.mark.parametrize('at', ['patches', 'tokens'])
def test_gradient_checkpointing_gives_the_same_gradients(kind, at, generator):
    torch.manual_seed(0)
    model = skipless.build_backbone(TEST, graying=dict(kind=kind, at=at))
    images = torch.randn(2, 3, 32, 32, generator=generator)

    def gradients():
        model.zero_grad()
        model(images).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    assert all(gradient.isfinite().all() for gradient in plain)
    model.set_grad_checkpointing()
    for a, b in zip(plain, gradients(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize('at', ['patches', 'tokens'])
def test_dynamic_sizes_and_padding(at, generator):
    model = skipless.build_backbone(TEST, dynamic_img_size=True, dynamic_img_pad=True, graying=dict(eps=0.6, at=at))
    plain = skipless.build_backbone(TEST, dynamic_img_size=True, dynamic_img_pad=True)
    plain.load_state_dict(model.state_dict())
    images = torch.randn(1, 3, 30, 33, generator=generator)
    padded = F.pad(images, (0, 3, 0, 2))  # as the patch embedding does it
    found = seen_by_the_first_block(model, lambda m: m(images))
    if at == 'patches':
        gray = Graying('dct', 0.6, (4, 4))
        expected = seen_by_the_first_block(plain, lambda m: m(gray(padded)))
    else:
        expected = gray_dct(seen_by_the_first_block(plain, lambda m: m(padded)), 0.6)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(('kind', 'at'), [('dct', 'patches'), ('svd', 'tokens')])
def test_compiles_in_one_graph(kind, at, generator):
    torch._dynamo.reset()
    model = skipless.build_backbone(TEST, depth=1, graying=dict(kind=kind, at=at))
    images = torch.randn(1, 3, 32, 32, generator=generator)
    compiled = torch.compile(model, backend='eager', fullgraph=True)
    torch.testing.assert_close(compiled(images), model(images))
    torch._dynamo.reset()


def test_half_precision_models_are_grayed_in_single_precision(generator):
    model = skipless.build_backbone(TEST, graying=dict(eps=0.6, at='tokens')).bfloat16()
    plain = skipless.build_backbone(TEST).bfloat16()
    plain.load_state_dict(model.state_dict())
    images = torch.randn(1, 3, 32, 32, generator=generator).bfloat16()
    found = seen_by_the_first_block(model, lambda m: m(images))
    tokens = seen_by_the_first_block(plain, lambda m: m(images))
    assert torch.equal(found, gray_dct(tokens.float(), 0.6).bfloat16())


@pytest.mark.parametrize(
    ('name', 'options', 'words'),
    [
        ('crossvit_tiny_240', 'dct', 'one convolution that cuts the image into patches.*CrossVit'),
        ('naflexvit_base_patch16_gap', 'dct', 'one convolution.*NaFlexVit'),
        ('pvt_v2_b0', dict(at='tokens'), "at='tokens' needs.*PyramidVisionTransformerV2; use at='patches'"),
    ],
)
def test_models_without_such_a_place_are_refused(name, options, words):
    with torch.device('meta'):
        model = timm.create_model(name)
    with pytest.raises(ValueError, match=words):
        apply_graying(model, options)


def test_a_model_is_grayed_once():
    model = skipless.build_backbone(TEST, graying='svd')
    assert model.graying == dict(kind='svd', eps=0.95, at='patches')
    with pytest.raises(ValueError, match='grayed already'):
        apply_graying(model, 'dct')
