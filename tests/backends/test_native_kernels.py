"""The native kernels: correct results, and the fallback if they cannot be compiled."""

import ctypes
import logging
import math
import os

import pytest
import torch

from rollart.backends.native import kernels
from rollart.backends.native.kernels import ALIGN, TILE, CannotCompile, Heads, cache_folder, compiled, native_kernels


@pytest.fixture
def library():
    found = native_kernels()
    if found is None:
        pytest.skip("no C++ compiler")
    return found


@pytest.fixture
def anew(monkeypatch):
    """As in a process that has not asked yet."""
    native_kernels.cache_clear()
    yield monkeypatch
    native_kernels.cache_clear()


def product(library, rows, weights, total=None):
    outputs, inputs = weights.shape
    panels = torch.full((-(-outputs // (2 * ALIGN)) * 2 * ALIGN * inputs,), math.nan)
    library.lay_panels(weights.data_ptr(), outputs, inputs, panels.data_ptr())
    out = torch.full((len(rows), outputs), math.nan) if total is None else total.clone()
    memory = rows.data_ptr(), len(rows), inputs, panels.data_ptr(), outputs, total is not None, out.data_ptr()
    library.multiply(*memory)
    return out


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (7, 5), (32, 16), (33, 40), (100, 64), (160, 3)])
def test_products(library, outputs, inputs):
    """All row counts around the tile sizes, and a large one."""
    torch.manual_seed(3)
    weights = torch.randn(outputs, inputs)
    for count in (*range(1, 31), 300):
        rows, total = torch.randn(count, inputs), torch.randn(count, outputs)
        want = rows.double() @ weights.double().t()
        assert (product(library, rows, weights) - want).abs().max() < 1e-5 * inputs
        assert (product(library, rows, weights, total) - total - want).abs().max() < 1e-5 * inputs


def test_products_of_rows_that_do_not_fit_into_a_cache(library):
    rows, weights = torch.randn(301, 5000), torch.randn(35, 5000)
    assert (product(library, rows, weights) - rows.double() @ weights.double().t()).abs().max() < 1e-2


def test_a_row_gives_the_same_whatever_stands_beside_it(library):
    rows, weights = torch.randn(70, 333), torch.randn(77, 333)
    together = product(library, rows, weights)
    for count in range(1, 20):
        assert torch.equal(product(library, rows[:count], weights), together[:count])


@pytest.mark.parametrize("dim", [6, 16, 32, 40, 64, 80, 128])
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (1, 3), (2, 5), (1, 9)])
def test_attention_is_softmax_of_products(library, dim, kv_heads, group):
    """Sessions of all lengths around the sizes in which positions are read, with one new token and with many."""
    torch.manual_seed(0)
    counts = [(0, 1), (0, 31), (31, 1), (32, 1), (33, 2), (63, 9), (5, 40), (95, 1), (64, 64)]
    capacity, heads = 128, kv_heads * group
    pieces, row = [], 0
    for number, (start, count) in enumerate(counts):
        pieces.append((row, count, number * capacity, capacity, start))
        row += count
    table = torch.tensor(pieces)
    queries = torch.randn(row, heads, dim)
    keys, values = torch.randn(2, len(counts), kv_heads, dim * capacity)
    out, scratch = torch.full_like(queries, math.nan), torch.empty(TILE * capacity)
    memory = [each.data_ptr() for each in (queries, keys, values, scratch, out)]
    library.attend(ctypes.byref(Heads(kv_heads, group, dim)), table.data_ptr(), len(counts), *memory)
    for number, (start, count) in enumerate(counts):
        at = pieces[number][0]
        length = start + count
        query = queries[at : at + count].view(count, kv_heads, group, dim).permute(1, 2, 0, 3).double()
        key = keys[number].view(kv_heads, 1, dim, capacity)[..., :length].double()
        value = values[number].view(kv_heads, 1, capacity, dim)[:, :, :length].double()
        unseen = torch.full((count, length), -math.inf).triu(start + 1)
        want = ((query @ key + unseen).softmax(-1) @ value).permute(2, 0, 1, 3).reshape(count, heads, dim)
        assert (out[at : at + count] - want).abs().max() < 2e-5


def test_far_apart_scores_are_no_trouble(library):
    """One position has all the weight, another would overflow by itself."""
    queries, keys, values = torch.tensor([[200.0] * 16]), torch.zeros(16, 32), torch.randn(32, 16)
    keys[:, 1], keys[:, 2] = 1.0, -1.0
    out, scratch, piece = torch.empty(16), torch.empty(TILE * 32), torch.tensor([0, 1, 0, 32, 2])
    memory = [each.data_ptr() for each in (queries, keys, values, scratch, out)]
    library.attend(ctypes.byref(Heads(1, 1, 16)), piece.data_ptr(), 1, *memory)
    assert torch.equal(out, values[1])


