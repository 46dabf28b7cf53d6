"""SOAP against a float64 oracle, and what batching, cutting, ranks, precision and checkpoints must not change."""

from __future__ import annotations

import inspect
import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import skipless
from skipless.optim import SOAP, build_optimizer, eigenbasis


class Oracle:
    """SOAP for one tensor, from the paper's algorithm 3 and the order of its authors' code, in float64.

    Sides are handled by unfolding one at a time; the first moment stays in the parameter's coordinates.
    """

    def __init__(self, w, *, lr, betas, decay, period, used=None, eps=1e-8, shampoo_beta=None, turn=0):
        self.w, self.lr, self.eps, self.decay, self.period, self.turn = w.clone(), lr, eps, decay, period, turn
        self.b1, self.b2 = betas
        self.bs = self.b2 if shampoo_beta is None else shampoo_beta
        self.m, self.v = torch.zeros_like(w), torch.zeros_like(w)
        self.used = [size > 1 for size in w.shape] if used is None else used
        self.factors = {i: torch.zeros(n, n).double() for i, n in enumerate(w.shape) if self.used[i]}
        self.seen, self.permuted = 0, False

    def step(self, g, bases=None):
        """The first gradient's bases may be given: vectors of a null space are arbitrary."""
        if self.seen == 0:
            self._collect(g)
            found = {i: torch.linalg.eigh(f)[1].flip(1) for i, f in self.factors.items()}
            self.bases = found if bases is None else bases
            self.seen = 1
            return
        t = self.seen
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * self._turned(g, True) ** 2
        moved = self._turned(self._turned(self.m, True) / (self.v.sqrt() + self.eps), False)
        self.w = self.w - self.lr * (1 - self.b2**t) ** 0.5 / (1 - self.b1**t) * moved
        self.w = self.w * (1 - self.lr * self.decay)
        self._collect(g)
        if (t + self.turn) % self.period == 0:
            self._refresh()
        self.seen += 1

    def _turned(self, x, forward):
        for i, q in self.bases.items():
            x = torch.tensordot(q.T if forward else q, x, dims=([1], [i])).movedim(0, i)
        return x

    def _collect(self, g):
        for i, f in self.factors.items():
            rows = g.movedim(i, 0).reshape(g.shape[i], -1)
            self.factors[i] = self.bs * f + (1 - self.bs) * rows @ rows.T

    def _refresh(self):
        for i, f in self.factors.items():
            q = self.bases[i]
            order = torch.tensor([float(column @ f @ column) for column in q.T]).argsort(descending=True)
            self.permuted |= order.tolist() != list(range(len(order)))
            self.v = self.v.index_select(i, order)
            self.bases[i] = torch.linalg.qr(f @ q[:, order])[0]


def gradients(shape, count, seed=0, dtype=torch.float64):
    """Correlated gradients whose scale per row changes, so that eigenvalues change their order."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(shape[0], shape[0], generator=generator, dtype=torch.float64)
    found = []
    for _ in range(count):
        scale = torch.randn(shape[0], generator=generator, dtype=torch.float64).exp()
        g = torch.randn(shape, generator=generator, dtype=torch.float64)
        found.append(torch.tensordot(mix * scale, g, dims=([1], [0])).to(dtype))
    return found


def bases_of(optimizer, name, piece=0):
    held = optimizer.state_dict()['state'][name]['pieces'][piece]['bases']
    return {i: basis.double() for i, basis in enumerate(held) if basis is not None}


def parameter_of(tensor):
    return torch.nn.Parameter(tensor.clone())


def run(optimizer, parameters, steps):
    """Steps with the gradients of each parameter in turn; None leaves one without."""
    for step in range(steps):
        for parameter, found in parameters:
            parameter.grad = None if found[step] is None else found[step].clone()
        optimizer.step()


@pytest.mark.parametrize('shape', [(6, 4), (5, 5), (3, 8), (4, 3, 2, 2), (1, 5, 3)])
@pytest.mark.parametrize('options', [dict(), dict(weight_decay=0.3), dict(shampoo_beta=0.7, precondition_frequency=2)])
def test_soap_equals_the_published_algorithm(shape, options):
    options = dict(lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, precondition_frequency=3) | options
    start, found = gradients(shape, 1, seed=7)[0], gradients(shape, 20)
    parameter = parameter_of(start)
    optimizer = SOAP([parameter], **options)
    oracle = Oracle(
        start, lr=0.01, betas=(0.9, 0.95), decay=options['weight_decay'], period=options['precondition_frequency'],
        shampoo_beta=options.get('shampoo_beta'),
    )  # fmt: skip
    for i, g in enumerate(found):
        parameter.grad = g.clone()
        optimizer.step()
        bases = bases_of(optimizer, '0.0') if i == 0 else None
        oracle.step(g, bases)
        for side, basis in (bases or {}).items():
            # They diagonalise the factor, in descending order, wherever its null space is.
            diagonal = basis.T @ oracle.factors[side] @ basis
            assert torch.allclose(basis.T @ basis, torch.eye(len(basis)).double(), atol=1e-12)
            assert torch.allclose(diagonal, torch.diag(diagonal.diagonal().sort(descending=True)[0]), atol=1e-10)
        assert torch.allclose(parameter.detach(), oracle.w, rtol=0, atol=1e-9)
    assert oracle.permuted
    assert (parameter.detach() - start).abs().max() > 0.05


def test_vectors_get_adam_and_with_precondition_1d_a_basis():
    start, found = gradients((5,), 1, seed=3)[0], gradients((5,), 12)
    for options, used in ((dict(), [False]), (dict(precondition_1d=True), [True])):
        parameter = parameter_of(start)
        optimizer = SOAP([parameter], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, **options)
        oracle = Oracle(start, lr=0.01, betas=(0.9, 0.95), decay=0.0, period=10, used=used)
        for i, g in enumerate(found):
            parameter.grad = g.clone()
            optimizer.step()
            oracle.step(g, bases_of(optimizer, '0.0') if i == 0 else None)
        assert torch.allclose(parameter.detach(), oracle.w, rtol=0, atol=1e-9)


def test_a_long_side_and_with_one_sided_the_longest_have_no_basis():
    for options, shape, used in (
        (dict(max_precondition_dim=5), (4, 6), [True, False]),
        (dict(one_sided=True), (4, 6), [True, False]),
        (dict(one_sided=True), (5, 5), [True, True]),
        (dict(one_sided=True), (6, 3, 2), [False, True, True]),
    ):
        start, found = gradients(shape, 1, seed=3)[0], gradients(shape, 12)
        parameter = parameter_of(start)
        optimizer = SOAP([parameter], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, precondition_frequency=2, **options)
        oracle = Oracle(start, lr=0.01, betas=(0.9, 0.95), decay=0.0, period=2, used=used)
        for i, g in enumerate(found):
            parameter.grad = g.clone()
            optimizer.step()
            oracle.step(g, bases_of(optimizer, '0.0') if i == 0 else None)
        assert torch.allclose(parameter.detach(), oracle.w, rtol=0, atol=1e-9), options


@pytest.mark.parametrize(
    ('options', 'name', 'shape', 'edges'),
    [
        (dict(block_size=4), 'x', (7, 9), ([0, 3, 7], [0, 3, 6, 9])),
        (dict(block_size=8), 'x', (8, 5), ([0, 8], [0, 5])),
        (dict(split_qkv=True), 'blocks.0.attn.qkv.weight', (12, 4), ([0, 4, 8, 12], [0, 4])),
        (dict(split_qkv=True), 'blocks.0.mlp.fc1.weight', (12, 4), ([0, 12], [0, 4])),
        (dict(split_qkv=True, block_size=2), 'qkv.weight', (12, 4), ([0, 2, 4, 6, 8, 10, 12], [0, 2, 4])),
    ],
)
def test_pieces_are_preconditioned_each_by_itself(options, name, shape, edges):
    start, found = gradients(shape, 1, seed=3)[0], gradients(shape, 9)
    whole = parameter_of(start)
    cut = SOAP([dict(params=[whole], names=[name])], lr=0.02, precondition_frequency=2, **options)
    run(cut, [(whole, found)], 9)
    blocks = [
        (slice(*rows), slice(*columns))
        for rows, columns in itertools.product(*(itertools.pairwise(side) for side in edges))
    ]
    parts = [parameter_of(start[block]) for block in blocks]
    run(
        SOAP(parts, lr=0.02, precondition_frequency=2),
        [(part, [g[block] for g in found]) for part, block in zip(parts, blocks, strict=True)],
        9,
    )
    for part, block in zip(parts, blocks, strict=True):
        assert torch.allclose(whole[block], part, rtol=0, atol=1e-12)
    assert len(cut.state_dict()['state'][name]['pieces']) == len(blocks)


def test_equal_shapes_in_a_stack_are_trained_as_if_each_were_alone():
    starts = gradients((5, 3), 4, seed=1)
    found = [gradients((5, 3), 8, seed=10 + i) for i in range(4)]
    together = [parameter_of(start) for start in starts]
    optimizer = SOAP(together, precondition_frequency=2)
    run(optimizer, list(zip(together, found, strict=True)), 8)
    assert [len(batch.pieces) for batch in optimizer._batches] == [4]  # no loop over parameters
    for start, parameter, mine in zip(starts, together, found, strict=True):
        alone = parameter_of(start)
        run(SOAP([alone], precondition_frequency=2), [(alone, mine)], 8)
        assert torch.allclose(parameter, alone, rtol=0, atol=1e-12)


def test_a_parameter_whose_gradients_come_late_or_stop_is_trained_as_if_it_were_alone():
    starts = gradients((4, 3), 3, seed=1)
    found = [gradients((4, 3), 10, seed=10 + i) for i in range(3)]
    found[1] = [None] * 5 + found[1][5:]
    found[2] = found[2][:4] + [None] * 3 + found[2][7:]
    together = [parameter_of(start) for start in starts]
    run(SOAP(together, precondition_frequency=2, weight_decay=0.1), list(zip(together, found, strict=True)), 10)
    for start, parameter, mine in zip(starts, together, found, strict=True):
        alone = parameter_of(start)
        mine = [g for g in mine if g is not None]
        run(SOAP([alone], precondition_frequency=2, weight_decay=0.1), [(alone, mine)], len(mine))
        assert torch.allclose(parameter, alone, rtol=0, atol=1e-12)
        assert not torch.allclose(parameter, start, atol=1e-3)


def test_spread_refresh_gives_every_piece_its_own_turn_and_the_same_period():
    starts = gradients((4, 3), 3, seed=1)
    found = [gradients((4, 3), 14, seed=10 + i) for i in range(3)]
    parameters = [parameter_of(start) for start in starts]
    optimizer = SOAP(parameters, lr=0.01, weight_decay=0.0, precondition_frequency=3, spread_refresh=True)
    oracles = [
        Oracle(start, lr=0.01, betas=(0.95, 0.95), decay=0.0, period=3, turn=turn) for turn, start in enumerate(starts)
    ]
    for step in range(14):
        for parameter, mine in zip(parameters, found, strict=True):
            parameter.grad = mine[step].clone()
        optimizer.step()
        for number, oracle in enumerate(oracles):
            oracle.step(found[number][step], bases_of(optimizer, f'0.{number}') if step == 0 else None)
    for parameter, oracle in zip(parameters, oracles, strict=True):
        assert torch.allclose(parameter.detach(), oracle.w, rtol=0, atol=1e-9)


def test_a_gram_matrix_in_strips_is_the_whole_one(monkeypatch):
    gradient = torch.randn(3, 11, 20, dtype=torch.float64)
    whole, strips = ([torch.ones(3, 11, 11).double(), None] for _ in range(2))
    eigenbasis.collect(whole, gradient, 0.25)
    expected = 0.25 + 0.75 * torch.einsum('pik,pjk->pij', gradient, gradient)
    assert torch.allclose(whole[0], expected)
    monkeypatch.setattr(eigenbasis, '_STRIPPED', 8)
    eigenbasis.collect(strips, gradient, 0.25)
    assert torch.allclose(strips[0].tril(), expected.tril())
    assert not torch.allclose(strips[0].triu(1), expected.triu(1))  # which is what was saved
    basis = torch.linalg.qr(torch.randn(3, 11, 11, dtype=torch.float64))[0]
    second = torch.rand(3, 11, 20, dtype=torch.float64)
    for left, right in zip(*(eigenbasis.refresh(f, [basis, None], second) for f in (whole, strips)), strict=True):
        left, right = (side[0] if isinstance(side, list) else side for side in (left, right))
        assert torch.allclose(left, right, atol=1e-10)


def test_bfloat16_products_change_a_step_by_their_rounding_only():
    starts, found = gradients((32, 16), 2, seed=1, dtype=torch.float32), gradients((32, 16), 8, dtype=torch.float32)
    moved = []
    for dtype in ('float32', 'bfloat16'):
        parameter = parameter_of(starts[0])
        optimizer = SOAP([parameter], lr=0.01, precondition_frequency=3, product_dtype=dtype)
        run(optimizer, [(parameter, found)], 8)
        entry = optimizer.state_dict()['state']['0.0']['pieces'][0]
        assert {t.dtype for t in (entry['first'], entry['second'], *entry['factors'], *entry['bases'])} == {
            torch.float32
        }
        moved.append(parameter.detach() - starts[0])
    cosine = torch.nn.functional.cosine_similarity(moved[0].flatten(), moved[1].flatten(), dim=0)
    assert 0.99 < cosine < 1 - 1e-7


def test_bfloat16_parameters_have_float32_state_and_follow_float32_ones():
    start, found = gradients((6, 4), 1, seed=3, dtype=torch.float32)[0], gradients((6, 4), 10, dtype=torch.bfloat16)
    low, high = parameter_of(start.bfloat16()), parameter_of(start.bfloat16().float())
    optimizer = SOAP([low], lr=0.05, weight_decay=0.0)
    run(optimizer, [(low, found)], 10)
    run(SOAP([high], lr=0.05, weight_decay=0.0), [(high, [g.float() for g in found])], 10)
    entry = optimizer.state_dict()['state']['0.0']['pieces'][0]
    assert low.dtype == torch.bfloat16
    assert entry['first'].dtype == entry['bases'][0].dtype == torch.float32
    # Ten roundings of at most 2^-9 of the largest weight.
    assert (low.float() - high).abs().max() < 10 * 2**-9 * high.abs().max()


@pytest.mark.parametrize('kind', ['zero', 'rank one', 'huge', 'tiny', 'one row'])
@pytest.mark.parametrize('options', [dict(), dict(block_size=3), dict(product_dtype='bfloat16')])
def test_degenerate_gradients_never_give_nan(kind, options):
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.ones(6, 4))
    optimizer = SOAP([parameter], precondition_frequency=2, weight_decay=0.0, **options)
    for _ in range(9):
        full = torch.randn(6, 4, generator=generator)
        parameter.grad = {
            'zero': torch.zeros(6, 4),
            'rank one': torch.outer(full[:, 0], full[0]),
            'huge': full * 1e30,
            'tiny': full * 1e-30,
            'one row': torch.cat([full[:1], torch.zeros(5, 4)]),
        }[kind]
        optimizer.step()
        assert parameter.isfinite().all()
    moved = (parameter - 1).abs().max()
    assert moved == 0 if kind == 'zero' else moved < 1


def test_a_decomposition_that_fails_keeps_the_old_basis(monkeypatch):
    start, found = gradients((4, 3), 1, seed=3)[0], gradients((4, 3), 8)
    eigh, qr = torch.linalg.eigh, torch.linalg.qr

    def failing(matrix, *args):
        raise torch.linalg.LinAlgError('does not converge')

    parameter = parameter_of(start)
    optimizer = SOAP([parameter], precondition_frequency=2)
    monkeypatch.setattr(torch.linalg, 'eigh', failing)
    run(optimizer, [(parameter, found[:1])], 1)
    assert all(torch.equal(basis, torch.eye(len(basis)).double()) for basis in bases_of(optimizer, '0.0').values())
    monkeypatch.setattr(torch.linalg, 'eigh', eigh)
    monkeypatch.setattr(torch.linalg, 'qr', failing)
    run(optimizer, [(parameter, found[1:4])], 3)
    assert all(torch.equal(basis, torch.eye(len(basis)).double()) for basis in bases_of(optimizer, '0.0').values())
    assert parameter.isfinite().all()
    monkeypatch.setattr(torch.linalg, 'qr', qr)
    run(optimizer, [(parameter, found[4:])], 4)
    assert not torch.equal(bases_of(optimizer, '0.0')[0], torch.eye(4).double())


def test_one_matrix_that_does_not_converge_does_not_take_the_others_with_it(monkeypatch):
    eigh = torch.linalg.eigh

    def choosy(matrices):
        if (matrices[..., 0, 0] == 7).any():
            raise torch.linalg.LinAlgError('does not converge')
        return eigh(matrices)

    monkeypatch.setattr(torch.linalg, 'eigh', choosy)
    factors = torch.diag_embed(torch.tensor([[7.0, 1.0], [1.0, 3.0]]))
    (bases,) = eigenbasis.decompose([factors])
    assert torch.equal(bases[0], torch.eye(2))
    assert torch.equal(bases[1].abs(), torch.eye(2).flip(1))


def test_state_is_keyed_by_name_and_resumes_bit_for_bit(tmp_path):
    def train(steps, saved=None):
        torch.manual_seed(0)
        model = skipless.build_backbone('skipless_vit_test_patch4_32', depth=2, embed_dim=16, num_heads=2)
        optimizer = build_optimizer(
            model, 'SOAP', lr=1e-3, precondition_frequency=3, block_size=16, spread_refresh=True, split_qkv=True
        )
        start = 0
        if saved is not None:
            content = torch.load(saved, weights_only=True)
            model.load_state_dict(content['model'])
            optimizer.load_state_dict(content['optimizer'])
            start = content['step']
        for step in range(start, steps):
            torch.manual_seed(step)
            model(torch.randn(2, 3, 32, 32)).square().sum().backward()
            if step < 2:
                model.cls_token.grad = None  # one that starts late
            optimizer.step()
            optimizer.zero_grad()
        torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'step': steps}, tmp_path / 'x')
        return model.state_dict(), optimizer.state_dict()

    whole, state = train(9)
    train(4)
    resumed, state_after = train(9, tmp_path / 'x')
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert set(state['state']) == {name for name in whole if name != 'fc_norm.weight'}
    assert state['state']['cls_token']['step'] == 7
    same(state, state_after)


def same(left, right):
    """Assert that two nested states are equal to the bit."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            same(a, b)
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    else:
        assert left == right


