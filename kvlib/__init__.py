"""The key/value cache of autoregressive decoding, slot by slot.

``import kvlib`` needs numpy only; torch is imported when a torch name is first used.
"""

from importlib import import_module

from kvlib import visibility
from kvlib.numpy_cache import KVCache, decode_step

__version__ = "0.1.0"

_TORCH_NAMES = {
    "kv_cache_step": "kvlib.tuple_cache",
    "kv_cache_attention_step": "kvlib.batched_cache",
    "kv_cache_attention_step_": "kvlib.batched_cache",
}

__all__ = ["KVCache", "decode_step", "visibility", *_TORCH_NAMES]


def __getattr__(name):
    if name not in _TORCH_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_TORCH_NAMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"kvlib.{name} needs torch, which is not installed; pip install 'kvlib[torch]' adds it"
        ) from error
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
