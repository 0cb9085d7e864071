from benchmark_utils import Problem, orthonormal
from benchopt import BaseDataset


class Dataset(BaseDataset):
    """|A X - A Y|^2 for a planted Y, 100 x 20, singular values of A from 1 to 1/1000."""

    name = "Procrustes"
    parameters = {"seed": [0]}
    requirements = ["pip::torch"]

    def get_data(self):
        import torch

        generator = torch.Generator().manual_seed(self.seed)
        values = torch.logspace(0, -3, 100, dtype=torch.float64)
        matrix = values[:, None] * orthonormal(100, 100, generator)
        planted, start = (orthonormal(100, 20, generator) for _ in range(2))

        def loss(constrained, plain, step):
            return (matrix @ (constrained[0] - planted)).square().sum()

        return {"problem": Problem(loss, [start], steps=200, minimum=0.0)}
