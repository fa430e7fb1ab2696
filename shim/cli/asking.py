"""Commands that ask a question, whose exit statuses 0, 1 and 2 are the answer."""

from __future__ import annotations

from typing import Any

import click

from engines.api import EngineError
from shim.errors import ShimError, UsageError

NO_ANSWER = 3
"""Exit status of a question that could not be answered."""


class _BadQuestion(click.UsageError):
    exit_code = NO_ANSWER


class _NoAnswer(click.ClickException):
    exit_code = NO_ANSWER


class Rehearsing(click.Command):
    """A command that is a question with --dry-run: a wrong one ends with 3, for 2 is an answer."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Read the command line."""
        asks = self.is_question(args)  # before it is eaten
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            if not asks:
                raise
            raise _BadQuestion(error.format_message(), ctx=error.ctx) from None

    def is_question(self, args: list[str]) -> bool:
        """Whether a command line asks."""
        return "--dry-run" in args

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            if ctx.params.get("dry_run"):
                raise _NoAnswer(str(error)) from error
            raise


class Deciding(Rehearsing):
    """A command that is nothing but a question: whatever keeps it from an answer ends with 3."""

    def is_question(self, args: list[str]) -> bool:
        """It always does."""
        return True

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except OSError as error:
            where = f"'{error.filename}'" if error.filename else "this node"
            raise _NoAnswer(f"could not look at {where}: {error.strerror}") from error
        except (EngineError, ShimError) as error:
            raise _NoAnswer(str(error)) from error