def test_a_state_keeps_its_dtypes_and_its_options_and_does_not_change_later():
    found = gradients((4, 3), 6, dtype=torch.bfloat16)
    first, second = (torch.nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16)) for _ in range(2))
    trained = SOAP([first], lr=0.5, eps=1e-4)
    run(trained, [(first, found)], 4)
    state = trained.state_dict()
    loaded = SOAP([second], lr=0.1)
    loaded.load_state_dict(state)
    same(loaded.state_dict(), state)
    assert loaded.param_groups[0]['lr'] == 0.5
    assert state['state']['0.0']['pieces'][0]['second'].dtype == torch.float32
    copy = {key: value.clone() for key, value in state['state']['0.0']['pieces'][0].items() if torch.is_tensor(value)}
    run(trained, [(first, found)], 6)
    run(loaded, [(second, found)], 6)
    assert all(torch.equal(state['state']['0.0']['pieces'][0][key], copy[key]) for key in copy)


@pytest.mark.parametrize(
    ('build', 'words'),
    [
        (lambda p: torch.optim.AdamW([p]), "of 1 parameters such as .*'0'.* SOAP has 1 such as .*'w'"),
        (lambda p: SOAP([dict(params=[p], names=['v'])]), "such as \\['v'\\].*resume with the model"),
        (lambda p: SOAP([dict(params=[p], names=['w'])], block_size=2), 'state of w is in 4 pieces.*block_size'),
        (lambda p: SOAP([dict(params=[p], names=['w'])], one_sided=True), 'one_sided'),
    ],
)
def test_a_state_that_does_not_fit_is_refused(build, words):
    parameter = torch.nn.Parameter(torch.ones(4, 3))
    other = build(parameter)
    run(other, [(parameter, gradients((4, 3), 2, dtype=torch.float32))], 2)
    with pytest.raises(ValueError, match=words):
        SOAP([dict(params=[parameter], names=['w'])]).load_state_dict(other.state_dict())


