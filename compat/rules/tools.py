"""The programs that restore: CRIU and runsc."""

from __future__ import annotations

from collections.abc import Iterator

from compat.rules.case import Case, finding, rule, version
from engines.api import Finding

# Kernel release to the first CRIU that works on it.
_CRIU_SINCE = (
    (
        (6, 16),
        (4, 2),
        "TCP and UDP sockets refuse SO_PASSCRED, which older CRIUs ask for at each dump",
    ),
    ((6, 13), (4, 1), "the vDSO has another shape, which older CRIUs do not know"),
)
_IMAGE_VERSIONS = frozenset({"1", "2"})
_GUARDS = _DROPPABLE = _OWN_READERS = (4, 2)


def _criu(case: Case) -> tuple[int, ...] | None:
    """The version of the node's CRIU, None if the image is none of its or nobody tells."""
    text = case.node.tools.get("criu") if case.needs.engine in {"criu", "criu-cuda"} else None
    return version(text) if text else None


@rule("image.damaged", about="node", source="sizes in the manifest; a restore compares all of the content")
def damaged(case: Case) -> Iterator[Finding]:
    """Each file of the image must be there, as long as it was. Copy or import the image again, or take the
    checkpoint again.
    """
    if case.origin.damage:
        yield finding(
            "image.damaged",
            "refuse",
            f"the image is damaged: {case.origin.damage}",
            "copy or import the image again, or take the checkpoint again",
        )


@rule("criu.absent", about="node", source="the node's profile: `criu check` is run there")
def absent(case: Case) -> Iterator[Finding]:
    """An image of CRIU needs a CRIU that works on the node's kernel. Install it (torpor toolchain)."""
    if case.needs.engine not in {"criu", "criu-cuda"}:
        return
    node = case.node
    if node.criu_works is False:
        yield finding(
            "criu.absent",
            "refuse",
            f"the CRIU of {case.where()} does not work there: {node.unknown.get('criu_works', 'criu check')}",
            "install a CRIU that knows this kernel (torpor toolchain install)",
        )
        return
    if "criu" in node.tools:
        return
    if not node.tools or "tools.criu" in node.unknown:
        yield from case.untold("criu.absent", "tools.criu", "the image needs a CRIU")
        return
    yield finding(
        "criu.absent",
        "refuse",
        f"{case.where()} has no CRIU",
        "install it there (torpor toolchain install), and make the profile again",
    )


@rule("criu.kernel", about="node", source="measured with 3.17.1, 4.1.1 and 4.2.1; CRIU threads on 6.13, 6.16")
def kernel(case: Case) -> Iterator[Finding]:
    """Kernels change under CRIU: from 6.13 on it must be 4.1, from 6.16 on 4.2 if there are TCP or UDP
    sockets. Install a newer CRIU: torpor toolchain install.
    """
    criu, release = _criu(case), version(case.node.kernel)[:2]
    if criu is None:
        return
    if not criu or len(release) < 2:
        what = (
            f"its CRIU is '{case.node.tools['criu']}'" if not criu else f"its kernel is '{case.node.kernel}'"
        )
        yield finding(
            "criu.kernel",
            "unknown",
            f"{what} on {case.where()}, and whether they go together nobody knows",
            "look at what `criu --version` and `uname -r` say there, and make the profile again",
        )
        return
    for since, wanted, why in _CRIU_SINCE:
        if release < since or criu >= wanted:
            continue
        at_dump = since == (6, 16)
        if at_dump and not case.needs.sockets:
            continue
        words = ".".join(map(str, wanted))
        yield finding(
            "criu.kernel",
            "warn" if at_dump else "refuse",
            f"{case.where()} has kernel {case.node.kernel} and CRIU {case.node.tools['criu']}: {why}"
            + ("; it restores, but is not checkpointed again there" if at_dump else ""),
            f"install CRIU {words} or later there",
        )


@rule("criu.image", about="node", source="CRIU, image.c; VMA status bits of 4.2; measured: 4.2.1 to 4.1.1")
def image(case: Case) -> Iterator[Finding]:
    """What a newer CRIU writes an older one may not know. Restore with the release that made the image, or a
    later one.
    """
    if case.needs.engine not in {"criu", "criu-cuda"}:
        return
    remedy = "restore with the CRIU that made the image, or a later one"
    if case.needs.image_version not in _IMAGE_VERSIONS:
        yield finding(
            "criu.image",
            "unknown",
            f"the image has format {case.needs.image_version}, which is not known here",
            remedy,
        )
    made_by = case.dump_host.tools.get("criu", "") if case.dump_host else ""
    criu, had = _criu(case), version(made_by)
    if not criu:
        return  # criu.absent or criu.kernel says so
    if case.needs.guard_pages and criu < _GUARDS:
        yield finding(
            "criu.image",
            "refuse",
            f"the image has guard pages, which CRIU {case.node.tools['criu']} of {case.where()} does not "
            "know",
            "install CRIU 4.2 or later there",
        )
    elif case.needs.droppable_mappings and criu < _DROPPABLE:
        yield finding(
            "criu.image",
            "warn",
            f"the image has droppable mappings, which CRIU {case.node.tools['criu']} of {case.where()} makes "
            "plain ones: a fork would repeat random numbers",
            "install CRIU 4.2 or later there",
        )
    elif not had:
        yield finding(
            "criu.image",
            "unknown",
            f"nobody recorded which CRIU made the image, and a newer one than {case.node.tools['criu']} of "
            f"{case.where()} may have",
            remedy,
        )
    elif criu[:2] < had[:2]:
        yield finding(
            "criu.image",
            # "vdso: ELF header magic mismatch": older ones expect the vDSO's pages in the image.
            "refuse" if criu < _OWN_READERS <= had else "unknown",
            f"CRIU {made_by} made the image, {case.where()} has the older {case.node.tools['criu']}",
            remedy,
        )


@rule("gvisor.release", about="node", source="the engine judges so too: other releases fail late")
def runsc(case: Case) -> Iterator[Finding]:
    """A release of runsc restores its own images only. Restore with the one that made the image. (On this
    node the engine itself compares, and platform, overlay and network too.)
    """
    if case.needs.engine != "gvisor" or case.local:
        return
    here = case.node.tools.get("runsc")
    if here is None:
        known = bool(case.node.tools) and "tools.runsc" not in case.node.unknown
        yield finding(
            "gvisor.release",
            "refuse" if known else "unknown",
            f"{case.where()} has no runsc" if known else f"nobody knows which runsc {case.where()} has",
            f"install runsc {case.needs.image_version} there",
        )
    elif _release(here) != _release(case.needs.image_version):
        yield finding(
            "gvisor.release",
            "refuse",
            f"runsc {case.needs.image_version} made the image, {case.where()} has {here}",
            f"restore with runsc {case.needs.image_version}",
        )


def _release(text: str) -> tuple[int, ...]:
    return version(text.removeprefix("release-"))
