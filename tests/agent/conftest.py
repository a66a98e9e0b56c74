"""Tests of agents may be coroutines; what a fixture gives them that is an `async with` is entered
for them."""

from __future__ import annotations

import asyncio
import contextlib
import inspect

import pytest

from tests.beds.coordinated import coordinated


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def main():
        async with contextlib.AsyncExitStack() as stack:
            arguments = {
                name: pyfuncitem.funcargs[name]
                for name in inspect.signature(pyfuncitem.obj).parameters
            }
            for name, value in arguments.items():
                if isinstance(value, contextlib.AbstractAsyncContextManager):
                    arguments[name] = await stack.enter_async_context(value)
            await pyfuncitem.obj(**arguments)

    asyncio.run(main())
    return True


def options(**values: object):
    """Gives these options to the fixture of the test's world."""

    def mark(test):
        test.options = values
        return test

    return mark


@pytest.fixture
def w(request, tmp_path):
    """A coordinator of two fixed nodes, and a way to join it."""
    return coordinated(tmp_path, **getattr(request.function, "options", {}))
