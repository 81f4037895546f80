"""What of HGP's schemas can really travel (torch-free)."""

from __future__ import annotations

from fcil_adapters.contract import BackboneInfo, Largest, TaskInfo
from fcil_adapters.methods.hgp.options import HgpHparams


def largest(h: HgpHparams, _backbone: BackboneInfo, task: TaskInfo, _clients: int) -> Largest:
    """Return that a full covariance is a triangle or a factor, which is never the larger."""
    if h.cov != "full":
        return Largest()
    return Largest({"rows": 0, "tall": len(task.classes)})
