"""SmolLM2-135M-Instruct on this kernel, against what Hugging Face transformers made of the same file.

``data/record_smollm2.py`` recorded the expected values.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kvlib import llama

RECORDED = json.loads(
    Path(__file__).with_name("data").joinpath("smollm2.json").read_text(encoding="utf-8")
)
PROMPTS = RECORDED["prompts"]
#: Logits reach 31 here.  Summed in another order they differed by less than 1e-4; this leaves room.
LOGIT_TOLERANCE = 1e-3


def by_name(cases):
    return pytest.mark.parametrize("case", cases, ids=[case["name"] for case in cases])


@pytest.fixture(scope="module")
def model():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield llama.load(progress=False)
    torch.set_num_threads(threads)


def generate(model, cases, **options):
    return llama.generate(
        model, [case["ids"] for case in cases], RECORDED["max_new_tokens"], progress=False, **options
    )


def assert_as_recorded(generation, cases):
    for tokens, margins, case in zip(generation.tokens, generation.margins, cases, strict=True):
        assert tokens == case["tokens"], case["name"]
        np.testing.assert_allclose(margins, case["margins"], rtol=0, atol=LOGIT_TOLERANCE)


def assert_logits_as_recorded(logits, recorded):
    found = [logits[int(token)].item() for token in recorded]
    np.testing.assert_allclose(found, list(recorded.values()), rtol=0, atol=LOGIT_TOLERANCE)


def test_the_installed_file_is_the_one_that_was_recorded():
    content = llama._packaged_file().read_bytes()
    assert hashlib.sha256(content).hexdigest() == RECORDED["gguf_sha256"]


def test_the_recording_is_about_margins_that_no_rounding_can_flip():
    assert min(min(case["margins"]) for case in PROMPTS) > 5 * LOGIT_TOLERANCE


@pytest.mark.parametrize("case", RECORDED["texts"], ids=lambda case: ascii(case["text"]))
def test_a_tricky_text_becomes_the_same_tokens_and_comes_back(model, case):
    assert model.encode(case["text"]) == case["ids"]
    assert model.decode(case["ids"]) == case["text"]


@by_name(PROMPTS)
def test_a_prompt_becomes_the_same_tokens(model, case):
    assert model.encode(case["text"]) == case["ids"]


@by_name(PROMPTS)
def test_a_prompt_alone_continues_as_in_transformers(model, case):
    generation = generate(model, [case])
    assert_as_recorded(generation, [case])
    assert model.decode(generation.tokens[0]) == case["continuation"]


def test_a_ragged_batch_continues_every_prompt_as_in_transformers(model):
    generation = generate(model, PROMPTS)
    assert_as_recorded(generation, PROMPTS)
    assert generation.cache.lengths.tolist() == [
        len(case["ids"]) + len(case["tokens"]) - 1 for case in PROMPTS
    ]


def test_a_ragged_batch_in_chunks_continues_every_prompt_as_in_transformers(model):
    assert_as_recorded(generate(model, PROMPTS, chunk=16, capacity=150), PROMPTS)


def test_a_long_prompt_in_chunks_continues_as_in_transformers(model):
    longest = max(PROMPTS, key=lambda case: len(case["ids"]))
    assert_as_recorded(generate(model, [longest], chunk=7), [longest])


def test_logits_are_those_of_transformers_after_the_prompt_and_many_steps_later(model):
    sequences = [case["ids"] + case["tokens"][:-1] for case in PROMPTS]
    cache = model.new_cache(len(PROMPTS), 150)
    logits = llama.prefill(model, [case["ids"] for case in PROMPTS], cache, progress=False)
    later = llama.prefill(model, [case["tokens"][:-1] for case in PROMPTS], cache, progress=False)
    whole = llama.prefill(
        model, sequences, model.new_cache(len(PROMPTS), 150), chunk=50, progress=False
    )
    for row, case in enumerate(PROMPTS):
        assert_logits_as_recorded(logits[row], case["first_logits"])
        assert_logits_as_recorded(later[row], case["last_logits"])
        assert_logits_as_recorded(whole[row], case["last_logits"])


def test_heads_attend_what_they_attend_in_transformers(model):
    (case,) = (case for case in PROMPTS if case["name"] == "capital")
    T = len(case["ids"])
    step = model.forward(
        torch.tensor([case["ids"]]),
        model.new_cache(1, T + 3),
        torch.ones(1, T, dtype=torch.bool),
        attention=True,
    )
    for head in RECORDED["attention"]:
        found = step.attention[head["layer"]][0, head["head"]]
        np.testing.assert_allclose(found[:, :T], head["weights"], rtol=0, atol=1e-4)
        assert (found[:, T:] == 0).all()