def test_two_parameters_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two parameters named 'w'"):
        SOAP([dict(params=[torch.ones(2), torch.ones(2)], names=['w', 'w'])])


#: Another value than the default for each of SOAP's options that changes what it computes.
OPTIONS = dict(
    lr=0.1, betas=[0.8, 0.9], weight_decay=0.5, precondition_frequency=1, max_precondition_dim=3, eps=0.1,
    shampoo_beta=0.5, precondition_1d=True, correct_bias=False, normalize_gradient=True, maximize=True, block_size=2,
    split_qkv=True, one_sided=True, spread_refresh=True, product_dtype='bfloat16',
)  # fmt: skip


@pytest.mark.parametrize('option', sorted(set(inspect.signature(SOAP).parameters) - {'params', 'shard'}))
def test_every_option_works_and_matters(option):
    def train(**options):
        torch.manual_seed(0)
        layers = dict(
            conv=torch.nn.Conv2d(2, 4, 2), flat=torch.nn.Flatten(), qkv=torch.nn.Linear(16, 6),
            out=torch.nn.Linear(6, 3), wide=torch.nn.Linear(3, 6), last=torch.nn.Linear(6, 3),
        )  # fmt: skip
        model = torch.nn.Sequential()
        for name, layer in layers.items():
            model.add_module(name, layer)
        optimizer = build_optimizer(model, 'SOAP', **{'precondition_frequency': 2, **options})
        for step in range(5):
            torch.manual_seed(step)
            model(torch.randn(5, 2, 3, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    changed = train(**{option: OPTIONS[option]})
    assert changed.isfinite().all()
    assert not torch.equal(changed, train())


SHAPES = [(6, 4), (6, 4), (6, 4), (5, 5), (7,), (1, 2, 6), (3,)]


def ranked(rank, ranks, folder, saved=None):
    """Nine steps; the parameters, the state, and how many pieces this rank holds."""
    if ranks > 1:
        dist.init_process_group(
            'gloo', f'file://{folder}/rendezvous', timedelta(seconds=120), rank=rank, world_size=ranks
        )
    try:
        parameters = [parameter_of(gradients(shape, 1, seed=50 + i)[0].float()) for i, shape in enumerate(SHAPES)]
        names = [f'p{i}' for i in range(len(SHAPES))]
        optimizer = SOAP(
            [dict(params=parameters[:4], names=names[:4]), dict(params=parameters[4:], names=names[4:], lr=0.01)],
            precondition_frequency=2, block_size=4,
        )  # fmt: skip
        start = 0
        if saved is not None:
            content = torch.load(saved, weights_only=True)
            optimizer.load_state_dict(content['state'])
            for parameter, value in zip(parameters, content['parameters'], strict=True):
                parameter.data.copy_(value)
            start = content['step']
        for step in range(start, start + 9):
            for i, (parameter, shape) in enumerate(zip(parameters, SHAPES, strict=True)):
                late = i == 1 and step < 3
                parameter.grad = None if late else gradients(shape, 1, seed=100 * step + i)[0].float()
            optimizer.step()
        held = sum(len(batch.pieces) for batch in optimizer._batches)
        parameters = [parameter.detach().clone() for parameter in parameters]
        return dict(parameters=parameters, state=optimizer.state_dict(), held=held, step=start + 9)
    finally:
        if ranks > 1:
            dist.destroy_process_group()


def other_rank(folder, saved):
    torch.set_num_threads(1)
    torch.save(ranked(1, 2, folder, saved), folder / 'other.pth')


@pytest.mark.parametrize('resumed', [False, True])
def test_two_ranks_share_the_work_and_give_what_one_gives(tmp_path, resumed):
    saved = None
    if resumed:  # a state of one rank is resumed by two
        saved = tmp_path / 'saved.pth'
        torch.save(ranked(0, 1, tmp_path), saved)
    alone = ranked(0, 1, tmp_path, saved)
    process = mp.get_context('spawn').Process(target=other_rank, args=(tmp_path, saved))
    process.start()
    first = ranked(0, 2, tmp_path, saved)
    process.join()
    second = torch.load(tmp_path / 'other.pth', weights_only=True)
    same(first['parameters'], second['parameters'])
    same(first['parameters'], alone['parameters'])
    same(first['state'], alone['state'])
    same(second['state'], alone['state'])
    assert first['held'] + second['held'] == alone['held']
    assert min(first['held'], second['held']) >= alone['held'] // 3
