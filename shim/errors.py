"""Errors of the wrapper and of the `torpor` command that are not an engine's."""

from __future__ import annotations


class ShimError(Exception):
    """A call cannot be served. The message is one sentence: what is wrong, where, what to do."""


class UsageError(ShimError):
    """The command line, an annotation or a configuration file is wrong."""


class UnknownImage(ShimError):
    """No image in the store fits the reference."""


class AdmissionRefused(ShimError):
    """The image may not be restored into this container."""


class Busy(ShimError):
    """Another call holds this container."""


class NoContainer(ShimError):
    """The runtime knows no container of this id."""


class NotUndone(ShimError):
    """A restore failed and could not be undone whole: the container must not be started cold."""


class Unsettled(ShimError):
    """The checkpoint that made an image was cut short; whether its source lives is not known yet."""


class Undecided(ShimError):
    """A container that is kept until somebody has decided where it is to run."""

    def __init__(self, verb: str, container_id: str, way: str) -> None:
        super().__init__(
            f"could not {verb} container '{container_id}': it {way} another node, and nobody has decided yet "
            "where it is to run; see torpor migrate --list, and decide with torpor migrate --resolve source "
            "or target"
        )


class CalledOff(ShimError):
    """A container that was to come from another node does not: it must not be started here in any way."""
