"""Optimizers against float64 oracles, their groups, and their resume."""

from __future__ import annotations

import pytest
import torch

import skipless
from skipless.optim import build_optimizer, parameter_groups


@pytest.mark.parametrize('kind', ['AdamW', 'SOAP', 'Muon'])
def test_only_matrices_decay(kind):
    model = skipless.build_backbone('skipless_vit_test_patch4_32', reg_tokens=2, num_classes=3)
    decaying = {n for group in parameter_groups(model, 0.1) if group['weight_decay'] for n in group['names']}
    assert decaying == {n for n, p in model.named_parameters() if n.endswith('weight') and 'norm' not in n}
    optimizer = build_optimizer(model, kind, lr=0.1, weight_decay=0.5)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for _ in range(2):  # SOAP's first step does not move a parameter
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    factor = 0.95 if kind == 'SOAP' else 0.95**2
    for name, parameter in model.named_parameters():
        expected = before[name] * (factor if name in decaying else 1)
        assert torch.allclose(parameter.detach(), expected, rtol=1e-5), name


@pytest.mark.parametrize('kind', ['AdamW', 'SOAP', 'Muon'])
def test_groups_are_ordered_by_name_and_frozen_parameters_left_out(kind):
    model = skipless.build_backbone('skipless_vit_test_patch4_32')
    model.pos_embed.requires_grad_(False)
    optimizer = build_optimizer(model, kind, lr=0.1)
    names = [n for group in optimizer.param_groups for n in group['names']]
    decaying = [n for g in parameter_groups(model, 1.0) if g['weight_decay'] for n in g['names']]
    assert all(group['names'] == sorted(group['names']) for group in optimizer.param_groups)
    assert {n for g in optimizer.param_groups if g['weight_decay'] for n in g['names']} == set(decaying)
    assert 'pos_embed' not in names
    assert len(names) == sum(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize('kind', ['AdamW', 'SOAP', 'Muon'])
def test_resume_is_exact(kind, tmp_path):
    def train(steps, saved=None):
        torch.manual_seed(0)
        model = skipless.build_backbone('skipless_vit_test_patch4_32', depth=1)
        optimizer = build_optimizer(model, kind, lr=1e-3, **({'precondition_frequency': 3} if kind == 'SOAP' else {}))
        start = 0
        if saved is not None:
            content = torch.load(saved, weights_only=True)
            model.load_state_dict(content['model'])
            optimizer.load_state_dict(content['optimizer'])
            start = content['step']
        for step in range(start, steps):
            torch.manual_seed(step)
            model(torch.randn(2, 3, 32, 32)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'step': steps}, tmp_path / 'x')
        return model.state_dict()

    whole = train(9)
    train(4)
    resumed = train(9, tmp_path / 'x')
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(type='Lion'), "'Lion'.*AdamW.*Muon.*SOAP"),
        (dict(type='SOAP', momentum=0.9), 'momentum'),
        (dict(type='AdamW', precondition_frequency=3), 'precondition_frequency'),
        (dict(weight_decay=-1.0), 'weight_decay=-1'),
        (dict(type='SOAP', merge_dims=True), r"SOAP has no options \['merge_dims'\]; it takes"),
        (dict(type='SOAP', block_size=0), 'block_size=0: expected'),
        (dict(type='SOAP', one_sided=1), 'one_sided=1: expected True or False'),
        (dict(type='SOAP', product_dtype='float16'), "product_dtype='float16': expected one of .*bfloat16"),
        (dict(type='Muon'), 'no matrix inside a block'),
        (dict(type='Muon', momentum=2.0), 'momentum=2.0: expected'),
        (dict(type='SOAP', precondition_1d='no'), "precondition_1d='no': expected True or False"),
        (dict(type='SOAP', correct_bias=None), 'correct_bias=None: expected True or False'),
        (dict(type='SOAP', shampoo_beta=float('nan')), 'shampoo_beta=nan'),
        (dict(type='AdamW', amsgrad='no'), "amsgrad='no': expected True or False"),
        (dict(type='AdamW', fused='no'), "fused='no': expected True or False"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        build_optimizer(torch.nn.Linear(2, 2), **options)


def test_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match='no trainable'):
        build_optimizer(torch.nn.Linear(2, 2).requires_grad_(False))


def test_adamw_options_that_exclude_each_other_are_one_sentence():
    model = torch.nn.Linear(2, 2)
    assert build_optimizer(model, foreach=True).defaults['foreach']
    assert build_optimizer(model).defaults['fused']
    with pytest.raises(ValueError, match='does not take the options'):
        build_optimizer(model, foreach=True, fused=True)


def test_muon_moves_hidden_matrices_by_orthogonal_updates_and_the_rest_as_adamw():
    torch.manual_seed(0)
    model, twin = (skipless.build_backbone('skipless_vit_test_patch4_32', depth=1, num_classes=3) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    muon = build_optimizer(model, 'Muon', lr=0.01, weight_decay=0.1, nesterov=False)
    adamw = build_optimizer(twin, 'AdamW', lr=0.01, weight_decay=0.1, betas=(0.9, 0.999))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for network, optimizer in ((model, muon), (twin, adamw)):
        network(torch.ones(2, 3, 32, 32).cumsum(-1)).square().sum().backward()
        optimizer.step()
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        if 'blocks.' in name and parameter.ndim == 2:
            # The first update is the polar factor U V^T of the gradient, which five quintic Newton-Schulz iterations
            # approximate roughly: singular values near 1, and the factor 0.2 sqrt(longest side) of a matched rate.
            update = (before[name] * (1 - 0.01 * 0.1) - parameter.detach()).double()
            update /= 0.01 * 0.2 * max(parameter.shape) ** 0.5
            u, s, vh = torch.linalg.svd(parameter.grad.double(), full_matrices=False)
            leading = s > 1e-2 * s[0]
            held = (u.T @ update @ vh.T).diagonal()[leading]
            assert ((held > 0.5) & (held < 1.4)).all(), name
        else:
            assert torch.equal(parameter, other), name


@pytest.mark.parametrize(
    ('option', 'value'),
    [
        ('lr', 0.1), ('betas', [0.8, 0.9]), ('weight_decay', 0.5), ('momentum', 0.5), ('nesterov', False),
        ('ns_steps', 2), ('eps', 0.1), ('adjust_lr_fn', 'original'),
    ],
)  # fmt: skip
def test_every_option_of_muon_works_and_matters(option, value):
    def train(**options):
        torch.manual_seed(0)
        model = skipless.build_backbone('skipless_vit_test_patch4_32', depth=1, embed_dim=16, num_heads=1)
        optimizer = build_optimizer(model, 'Muon', **options)
        for step in range(3):
            torch.manual_seed(step)
            model(torch.randn(2, 3, 32, 32)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    changed = train(**{option: value})
    assert changed.isfinite().all()
    assert not torch.equal(changed, train())


def test_a_schedule_that_sets_the_rate_reaches_both_parts_of_muon_also_after_a_load():
    model = skipless.build_backbone('skipless_vit_test_patch4_32', depth=1)
    optimizer = build_optimizer(model, 'Muon', lr=0.1, weight_decay=0.5)
    optimizer.load_state_dict(optimizer.state_dict())
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        group['lr'] = 0.0
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize('other', ['AdamW', 'SOAP'])
def test_muon_refuses_the_state_of_another_optimizer(other):
    model = skipless.build_backbone('skipless_vit_test_patch4_32', depth=1)
    with pytest.raises(ValueError, match='none of Muon'):
        build_optimizer(model, 'Muon').load_state_dict(build_optimizer(model, other).state_dict())
