"""Optimizers against float64 oracles, their groups, and their resume."""

from __future__ import annotations

import inspect

import pytest
import torch

import skipless
from skipless.optim import SOAP, build_optimizer, parameter_groups


class OracleSOAP:
    """SOAP for one matrix, from the paper's algorithm 3 and its published order, in float64."""

    def __init__(self, w, lr, b1, b2, eps, decay, period):
        self.w, self.lr, self.b1, self.b2, self.eps, self.decay, self.period = (
            w.clone(),
            lr,
            b1,
            b2,
            eps,
            decay,
            period,
        )
        self.m, self.v = torch.zeros_like(w), torch.zeros_like(w)
        self.left, self.right = (
            torch.zeros(len(w), len(w)).double(),
            torch.zeros(w.shape[1], w.shape[1]).double(),
        )
        self.seen = 0

    def step(self, g):
        if self.seen == 0:  # statistics only
            self._collect(g)
            self.ql, self.qr = (torch.linalg.eigh(s)[1].flip(1) for s in (self.left, self.right))
            self.seen = 1
            return
        t = self.seen
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * (self.ql.T @ g @ self.qr) ** 2
        rotated = (self.ql.T @ self.m @ self.qr) / (self.v.sqrt() + self.eps)
        rate = self.lr * (1 - self.b2**t) ** 0.5 / (1 - self.b1**t)
        self.w = self.w - rate * self.ql @ rotated @ self.qr.T
        self.w = self.w * (1 - self.lr * self.decay)
        self._collect(g)
        if t % self.period == 0:
            self._refresh()
        self.seen += 1

    def _collect(self, g):
        self.left = self.b2 * self.left + (1 - self.b2) * g @ g.T
        self.right = self.b2 * self.right + (1 - self.b2) * g.T @ g

    def _refresh(self):
        order = ((self.ql.T @ self.left) * self.ql.T).sum(1).argsort(descending=True)
        self.v = self.v[order]
        self.ql = torch.linalg.qr(self.left @ self.ql[:, order])[0]
        order = ((self.qr.T @ self.right) * self.qr.T).sum(1).argsort(descending=True)
        self.v = self.v[:, order]
        self.qr = torch.linalg.qr(self.right @ self.qr[:, order])[0]


