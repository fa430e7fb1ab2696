"""The rules of the whole suite: real-engine tests are counted, no silent skips, few second tries."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest((Path(__file__).parents[1] / "conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers =\n    engine: real\n")
    return pytester


def test_counts_only_what_is_marked(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import pytest

        def test_plain(): pass

        @pytest.mark.engine
        def test_good(): pass

        @pytest.mark.engine
        def test_bad(): assert False

        @pytest.mark.engine
        @pytest.mark.skip(reason="no such kernel")
        def test_not_here(): pass

        @pytest.fixture
        def broken(): raise RuntimeError

        @pytest.mark.engine
        def test_without_its_fixture(broken): pass
        """
    )
    result = suite.runpytest_subprocess()
    result.stdout.fnmatch_lines(["real-engine tests: 1 passed, 2 failed, 1 skipped"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize(
    "how", ["@pytest.mark.skip", '@pytest.mark.skip(reason="")', "", "@pytest.mark.xfail"]
)
def test_a_skip_without_a_reason_fails_the_run(suite: pytest.Pytester, how: str) -> None:
    body = "assert False" if "xfail" in how else "pass" if how else "pytest.skip()"
    suite.makepyfile(f"import pytest\n\n@pytest.mark.engine\n{how}\ndef test_it():\n    {body}\n")
    result = suite.runpytest_subprocess()
    result.stdout.fnmatch_lines(
        ["skipped without a reason: *test_it", "real-engine tests: 0 passed, 0 failed, 1 sk*"]
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_a_skip_with_a_reason_is_fine(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        "import pytest\n\n@pytest.mark.engine\ndef test_it(): pytest.skip('no dirty tracking')\n"
    )
    assert suite.runpytest_subprocess().ret == pytest.ExitCode.OK


# Each fails at its first run only.
UNSTEADY = """
import pytest

seen = set()

@pytest.mark.engine
@pytest.mark.parametrize("number", range({size}))
def test_unsteady(number):
    first = number not in seen
    seen.add(number)
    assert not first, "the link was slow"
"""


def test_what_passes_only_at_its_second_try_is_shown(suite: pytest.Pytester) -> None:
    suite.makepyfile(UNSTEADY.format(size=3))
    result = suite.runpytest_subprocess("--reruns", "1")
    result.stdout.fnmatch_lines(
        ["*test_unsteady?0? failed first, at call:", "*the link was slow*", "tried again: 3"]
    )
    result.stdout.fnmatch_lines(["real-engine tests: 3 passed, 0 failed, 0 skipped"])
    assert result.ret == pytest.ExitCode.OK


def test_a_test_counts_once_however_often_it_fails(suite: pytest.Pytester) -> None:
    """The first of each pair fails in its call and after it, the second only after it; both just once."""
    suite.makepyfile(
        """
        import pytest

        tries = {}

        @pytest.fixture
        def leak(request):
            name = request.node.name
            tries[name] = tries.get(name, 0) + 1
            yield
            assert tries[name] > 1, "something is left"

        @pytest.mark.engine
        @pytest.mark.parametrize("number", range(2))
        def test_both(leak, request, number):
            assert tries[request.node.name] > 1

        @pytest.mark.engine
        def test_after(leak):
            pass
        """
    )
    result = suite.runpytest_subprocess("--reruns", "1")
    result.stdout.fnmatch_lines(
        ["*test_both?0? failed first, at teardown:", "*something is left*", "tried again: 3"]
    )
    result.stdout.fnmatch_lines(["real-engine tests: 3 passed, 0 failed, 0 skipped"])
    assert result.ret == pytest.ExitCode.OK


def test_many_second_tries_fail_the_run(suite: pytest.Pytester) -> None:
    suite.makepyfile(UNSTEADY.format(size=4))
    result = suite.runpytest_subprocess("--reruns", "1")
    result.stdout.fnmatch_lines(["tried again: 4, which fails the run: at most 3 may"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_what_fails_twice_fails(suite: pytest.Pytester) -> None:
    suite.makepyfile("import pytest\n\n@pytest.mark.engine\ndef test_it(): assert False\n")
    result = suite.runpytest_subprocess("--reruns", "1")
    result.stdout.fnmatch_lines(["tried again: 1", "real-engine tests: 0 passed, 1 failed, 0 skipped"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED
