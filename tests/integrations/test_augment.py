"""Augmentation of images by torchvision, with the random numbers of a run."""

import pytest
import torch

from benchmarks.common import images as image_files


def test_auto_augment_draws_from_the_generator_alone() -> None:
    pytest.importorskip("torchvision")
    images = torch.randint(20, 200, (60, 3, 32, 32), dtype=torch.uint8)

    def augmented(seed: int) -> torch.Tensor:
        return image_files.auto_augment(images, torch.Generator().manual_seed(seed))

    before = torch.get_rng_state()
    found = augmented(3)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.dtype == torch.uint8
    assert found.shape == images.shape
    assert torch.equal(augmented(3), found)
    assert not torch.equal(augmented(4), found)
    changed = (found != images).flatten(1).any(1)
    assert 0.5 < changed.float().mean() < 1
