"""What the comparisons share: every form of the batched step."""

from functools import partial

import pytest

from kvlib.batched_cache import kv_cache_attention_step, kv_cache_attention_step_


def in_place_on_copies(*, key_cache, value_cache, **others):
    return kv_cache_attention_step_(key_cache=key_cache.clone(), value_cache=value_cache.clone(), **others)


FORMS = {
    "functional": kv_cache_attention_step,
    "in_place": in_place_on_copies,
    "in_place_without_weights": partial(in_place_on_copies, need_weights=False),
    "in_place_without_checks": partial(in_place_on_copies, check_data=False),
}


@pytest.fixture(scope="session", params=FORMS.values(), ids=FORMS)
def step(request):
    """Each form of the step, to be called by keyword; none changes what it is given."""
    return request.param
