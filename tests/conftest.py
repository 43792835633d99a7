"""Holds for every test: no asyncio task outlives it, and a busy machine fails no property."""

import asyncio
import inspect
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

# How long one example takes says something about the machine, nothing about the property.
settings.register_profile("galley", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("galley")


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> None:
    """Set up before a test's own fixtures, so that it looks after they were torn down."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("no_tasks_left")


@pytest_asyncio.fixture
async def no_tasks_left() -> AsyncIterator[None]:
    """Fails when tasks are left on the test's loop that were not there before."""
    before = asyncio.all_tasks()
    yield
    await asyncio.sleep(0)  # tasks that were just cancelled and awaited by callbacks end in this turn
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    names = sorted(f"{task.get_name()} {task.get_coro()}" for task in left)
    assert not left, f"tasks left running: {names}"