def gradients(shape, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(shape[0], shape[0], generator=generator, dtype=torch.float64)
    return [mix @ torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize('shape', [(6, 4), (5, 5), (3, 8)])
@pytest.mark.parametrize('decay', [0.0, 0.3])
def test_soap_equals_the_published_algorithm(shape, decay):
    parameter = torch.nn.Parameter(gradients(shape, 1, seed=7)[0])
    oracle = OracleSOAP(parameter.detach(), 0.01, 0.9, 0.95, 1e-8, decay, period=3)
    optimizer = SOAP([parameter], lr=0.01, betas=(0.9, 0.95), weight_decay=decay, precondition_frequency=3)
    for i, g in enumerate(gradients(shape, 14)):
        parameter.grad = g.clone()
        optimizer.step()
        oracle.step(g)
        if i == 0:
            # One gradient leaves the longer side's factor rank-deficient, and the eigenvectors of its null space are
            # arbitrary: check that they diagonalise it, then go on with the same ones.
            state = optimizer.state[parameter]['Q']
            for factor, basis in zip((oracle.left, oracle.right), state, strict=True):
                diagonal = basis.T @ factor @ basis
                assert torch.allclose(basis.T @ basis, torch.eye(len(basis)).double(), atol=1e-9)
                assert torch.allclose(diagonal, torch.diag(diagonal.diagonal().sort(descending=True)[0]), atol=1e-9)
            oracle.ql, oracle.qr = state[0].clone(), state[1].clone()
        # The library's QR runs in float32 at most.
        assert torch.allclose(parameter.detach(), oracle.w, rtol=0, atol=1e-5)
    assert (parameter.detach() - gradients(shape, 1, seed=7)[0]).abs().max() > 0.05


def test_soap_counts_steps_per_parameter():
    # A parameter whose gradients start late must be trained as if it had been alone.
    late, alone = (torch.nn.Parameter(torch.ones(4, 3, dtype=torch.float64)) for _ in range(2))
    other = torch.nn.Parameter(torch.ones(4, 3, dtype=torch.float64))
    both, single = SOAP([other, late], precondition_frequency=2), SOAP([alone], precondition_frequency=2)
    for i, g in enumerate(gradients((4, 3), 10)):
        other.grad = g.clone()
        if i >= 5:
            late.grad, alone.grad = g.clone(), g.clone()
            single.step()
        before = late.detach().clone()
        both.step()
        assert i >= 5 or torch.equal(late.detach(), before)
    assert torch.equal(late, alone)
    assert not torch.equal(late, torch.ones_like(late))


@pytest.mark.parametrize('kind', ['AdamW', 'SOAP'])
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


@pytest.mark.parametrize('kind', ['AdamW', 'SOAP'])
def test_groups_are_ordered_by_name_and_frozen_parameters_left_out(kind):
    model = skipless.build_backbone('skipless_vit_test_patch4_32')
    model.pos_embed.requires_grad_(False)
    optimizer = build_optimizer(model, kind, lr=0.1)
    names = [n for group in optimizer.param_groups for n in group['names']]
    decaying = [n for g in parameter_groups(model, 1.0) if g['weight_decay'] for n in g['names']]
    assert names == sorted(decaying) + sorted(set(names) - set(decaying))
    assert 'pos_embed' not in names
    assert len(names) == sum(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize('kind', ['AdamW', 'SOAP'])
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
        (dict(type='Lion'), "'Lion'.*AdamW"),
        (dict(type='SOAP', momentum=0.9), 'momentum'),
        (dict(type='AdamW', precondition_frequency=3), 'precondition_frequency'),
        (dict(weight_decay=-1.0), 'weight_decay=-1'),
        (dict(type='SOAP', merge_dims=True), r"SOAP has no options \['merge_dims'\]; it takes"),
        (dict(type='SOAP', data_format='channels_last'), r"SOAP has no options \['data_format'\]"),
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


#: Another value than the default for each of SOAP's options.
SOAP_OPTIONS = dict(
    lr=0.1, betas=[0.8, 0.9], weight_decay=0.5, precondition_frequency=1, max_precondition_dim=3, eps=0.1,
    shampoo_beta=0.5, precondition_1d=True, correct_bias=False, normalize_gradient=True, maximize=True,
)  # fmt: skip


@pytest.mark.parametrize('option', sorted(set(inspect.signature(SOAP).parameters) - {'params'}))
def test_every_option_of_soap_works_and_matters(option):
    def train(**options):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 2), torch.nn.Flatten(), torch.nn.Linear(16, 3))
        optimizer = build_optimizer(model, 'SOAP', **options)
        for step in range(4):
            torch.manual_seed(step)
            model(torch.randn(5, 2, 3, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    changed = train(**{option: SOAP_OPTIONS[option]})
    assert changed.isfinite().all()
    assert not torch.equal(changed, train())


def test_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match='no trainable'):
        build_optimizer(torch.nn.Linear(2, 2).requires_grad_(False))


def test_soap_follows_the_options_of_the_group_not_those_of_the_state():
    """A checkpoint's state carries copies of two options; what the config of the resumed run says must count."""

    def run(stale):
        weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
        optimizer = SOAP([weight], precondition_frequency=2, shampoo_beta=0.5)
        for step in range(5):
            weight.grad = torch.randn(2, 3, generator=torch.Generator().manual_seed(step))
            optimizer.step()
            if stale:
                optimizer.state[weight].update(precondition_frequency=1000, shampoo_beta=0.999)
        return weight.detach()

    assert torch.equal(run(stale=True), run(stale=False))


def test_adamw_options_that_exclude_each_other_are_one_sentence():
    model = torch.nn.Linear(2, 2)
    assert build_optimizer(model, foreach=True).defaults['foreach']
    assert build_optimizer(model).defaults['fused']
    with pytest.raises(ValueError, match='does not take the options'):
        build_optimizer(model, foreach=True, fused=True)
