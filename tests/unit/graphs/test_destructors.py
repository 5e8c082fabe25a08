"""Waiting for the driver's destructors, against a driver that is made up."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from gapless.graphs.device import destructors


class Driver:
    """Calls the destructor of a graph's user object from a thread of its own, if it calls it at all."""

    def __init__(self, *, fails: str = "", calls: bool = True) -> None:
        self.fails, self.calls = fails, calls
        self.destructor: Any = None
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def function(*args: Any) -> int:
            self.names.append(name)
            if name == self.fails:
                return 1
            if name == "cuUserObjectCreate":
                self.destructor = args[2]
            if name == "cuGraphDestroy" and self.calls and self.fails != "cuGraphRetainUserObject":
                threading.Timer(0.02, self.destructor, (None,)).start()
            return 0

        return function


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(destructors, "_waiting", [])
    return lambda driver: monkeypatch.setattr(destructors, "load_driver", lambda functions: driver)


def test_it_waits_for_a_destructor_that_was_queued_last(use: Any) -> None:
    driver = Driver()
    use(driver)
    assert destructors.wait_for_destructors(5.0)
    assert driver.names == list(destructors._FUNCTIONS)
    assert not destructors._waiting


@pytest.mark.parametrize("name", destructors._FUNCTIONS)
def test_a_driver_that_refuses_is_no_error(name: str, use: Any) -> None:
    use(Driver(fails=name, calls=False))
    assert not destructors.wait_for_destructors(5.0)


def test_a_destructor_that_is_late_may_still_be_called(use: Any) -> None:
    driver = Driver(calls=False)
    use(driver)
    assert not destructors.wait_for_destructors(0.01)
    (kept,) = destructors._waiting
    assert kept is driver.destructor
    kept(None)


def test_without_a_driver_there_is_nothing_to_wait_for(use: Any) -> None:
    use(None)
    assert not destructors.wait_for_destructors(5.0)