@pytest.mark.parametrize("width", [1, 15, 16, 33, 640])
def test_norms_and_gates(library, width):
    torch.manual_seed(1)
    x, weight, out = torch.randn(5, width), torch.randn(width), torch.empty(5, width)
    x[3] = 0.0
    library.rms_norm(x.data_ptr(), weight.data_ptr(), width * 1e-6, 5, width, out.data_ptr())
    want = torch.nn.functional.rms_norm(x, (width,), weight, 1e-6)
    assert torch.allclose(out * width**0.5, want, rtol=1e-5, atol=1e-7)
    both = 10 * torch.randn(5, 2, width)
    both[0, 0], both[1, 0] = 300.0, -300.0
    library.gated(both.data_ptr(), 5, width, out.data_ptr())
    want = torch.nn.functional.silu(both[:, 0]) * both[:, 1]
    assert torch.allclose(out, want, rtol=1e-5, atol=1e-30)


def test_draws_at_the_ends_find_tokens_that_can_be(library):
    """Also where all behind the likely ones are impossible, and the largest draw rounds to the whole."""
    x = torch.full((3, 100), -math.inf)
    x[:, 20], x[:, 37] = 1.0, 1.0
    draws = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    tokens, logprobs = torch.empty(3, dtype=torch.int64), torch.empty(3)
    memory = [each.data_ptr() for each in (tokens, logprobs)]
    library.sample(x.data_ptr(), draws.data_ptr(), 3, 100, *memory)
    assert tokens.tolist() == [20, 37, 37]
    assert logprobs.tolist() == pytest.approx([math.log(0.5)] * 3)


# --- compiling


@pytest.mark.usefixtures("library")
def test_what_was_compiled_is_kept(tmp_path):
    first = compiled(tmp_path / "kept")
    made = first.stat().st_mtime_ns
    assert compiled(tmp_path / "kept") == first
    assert first.stat().st_mtime_ns == made
    assert [each.name for each in first.parent.iterdir()] == [first.name]


@pytest.mark.usefixtures("library")
@pytest.mark.long
def test_other_processors_get_their_own(tmp_path, monkeypatch):
    first = compiled(tmp_path)
    monkeypatch.setattr(kernels, "_processor", lambda: "another")
    assert compiled(tmp_path) != first


def test_without_a_compiler_it_says_so_once(anew, caplog):
    anew.setattr(kernels, "COMPILERS", ("no-such-compiler",))
    anew.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        assert native_kernels() is None
        assert native_kernels() is None
    (message,) = caplog.messages
    assert "falling back to slower torch operations: no C++ compiler found (no-such-compiler); install one" in message


@pytest.mark.parametrize(
    ("compiler", "why"),
    [("no-such-compiler", "No such file"), ("false", "false -O3.*: exit 1"), ("true", "No such file")],
)
def test_a_compiler_that_fails(anew, tmp_path, caplog, compiler, why):
    anew.setenv("CXX", compiler)
    anew.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert native_kernels() is None
    assert len(caplog.messages) == 1
    with pytest.raises((CannotCompile, OSError), match=why):
        compiled(tmp_path / "rollart")
    assert list((tmp_path / "rollart").iterdir()) == []


def test_a_killed_compilation_leaves_files_only_in_the_cache_and_not_for_ever(monkeypatch, tmp_path):
    killed = tmp_path / "compiler"
    killed.write_text('#!/bin/sh\nmktemp\ncp -r "$TMPDIR" "$TMPDIR/../compile-killed"\nkill -KILL $$\n')
    killed.chmod(0o755)
    monkeypatch.setenv("CXX", str(killed))
    cache, elsewhere = tmp_path / "cache", tmp_path / "tmp"
    elsewhere.mkdir()
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    with pytest.raises(CannotCompile):
        compiled(cache)
    assert list(elsewhere.iterdir()) == []
    (left,) = cache.iterdir()
    os.utime(left, (0, 0))
    with pytest.raises(CannotCompile):
        compiled(cache)
    (left,) = cache.iterdir()
    assert left.stat().st_mtime > 0


def test_a_folder_that_cannot_be_written(anew, tmp_path, caplog):
    (tmp_path / "rollart").write_text("a file")
    anew.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert native_kernels() is None
    assert len(caplog.messages) == 1


def test_switched_off(anew, caplog):
    anew.setenv("ROLLART_NATIVE", "0")
    with caplog.at_level(logging.WARNING):
        assert native_kernels() is None
    assert caplog.messages == []


def test_the_cache_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "rollart"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "rollart"
