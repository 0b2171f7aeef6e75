"""What the torch caches ask of their tensors, and the precision they compute in."""

from __future__ import annotations

from contextlib import nullcontext

import torch


def bind_sizes(shapes, tensors, may_be_zero):
    """Give every letter of the shape alphabet its size, and check that all tensors agree on it.

    Parameters
    ----------
    shapes : dict of str to tuple of str
        The letters of each argument's shape, such as ``{"lengths": ("B",)}``.
    tensors : dict of str to torch.Tensor
        The arguments.
    may_be_zero : collection of str
        The letters that may stand for a size of 0.

    Returns
    -------
    dict of str to int
        The size that each letter stands for.

    Raises
    ------
    TypeError
        If an argument is not a tensor, or not a dense one.
    ValueError
        If an argument has another number of dimensions, a size of 0, a size that differs from
        that of an argument before it, or another device than the first.
    """
    sizes = {}
    for name, letters in shapes.items():
        tensor = tensors[name]
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} was a {type(tensor).__name__}; it must be a torch.Tensor")
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name} had layout {tensor.layout}; it must be dense, torch.strided")
        shape = tensor.shape
        if len(shape) != len(letters):
            raise ValueError(
                f"{name} had shape {tuple(shape)}; it must have {len(letters)} dimensions, ({', '.join(letters)})"
            )
        for letter, size in zip(letters, shape):
            if sizes.setdefault(letter, size) != size:
                first = next(other for other in shapes if letter in shapes[other])
                raise ValueError(
                    f"{name} had shape {tuple(shape)}, {letter} = {size}; it must be ({', '.join(letters)}) "
                    f"with {letter} = {sizes[letter]}, as in {first}"
                )
            if size == 0 and letter not in may_be_zero:
                raise ValueError(
                    f"{name} had shape {tuple(shape)}, {letter} = 0; it must be ({', '.join(letters)}) "
                    f"with {letter} = 1 or more"
                )
    require_same("device", tensors)
    return sizes


#: Floating dtypes that hold no numbers to attend with: scale factors that know neither zero nor
#: sign, and pairs packed into one element.
_NO_NUMBERS = [getattr(torch, name, None) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2")]


def require_floating_alike(tensors):
    """Raise unless all tensors have one and the same floating dtype."""
    for name, tensor in tensors.items():
        if not tensor.dtype.is_floating_point or tensor.dtype in _NO_NUMBERS:
            raise TypeError(f"{name} had dtype {tensor.dtype}; it must be a floating dtype")
    require_same("dtype", tensors)


def require_same(attribute, tensors):
    """Raise unless all tensors have the same `attribute` as the first."""
    wanted = None
    for name, tensor in tensors.items():
        found = getattr(tensor, attribute)
        if wanted is None:
            first, wanted = name, found
        elif found != wanted:
            raise ValueError(f"{name} had {attribute} {found}; it must be {wanted}, as in {first}")


def wide(dtype):
    """Return the dtype to compute scores, softmax and context in: float64 for float64, else float32.

    Half precision cannot hold the products of ordinary queries and keys: float16 ends at 65504.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def full_precision(device_type):
    """Return a context in which autocast rounds no product to half precision."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
