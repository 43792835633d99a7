"""A gateway on a port, for every test that asks it something over HTTP."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.gateway.tokenizing import Vocabulary
from tests.support.http_stage import Stage, make_vocabulary, open_stage


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return make_vocabulary(tmp_path_factory.mktemp("tokenizer"))


@pytest_asyncio.fixture
async def stage(vocabulary: Vocabulary) -> AsyncIterator[Stage]:
    async with open_stage(vocabulary) as opened:
        yield opened
