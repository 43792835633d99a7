"""Tests marked `kernels` are of our CPU operators: where a CPU cannot have them, they see that it says so."""

import pytest

from tests.support import kernels


@pytest.fixture(scope="session")
def operators() -> None:
    kernels.load()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if kernels.CAPABLE or pyfuncitem.get_closest_marker("kernels") is None:
        return None
    kernels.load()
    return True
