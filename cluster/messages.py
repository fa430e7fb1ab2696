"""What two agents say to each other. The source asks, the target answers; one question at a time.

Every message is one frame of JSON (see `channel`). `Send` is followed by the file's bytes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from compat.profile import Profile
from netmig.conntrack import Translations

PROTOCOL = 3

Standing = Literal["unknown", "reserved", "preparing", "prepared", "running"]


class Message(msgspec.Struct, kw_only=True, tag=True):
    """Anything that is said."""


class Hello(Message):
    """The first thing that is said, by the source. node: its name, which a certificate must bear out."""

    protocol: int
    node: str


class Reserve(Message):
    """May this container come, and is there room for it? Everything is made ready but its memory.

    migration: a name for all that follows. spec: its config.json. identity: of its network namespace, as
    `netmig.identity` encodes it. owner: whose its address leases are. memory_bytes: an estimate.
    trial: only look, and leave nothing. guest: its pod is made there by a caller of its own; the image that
    the pod's annotation names, "" for none. container_name: its name in the pod. routed: each node has a pod
    network of its own. returning: then, it comes back to its home.
    """

    migration: str
    container_id: str
    engine: str
    spec: bytes
    identity: bytes
    owner: str
    host: Profile
    memory_bytes: int
    trial: bool
    guest: str = ""
    container_name: str = ""
    routed: bool = False
    returning: bool = False


class Expect(Message):
    """Wait until the caller of the target has made the pod, and waits for the container."""


class Send(Message):
    """A file follows, or part of one. place: "base" (the root file system before the freeze) or "image".

    size_bytes: of what follows. offset: how many bytes of the file came before.
    """

    place: Literal["base", "image"]
    name: str
    size_bytes: int
    offset: int = 0


class Parent(Message):
    """What has come of the image is memory that was copied while the container runs: the parent of what comes
    from now on. Where the target refuses, it has forgotten what came since the last of these.
    """


class Prepare(Message):
    """The image is complete: restore it, and hold it. From here on only the source may decide.

    translations: the old node's, of the container's connections.
    """

    translations: Translations = ()


class Commit(Message):
    """Let it run. migration: where no `Reserve` went before on this channel."""

    migration: str


class Abort(Message):
    """Forget it all; the answer is `unknown` then.

    final: the source runs on already. Otherwise it would like to, and a container that was told to run here
    goes on, which is the answer.
    """

    migration: str
    final: bool


class Question(Message):
    """How does the target stand?"""

    migration: str


class Forget(Message):
    """The source is gone and knows that its container runs: the migration is over."""

    migration: str


class Gone(Message):
    """A container that was away from its home, the node that is told, has ended."""

    migration: str


class Answer(Message):
    """All is well. standing: how the target stands now. warnings: sentences. times_ms: phase to ms.

    via: addresses by which others route to its pods. leads: to `Reserve`, it will see what the
    container sends; an older one does not say.
    """

    standing: Standing
    warnings: tuple[str, ...] = ()
    times_ms: dict[str, float] = {}
    via: tuple[str, ...] = ()
    leads: bool = False


class Refusal(Message):
    """It cannot be done; the target is as it was before the question, or has undone everything.

    lost: it has not got the container, and never let it run: nobody will by this migration. Otherwise it may
    well run there.
    """

    cause: str
    lost: bool = False


class Busy(Message):
    """Still at work: said every second before an answer."""


Said = (
    Hello
    | Reserve
    | Expect
    | Send
    | Parent
    | Prepare
    | Commit
    | Abort
    | Question
    | Forget
    | Gone
    | Answer
    | Refusal
    | Busy
)
