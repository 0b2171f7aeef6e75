"""The benchmarks: what they compare is comparable, what they count is exact, and they run."""

import os
import platform
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
OPTIONAL = ("onnxruntime", "jax", "transformers")
MODULES = ("batched_step", "grid", "memory", "peers", "report", "timing")


@pytest.fixture(autouse=True)
def benchmark_modules(monkeypatch):
    """Make the modules of the benchmarks importable, and forget them afterwards."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in MODULES]:
        del sys.modules[name]


@pytest.fixture
def cell():
    from grid import Cell

    return Cell(B=3, H_q=4, H_k=2, D=8, M=24, Q=3)


def judge(peer, cell):
    """Check a peer as the benchmark does, where another one has already written into the caches."""
    import grid
    import peers
    from peers import ours

    args = grid.draw(cell)
    expected = ours.FUNCTIONAL.prepare(args)[0]()
    ours.BARE.prepare(args)[0]()
    peers.spoil(args)
    step, read = peer.prepare(args)
    peers.check(peer, read, step(), expected)


def torch_peer(name):
    from peers import torch_peers

    return next(peer for peer in torch_peers.PEERS if peer.name == name)


def run(script, *arguments):
    command = [sys.executable, BENCHMARKS / script, "--threads", "1", *arguments]
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "error"},
    )


@pytest.mark.parametrize("Q", [1, 3])
def test_every_installed_peer_computes_what_ours_does(cell, Q):
    import peers

    found, _ = peers.installed()
    assert {"ours", "ours_", "ours_ w", "textbook", "folded", "sdpa", "sdpa_", "sdpa_ rows"} <= {
        p.name for p in found
    }
    for peer in found:
        judge(peer, replace(cell, Q=Q))


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("context", lambda context, keys, values: (context * 1.001, keys, values)),
        ("live keys", lambda context, keys, values: (context, keys.roll(1, dims=2), values)),
        ("live values", lambda context, keys, values: (context, keys, values.roll(1, dims=0))),
    ],
)
def test_a_peer_that_computes_something_else_is_refused(cell, what, change):
    honest = torch_peer("sdpa")

    def prepare(args):
        step, read = honest.prepare(args)
        return step, lambda result: change(*read(result))

    with pytest.raises(AssertionError, match=f"liar is no peer, its {what} differ"):
        judge(replace(honest, name="liar", prepare=prepare), cell)


def test_a_peer_that_leaves_the_new_slots_unwritten_is_refused(cell, monkeypatch):
    from peers import torch_peers

    peer = torch_peer("folded")
    monkeypatch.setattr(torch_peers, "_written", lambda args, keys, values: (keys, values))
    with pytest.raises(AssertionError, match="folded is no peer, its context differ"):
        judge(peer, cell)


@pytest.mark.parametrize("package", OPTIONAL)
def test_a_peer_whose_package_is_missing_is_named_and_left_out(package, monkeypatch):
    import peers

    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    found, missing = peers.installed()
    assert package in missing
    assert "textbook" in {peer.name for peer in found}
    assert not any(package in peer.how for peer in found)


def test_a_grid_of_the_benchmark_has_all_32_cells_and_ragged_rows_that_fit():
    import grid

    assert len(set(grid.FULL)) == 32
    lengths = grid.draw(grid.Cell(B=100, H_q=1, H_k=1, D=1, M=8, Q=4))["lengths"]
    assert set(lengths.tolist()) == {2, 3, 4}


def test_the_bytes_that_a_step_must_move_are_those_counted_by_hand():
    import grid
    from peers import COPIED, IN_PLACE

    least = grid.least_bytes(grid.Cell(B=2, H_q=4, H_k=2, D=8, M=16, Q=1), torch.tensor([5, 7]))
    # query and context 64 numbers each, new keys and values 32 each, 12 live slots of 16 keys and 16 values
    assert least[IN_PLACE] == 4 * (64 + 64 + 64 + 12 * 32 + 64)
    # caches 512 numbers each, read and written; weights 2 * 4 * 16
    assert least[COPIED] == 4 * (64 + 64 + 64 + 128 + 4 * 512)


def test_the_peak_of_a_step_counts_temporaries_and_not_what_is_freed_before():
    import memory

    source = torch.zeros(1000)

    def step():
        first = source + 1
        second = torch.cat([first, first])
        del first
        return {"result": second[:500] + 1, "given": source}

    peak, result = memory.peak(step)
    assert peak == 3 * 4000  # first and second: the result comes after first is gone
    assert memory.new_bytes(result, {"source": source}) == 2000


def test_the_exponent_of_a_power_law_is_found():
    import timing

    assert timing.slope([10, 100, 1000], [3 * n**1.5 for n in (10, 100, 1000)]) == pytest.approx(1.5)


def test_a_ratio_is_the_median_over_rounds():
    import timing

    assert timing.ratio({"a": [2.0, 30.0, 4.0], "b": [1.0, 10.0, 1.0]}, "a", "b") == 3
    assert timing.geometric_mean([1, 4]) == pytest.approx(2)


def test_every_step_is_timed_in_every_round():
    import timing

    calls = {"a": 0, "b": 0}

    def count(name):
        def step():
            calls[name] += 1

        return step

    taken = timing.interleave({name: count(name) for name in calls}, seconds=0, least_rounds=3)
    assert {name: len(times) for name, times in taken.items()} == {"a": 3, "b": 3}
    assert min(calls.values()) > 3


def test_a_goal_says_whether_it_is_kept():
    import report

    assert [report.goal("", got, at_least=2)[-1] for got in (1.9, 2)] == ["no", "yes"]
    assert [report.goal("", got, at_most=2)[-1] for got in (2, 2.1)] == ["yes", "no"]


def test_freed_memory_is_reused_where_the_benchmark_says_so():
    import batched_step

    twice = """
import numpy, resource
def faults():
    start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    numpy.ones(2**23)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start
faults(); print(faults())
"""
    taken = {
        name: int(subprocess.check_output([sys.executable, "-c", twice], env=os.environ | settings))
        for name, settings in batched_step.ALLOCATORS.items()
    }
    assert (taken["reused"] < taken["default"] / 4) == (platform.libc_ver()[0] == "glibc")


def test_the_batched_benchmark_prints_a_row_for_each_cell_and_each_peer():
    only = ("--quick", "--allocator", "default", "--only", "B=1", "Q=1", "--seconds", "0.01")
    done = run("batched_step.py", *only)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for name in ("ours", "ours_", "ours_ w", "textbook", "folded", "sdpa", "sdpa_", "sdpa_ rows"):
        assert sum(line.startswith(f"{name}  ") for line in lines) == 1, name
    for row in ("B=1 8/2 D=64 M=512 Q=1 ", "geometric mean", "worst cell  "):
        assert sum(line.startswith(row) for line in lines) == (3 if "Q=1" in row else 2), row
    for package in OPTIONAL:
        left_out = any(f"Left out: what needs {package}" in line for line in lines)
        assert left_out == (find_spec(package) is None), package


def test_the_benchmark_of_the_smaller_caches_runs():
    done = run("small_caches.py", "--quick")
    assert done.returncode == 0, done.stderr
    for name in ("decode_step  ", "kv_cache_step  ", "kv_cache_attention_step_  "):
        assert sum(line.startswith(name) for line in done.stdout.splitlines()) == 1
