"""Loading backbones: what fits is loaded, what does not is one clear error, nothing is unpickled."""

from __future__ import annotations

import pickle

import pytest
import timm
import torch
from safetensors.torch import save_file

import skipless
from skipless.checkpoint import load_backbone, read_backbone, read_checkpoint

TEST = 'skipless_vit_test_patch4_32'


def saved(path, model, prefix='', **meta):
    state = {prefix + name: value for name, value in model.state_dict().items()}
    meta = {'architecture': skipless.architecture(model), **meta}
    torch.save({'state_dict': state, 'meta': meta}, path)
    return path


@pytest.mark.parametrize('prefix', ['', 'backbone.', 'teacher.backbone.', 'backbone.vit.', 'module.backbone.'])
def test_loads_every_layout_exactly(tmp_path, prefix):
    source, target = skipless.build_backbone(TEST), skipless.build_backbone(TEST)
    report = load_backbone(target, saved(tmp_path / 'x.pth', source, prefix))
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))
    assert len(report.matched) == len(source.state_dict())
    assert not report.missing
    assert not report.unexpected
    assert 'matched' in str(report)
    assert 'missing: none' in str(report)


def test_student_and_teacher(tmp_path):
    student, teacher = skipless.build_backbone(TEST), skipless.build_backbone(TEST)
    state = {f'student.backbone.{k}': v for k, v in student.state_dict().items()}
    state |= {f'teacher.backbone.{k}': v for k, v in teacher.state_dict().items()}
    torch.save({'state_dict': state, 'meta': {'architecture': skipless.architecture(student)}}, tmp_path / 'x.pth')
    for which, model in (('student', student), ('teacher', teacher)):
        read = read_backbone(tmp_path / 'x.pth', which)
        assert torch.equal(read.state_dict['cls_token'], model.cls_token)
    with pytest.raises(ValueError, match='"teacher" or "student"'):
        read_backbone(tmp_path / 'x.pth', 'both')


def test_position_is_resampled_to_the_model(tmp_path):
    source = skipless.build_backbone(TEST)
    ramp = torch.linspace(0, 1, 8).expand(8, 8).reshape(1, 64, 1).expand(1, 64, 64)
    source.pos_embed.data[:, 1:] = ramp
    target = skipless.build_backbone(TEST, img_size=(48, 64))
    report = load_backbone(target, saved(tmp_path / 'x.pth', source))
    assert report.resampled == ['pos_embed']
    grid = target.pos_embed.detach()[0, 1:].reshape(12, 16, 64)
    # Bicubic interpolation reproduces a linear ramp away from the border, and columns stay columns.
    inner = ((torch.arange(16) + 0.5) * 8 / 16 - 0.5) / 7
    assert torch.allclose(grid[5, 4:12, 0], inner[4:12], atol=1e-3)
    assert torch.allclose(grid[2], grid[9], atol=1e-5)
    assert torch.equal(target.pos_embed[0, 0], source.pos_embed[0, 0])


def test_grid_is_taken_from_the_tag(tmp_path):
    # 4 x 16 patches are as many as 8 x 8, so only the tag tells that they have to be resampled.
    wide = skipless.build_backbone(TEST, img_size=(16, 64))
    ramp = torch.linspace(0, 1, 16).expand(4, 16).reshape(1, 64, 1).expand(1, 64, 64)
    wide.pos_embed.data[:, 1:] = ramp
    target = skipless.build_backbone(TEST)
    assert load_backbone(target, saved(tmp_path / 'x.pth', wide)).resampled == ['pos_embed']
    columns = target.pos_embed.detach()[0, 1:].reshape(8, 8, 64)[:, :, 0]
    assert torch.allclose(columns, columns[:1].expand(8, 8), atol=1e-5)
    assert (columns.diff(dim=1) > 0.05).all()
    state = skipless.build_backbone(TEST, img_size=(16, 32)).state_dict()
    skips = dict(attention_skip=False, mlp_skip=False)
    torch.save({'state_dict': state, 'meta': {'architecture': skips}}, tmp_path / 'y.pth')
    with pytest.raises(ValueError, match='not square'):
        load_backbone(target, tmp_path / 'y.pth')


def test_other_number_of_heads_is_refused(tmp_path):
    path = saved(tmp_path / 'x.pth', skipless.build_backbone(TEST))
    with pytest.raises(ValueError, match=r'2 attention heads and the model has 4.*num_heads=2'):
        load_backbone(skipless.build_backbone(TEST, num_heads=4), path)


