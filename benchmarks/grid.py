"""The cells that the batched step is measured over, and the inputs of a cell.

Shapes: B batch rows, H_q query heads, H_k key/value heads, Q new slots in a call, M capacity,
D key size, which is the value size here, too.
"""

from dataclasses import dataclass
from itertools import product

import torch
from peers import COPIED, IN_PLACE

SEED = 20240
RAGGED = "Each row's length before the call is uniform from M / 4 to M - Q; every row appends Q slots."
HEADS = ((8, 2), (32, 8))  # H_q, H_k


@dataclass(frozen=True)
class Cell:
    B: int
    H_q: int
    H_k: int
    D: int
    M: int
    Q: int

    def __str__(self):
        return f"B={self.B} {self.H_q}/{self.H_k} D={self.D} M={self.M} Q={self.Q}"

    @property
    def cache_bytes(self):
        """Bytes of both caches, in float32."""
        return 2 * self.B * self.H_k * self.M * self.D * 4


FULL = [
    Cell(B, *heads, D, M, Q)
    for B, heads, D, M, Q in product((1, 8), HEADS, (64, 128), (512, 4096), (1, 16))
]
QUICK = [
    Cell(1, 8, 2, 64, 512, 1),
    Cell(1, 32, 8, 128, 512, 16),
    Cell(8, 8, 2, 64, 4096, 1),
]


def draw(cell, seed=SEED):
    """Return the arguments of a step by name: standard normal numbers, and lengths as `RAGGED` says."""
    B, H_q, H_k, D, M, Q = cell.B, cell.H_q, cell.H_k, cell.D, cell.M, cell.Q
    random = torch.Generator().manual_seed(seed)
    return {
        "query": torch.randn(B, H_q, Q, D, generator=random),
        "new_key": torch.randn(B, H_k, Q, D, generator=random),
        "new_value": torch.randn(B, H_k, Q, D, generator=random),
        "key_cache": torch.randn(B, H_k, M, D, generator=random),
        "value_cache": torch.randn(B, H_k, M, D, generator=random),
        "lengths": torch.randint(M // 4, M - Q + 1, (B,), generator=random),
        "append_mask": torch.ones(B, Q, dtype=torch.bool),
    }


def least_bytes(cell, lengths):
    """Return the bytes that a step has to move, by where it leaves the caches, each read or written once.

    Either way it reads the queries, the new keys and values, and writes the context.  In place it
    also reads every row's live slots and writes the new ones; if it copies, it also reads and
    writes the whole of both caches, and writes the weights, over all M slots.
    """
    B, H_q, H_k, D, M, Q = cell.B, cell.H_q, cell.H_k, cell.D, cell.M, cell.Q
    new = 2 * B * H_k * Q * D
    shared = 2 * B * H_q * Q * D + new
    live = 2 * lengths.sum().item() * H_k * D
    weights = B * H_q * Q * M
    return {
        IN_PLACE: 4 * (shared + live + new),
        COPIED: 4 * (shared + weights) + 2 * cell.cache_bytes,
    }
