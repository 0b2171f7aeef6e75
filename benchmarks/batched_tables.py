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
    interference = Interference()
    bandwidth, fresh = timing.copy_bandwidth(seconds)
    introduce(contenders, missing, bandwidth, fresh)
    start, taken, extra, backward = time.perf_counter(), {}, {}, {}
    for number, cell in enumerate(cells, 1):
        print(
            f"{time.perf_counter() - start:4.0f} s  {number} of {len(cells)}: {cell}",
            file=sys.stderr,
            flush=True,
        )
        taken[cell] = measure(cell, contenders, seconds)
        extra[cell] = extra_memory(cell)
        backward[cell] = training.ratio(cell, seconds / 6)
    goals = []
    for base in (ours.FUNCTIONAL, ours.BARE):
        goals += print_ratios(taken, contenders, bandwidth, base)
    goals += print_rest(extra, backward)
    print_goals(goals)
    print(interference)


def introduce(contenders, missing, bandwidth, fresh):
    """Say what is measured, on what, and what each contender returns."""
    print(machine(), versions(), sep="\n")
    print(f"float32. {grid.RAGGED} Seed {grid.SEED}.")
    print(
        f"A copy into warm memory reads and writes {bandwidth / 1e9:.1f} GB/s; into fresh memory it takes {fresh:.1f}x as long."
    )
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
    """Return the peak of the functional step over its outputs, and that of the in-place step over its caches.

    The first is the peak of all tensors made during the call over the bytes of those returned;
    the second, without and with weights, what is made beyond those returned over the bytes of the caches.
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


def print_ratios(taken, contenders, bandwidth, base):
    """Print a row for every cell: the time of `base`, and what it is compared with.

    These are the time of each peer that leaves its caches in the same place, over that of ours
    which returns the same in place, or weights anyway as a function; the fastest of them; and the
    time of `base` over what the memory bus needs.

    Returns
    -------
    list
        Rows for `print_goals`.
    """
    rivals = [peer for peer in contenders if peer.cache == base.cache and peer not in ours.PEERS]
    over_ours, over_limit = {}, {}
    for cell, times in taken.items():
        over_ours[cell] = [
            timing.ratio(times, peer.name, ours.counterpart(peer).name) for peer in rivals
        ]
        least = grid.least_bytes(cell, grid.draw(cell)["lengths"])[base.cache] / bandwidth
        over_limit[cell] = statistics.median(times[base.name]) / least

    columns = {
        peer.name: [ratios[at] for ratios in over_ours.values()] for at, peer in enumerate(rivals)
    }
    columns["fastest"] = [min(ratios) for ratios in over_ours.values()]
    columns["limit"] = list(over_limit.values())
    means = [timing.geometric_mean(column) for column in columns.values()]
    worst = [(max if name == "limit" else min)(column) for name, column in columns.items()]

    print(
        f"{base.cache.capitalize()}: the time of {base.name}, and as multiples of ours: each peer, the fastest peer."
    )
    print(f"Last, {base.name} as a multiple of the bandwidth limit.")
    rows = [
        [
            str(cell),
            duration(statistics.median(times[base.name])),
            *(f"{number:.2f}" for number in numbers),
        ]
        for (cell, times), *numbers in zip(taken.items(), *columns.values())
    ]
    rows.append(["geometric mean", "", *(f"{number:.2f}" for number in means)])
    rows.append(["worst cell", "", *(f"{number:.2f}" for number in worst)])
    print_table(["cell", base.name, *columns], rows)
    for (name, column), number in zip(columns.items(), worst):
        print(f"worst cell, {name}: {list(taken)[column.index(number)]}")
    print()

    least = {COPIED: 1.15, IN_PLACE: 1}[base.cache]
    goals = [
        goal(f"{base.name}: {peer.name}, geometric mean", mean, at_least=least)
        for peer, mean in zip(rivals, means)
    ]
    if base.cache == COPIED:
        goals.append(goal(f"{base.name}: folded, worst cell", min(columns["folded"]), at_least=1 / 1.05))
    else:
        goals.append(
            goal(f"{base.name}: fastest peer, worst cell", min(columns["fastest"]), at_least=0.8)
        )
    if bus_bound := [number for cell, number in over_limit.items() if cell.Q == 1 and cell.M == 4096]:
        goals.append(
            goal(f"{base.name}: over the limit, Q=1 M=4096, worst cell", max(bus_bound), at_most=1.5)
        )
    return goals


def print_rest(extra, backward):
    """Print memory and training for every cell, and return rows for `print_goals`."""
    print(
        "Peak of tensors during a call: ours, over its outputs; in place, beyond its outputs, over the caches."
    )
    print("Last, forward and backward: sdpa as a multiple of ours.")
    rows = [
        [
            str(cell),
            f"{functional:.3f}",
            *(f"{fraction:.2%}" for fraction in in_place),
            f"{backward[cell]:.2f}",
        ]
        for cell, (functional, *in_place) in extra.items()
    ]
    names = [peer.name for peer in (ours.FUNCTIONAL, ours.BARE, ours.WITH_WEIGHTS)]
    print_table(["cell", *names, "backward"], rows)
    functional, *in_place = ([numbers[at] for numbers in extra.values()] for at in range(len(names)))
    goals = [goal("ours: peak over its outputs, worst cell", max(functional), at_most=1.1)]
    goals += [
        goal(f"{name}: extra over the caches, worst cell", max(fractions), at_most=0.01)
        for name, fractions in zip(names[1:], in_place)
    ]
    mean = timing.geometric_mean(backward.values())
    return [*goals, goal("forward and backward: sdpa, geometric mean", mean, at_least=1)]
