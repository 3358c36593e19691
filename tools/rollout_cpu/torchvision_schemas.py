"""Lets the package index's torchvision, which is built for CUDA, be imported beside a CPU build of torch.

Its operators then fail to load, which it tolerates, but it goes on to register fake kernels for two of them,
which needs their schemas. torch calls `declare` at the end of its own import, as it does for every backend.
"""

from importlib.metadata import version

import torch

SCHEMAS = [
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
]
_library = torch.library.Library("torchvision", "FRAGMENT")  # the schemas live as long as it does


def declare() -> None:
    if torch.version.cuda is None and "+cpu" not in version("torchvision"):
        for schema in SCHEMAS:
            _library.define(schema)
