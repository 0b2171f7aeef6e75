"""The tables of the batched step: run by `batched_step`, in a process for each allocator."""

import statistics
import sys
import time

import grid
import memory
import peers
import timing
import torch
import training
from peers import COPIED, IN_PLACE, ours
from report import Interference, duration, goal, machine, print_goals, print_table, versions


def run(cells, seconds, threads):
    """Measure cells for about so many seconds each, and print the tables."""
    torch.set_num_threads(threads)
    contenders, missing = peers.installed()
    copy, interference = timing.Copy(), Interference()
    introduce(contenders, missing, copy.cost_of_fresh_memory())
    start, taken, extra, backward = time.perf_counter(), {}, {}, {}
    for number, cell in enumerate(cells, 1):
        so_far = f"{time.perf_counter() - start:4.0f} s"
        print(f"{so_far}  {number} of {len(cells)}: {cell}", file=sys.stderr, flush=True)
        taken[cell] = measure(cell, contenders, seconds)
        extra[cell] = extra_memory(cell)
        backward[cell] = training.ratio(cell, seconds / 6)
        copy.measure()
    print(f"A copy into warm memory reads and writes {copy.bandwidth / 1e9:.1f} GB/s.\n")
    goals = []
    for base in (ours.FUNCTIONAL, ours.BARE):
        columns = compare(taken, contenders, base, copy.bandwidth)
        print_comparison(taken, columns, base)
        goals += goals_of(columns, list(taken), base)
    goals += print_rest(extra, backward)
    if len(cells) < len(grid.FULL):
        print(
            f"The goals are for the whole grid of {len(grid.FULL)} cells, and this run had {len(cells)}."
        )
    print_goals(goals)
    print(interference)


def introduce(contenders, missing, cost_of_fresh_memory):
    """Say what is measured, on what, and what each contender returns."""
    print(machine(), versions(), sep="\n")
    print(f"float32. {grid.RAGGED} Seed {grid.SEED}.")
    print(f"A copy into fresh memory takes {cost_of_fresh_memory:.1f}x as long as one into warm memory.")
    for package in missing:
        print(f"Left out: what needs {package}, which is not installed.")
    print()
    print_table(["", "returns", "how"], [[peer.name, peer.returns, peer.how] for peer in contenders])


def measure(cell, contenders, seconds):
    """Return the seconds that each contender takes, one number a round, once each has proven to be one."""
    args = grid.draw(cell)
    expected = ours.FUNCTIONAL.prepare(args)[0]()
    steps = {}
    with torch.no_grad():
        for peer in contenders:
            peers.spoil(args)
            steps[peer.name], read = peer.prepare(args)
            peers.check(peer, read, steps[peer.name](), expected)
        return timing.interleave(steps, seconds)


def extra_memory(cell):
    """Return the peak of the functional step, and those in place without and with weights.

    The first is the peak of all tensors made during the call over the bytes of those returned;
    the others, what is made beyond those returned over the bytes of the caches.
    """
    args = grid.draw(cell)
    with torch.no_grad():
        peak, result = memory.peak(ours.FUNCTIONAL.prepare(args)[0])
        functional = peak / memory.new_bytes(result, args)
        in_place = []
        for peer in (ours.BARE, ours.WITH_WEIGHTS):
            peak, result = memory.peak(peer.prepare(args)[0])
            in_place.append((peak - memory.new_bytes(result, args)) / cell.cache_bytes)
    return functional, *in_place


def compare(taken, contenders, base, bandwidth):
    """Return columns of numbers, one number a cell.

    For each peer that leaves its caches where `base` does, its time over that of ours: as a
    function, ours returns the weights whatever the peer does; in place, what the peer returns.
    Then the fastest of these, and the time of `base` over what the memory bus needs.
    """
    columns = {
        peer.name: [
            timing.ratio(times, peer.name, ours.counterpart(peer).name) for times in taken.values()
        ]
        for peer in contenders
        if peer.cache == base.cache and peer not in ours.PEERS
    }
    columns["fastest"] = [min(ratios) for ratios in zip(*columns.values())]
    least = [grid.least_bytes(cell, grid.draw(cell)["lengths"])[base.cache] for cell in taken]
    columns["limit"] = [
        statistics.median(times[base.name]) / (n_bytes / bandwidth)
        for times, n_bytes in zip(taken.values(), least)
    ]
    return columns


def print_comparison(taken, columns, base):
    own = [peer.name for peer in ours.PEERS if peer.cache == base.cache]
    means = [timing.geometric_mean(column) for column in columns.values()]
    worst = [_worst(name)(column) for name, column in columns.items()]
    blank = [""] * len(own)
    rows = [
        [
            str(cell),
            *(duration(statistics.median(times[name])) for name in own),
            *(f"{number:.2f}" for number in numbers),
        ]
        for (cell, times), *numbers in zip(taken.items(), *columns.values())
    ]
    rows.append(["geometric mean", *blank, *(f"{number:.2f}" for number in means)])
    rows.append(["worst cell", *blank, *(f"{number:.2f}" for number in worst)])

    print(
        f"{base.cache.capitalize()}: our time; the time of each peer, and of the fastest, over that of ours"
    )
    print("which returns as much or more, so above 1 ours is faster; and, as limit, the time of")
    print(f"{base.name} over what the bytes that it must move take at the bandwidth of a copy.")
    print_table(["cell", *own, *columns], rows)
    for (name, column), number in zip(columns.items(), worst):
        print(f"worst cell, {name}: {list(taken)[column.index(number)]}")
    print()


def _worst(name):
    """Return what picks the worst number of a column."""
    return max if name == "limit" else min


def goals_of(columns, cells, base):
    """Return rows for `print_goals`: what the columns should show."""
    name, at_least = base.name, {COPIED: 1.15, IN_PLACE: 1}[base.cache]
    goals = [
        goal(f"{name}: {peer}, geometric mean", timing.geometric_mean(column), at_least=at_least)
        for peer, column in columns.items()
        if peer not in ("fastest", "limit")
    ]
    if base.cache == COPIED:
        goals.append(goal(f"{name}: folded, worst cell", min(columns["folded"]), at_least=1 / 1.05))
    else:
        goals.append(goal(f"{name}: fastest, worst cell", min(columns["fastest"]), at_least=0.8))
    bus_bound = [over for cell, over in zip(cells, columns["limit"]) if cell.Q == 1 and cell.M == 4096]
    if bus_bound:
        goals.append(goal(f"{name}: limit, worst cell of Q=1 M=4096", max(bus_bound), at_most=1.5))
    return goals


def print_rest(extra, backward):
    """Print memory and training for every cell, and return rows for `print_goals`."""
    print(
        "Peak of the tensors made in a call: ours, over its outputs; in place, beyond its outputs, over the caches."
    )
    print("Last, forward and backward: the time of sdpa over that of ours.")
    rows = [
        [str(cell), f"{functional:.3f}", *(f"{part:.2%}" for part in in_place), f"{backward[cell]:.2f}"]
        for cell, (functional, *in_place) in extra.items()
    ]
    names = [peer.name for peer in ours.PEERS]
    print_table(["cell", *names, "backward"], rows)
    functional, *in_place = zip(*extra.values())
    mean = timing.geometric_mean(backward.values())
    return [
        goal("ours: peak over its outputs, worst cell", max(functional), at_most=1.1),
        *(
            goal(f"{name}: extra over the caches, worst cell", max(parts), at_most=0.01)
            for name, parts in zip(names[1:], in_place)
        ),
        goal("forward and backward: sdpa, geometric mean", mean, at_least=1),
    ]
