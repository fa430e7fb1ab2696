"""GPUs: `compat.gpus` compares, this names the rules."""

from __future__ import annotations

from collections.abc import Iterator

from compat.rules.case import Case, finding, rule
from engines.api import Finding


@rule(
    *("gpu.driver", "gpu.count", "gpu.model", "gpu.place", "gpu.memory", "gpu.mig"),
    about="node",
    source="NVIDIA's checkpoint API: same driver or later, as many GPUs of each model, in the same order",
)
def gpus(case: Case) -> Iterator[Finding]:
    """Memory of GPUs goes back to as many GPUs of the same models, under the same driver or a later one; to
    others than those of the dump from driver 580 on. Restore on a node with such GPUs.
    """
    if not case.needs.gpus:
        return
    from compat import gpus as compare  # few images need it

    node = None
    if not case.local:
        if case.node.gpus is None or case.node.gpu_driver is None:
            yield from case.untold("gpu.driver", "gpus", "the image has memory of GPUs")
            return
        if not case.node.gpu_driver:
            yield finding(
                "gpu.driver",
                "refuse",
                f"the image has memory of GPUs, and {case.where()} has no GPU driver",
                "restore on a node with such GPUs",
            )
            return
        node = compare.NodeGpus(driver=case.node.gpu_driver, gpus=case.node.gpus)
    yield from compare.check(case.needs, case.new, node)
