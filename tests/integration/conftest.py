"""What the engine tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.reference_prompts import Reference


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A dense random checkpoint with four prompts of 5 to 300 tokens and 64 greedy tokens each."""
    from tests.integration.reference_prompts import random_reference  # torch and transformers: not for every test here

    return random_reference(tmp_path_factory.mktemp("reference"), (5, 64, 131, 300))