@pytest.mark.parametrize('skip', [True, False])
def test_the_other_architecture_is_refused(tmp_path, skip):
    skips = dict(attention_skip=skip, mlp_skip=skip)
    source = skipless.build_backbone(TEST, **skips)
    target = skipless.build_backbone(TEST, attention_skip=not skip, mlp_skip=not skip)
    before = {k: v.clone() for k, v in target.state_dict().items()}
    with pytest.raises(ValueError, match=f'attention_skip={skip}, mlp_skip={skip}'):
        load_backbone(target, saved(tmp_path / 'x.pth', source))
    assert all(torch.equal(v, before[k]) for k, v in target.state_dict().items())


def test_untagged_files_are_taken_for_stock_vits(tmp_path):
    sizes = dict(img_size=32, patch_size=4, embed_dim=64, depth=4, num_heads=2)
    stock = timm.create_model('vit_tiny_patch16_224', **sizes)
    torch.save({'model': stock.state_dict()}, tmp_path / 'x.pth')
    save_file(stock.state_dict(), tmp_path / 'x.safetensors')
    for name in ('x.pth', 'x.safetensors'):
        twin = skipless.build_backbone('vit_tiny_patch16_224', **sizes)
        assert not load_backbone(twin, tmp_path / name).missing
        assert torch.equal(twin.pos_embed, stock.pos_embed)
        with pytest.raises(ValueError, match='no tag'):
            load_backbone(skipless.build_backbone(TEST), tmp_path / name)


def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path):
    model = skipless.build_backbone(TEST)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    wide = saved(tmp_path / 'wide.pth', skipless.build_backbone(TEST, embed_dim=128))
    deep = saved(tmp_path / 'deep.pth', skipless.build_backbone(TEST, depth=5))
    shallow = saved(tmp_path / 'shallow.pth', skipless.build_backbone(TEST, depth=3))
    broken = skipless.build_backbone(TEST)
    broken.blocks[1].mlp.fc1.weight.data[0, 0] = float('nan')
    nan = saved(tmp_path / 'nan.pth', broken)
    for path, words in [(wide, r'128.*64'), (deep, r'unexpected: blocks\.4'), (shallow, r'missing: blocks\.3'),
                        (nan, 'non-finite')]:  # fmt: skip
        with pytest.raises(ValueError, match=words):
            load_backbone(model, path)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    report = load_backbone(model, deep, strict=False)
    assert len(report.unexpected) == 12


def test_files_that_are_no_checkpoints(tmp_path):
    with pytest.raises(FileNotFoundError, match='nowhere'):
        read_checkpoint(tmp_path / 'nowhere.pth')
    (tmp_path / 'empty.pth').write_bytes(b'')
    (tmp_path / 'text.pth').write_text('hello')
    (tmp_path / 'text.safetensors').write_text('hello')
    whole = saved(tmp_path / 'whole.pth', skipless.build_backbone(TEST)).read_bytes()
    (tmp_path / 'cut.pth').write_bytes(whole[: len(whole) // 2])
    for name in ('empty.pth', 'text.pth', 'text.safetensors', 'cut.pth'):
        with pytest.raises(ValueError, match=f'{name} is damaged'):
            read_checkpoint(tmp_path / name)
    torch.save({'state_dict': {'weight': torch.ones(2)}}, tmp_path / 'other.pth')
    with pytest.raises(ValueError, match='no ViT'):
        read_backbone(tmp_path / 'other.pth')
    torch.save([1, 2], tmp_path / 'list.pth')
    with pytest.raises(ValueError, match='holds a list'):
        read_checkpoint(tmp_path / 'list.pth')


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), 'w')


def test_nothing_is_unpickled(tmp_path):
    trace = tmp_path / 'trace'
    torch.save({'state_dict': Malicious(trace)}, tmp_path / 'torch.pth')
    (tmp_path / 'pickle.pth').write_bytes(pickle.dumps(Malicious(trace)))
    for name in ('torch.pth', 'pickle.pth'):
        with pytest.raises(ValueError, match=name):
            read_checkpoint(tmp_path / name)
    assert not trace.exists()


def test_a_flipped_bit_is_damage(tmp_path):
    path = tmp_path / 'a.pth'
    torch.save({'state_dict': {'weight': torch.zeros(10_000)}}, path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert torch.load(path, weights_only=True)['state_dict']['weight'].any()  # torch does not see it
    with pytest.raises(ValueError, match=r'a\.pth is damaged .*checksum'):
        read_checkpoint(path)
