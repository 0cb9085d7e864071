"""Tests with the packages that people train with; run by `make test-integrations`, offline.

Not collected by `pytest` alone: they need the extra `integrations`, in an environment of its own.
Warnings of other packages are theirs; those of stiefel_opt are errors here, too.
"""

from __future__ import annotations

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}

import pytest
import torch

WITHOUT_OPERATORS = False  # whether torchvision had to do without its compiled part

try:
    import torchvision
except RuntimeError:
    # torchvision was built for another variant of this torch (for CUDA, where torch is for the CPU)
    # and cannot load its compiled operators. A vision transformer of timm uses none of them, but
    # the import wants these two to be declared.
    for operator in ("nms", "qnms"):
        signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{operator}", signature)
    import torchvision  # noqa: F401

    WITHOUT_OPERATORS = True


def pytest_report_header() -> list[str]:
    if WITHOUT_OPERATORS:
        return ["torchvision: no build for this torch; timm runs without its compiled operators"]
    return []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.filterwarnings("error:.*off the manifold"))
            item.add_marker(pytest.mark.filterwarnings("error::stiefel_opt.LostTagWarning"))
            item.add_marker(pytest.mark.filterwarnings("error:::stiefel_opt"), append=False)
            item.add_marker(pytest.mark.filterwarnings("default"), append=False)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
