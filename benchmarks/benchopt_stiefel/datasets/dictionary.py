from benchmark_utils import Problem, orthonormal
from benchopt import BaseDataset


class Dataset(BaseDataset):
    """A complete dictionary of 32 atoms from 1,000 sparse signals: the fourth power, maximised."""

    name = "Dictionary"
    parameters = {"seed": [0]}
    requirements = ["pip::torch"]

    def get_data(self):
        import torch

        generator = torch.Generator().manual_seed(self.seed)
        atoms, start = (orthonormal(32, 32, generator) for _ in range(2))
        codes = torch.randn(1000, 32, generator=generator, dtype=torch.float64)
        used = torch.rand(1000, 32, generator=generator, dtype=torch.float64) < 0.2
        signals = (codes * used) @ atoms.T

        def loss(constrained, plain, step):
            return -(signals @ constrained[0]).pow(4).mean(0).sum()

        return {"problem": Problem(loss, [start], steps=40)}
