from benchmark_utils import Problem, orthonormal
from benchopt import BaseDataset


class Dataset(BaseDataset):
    """Diagonalise ten 20 x 20 matrices at once, that share eigenvectors."""

    name = "Joint diagonalisation"
    parameters = {"seed": [0]}
    requirements = ["pip::torch"]

    def get_data(self):
        import torch

        generator = torch.Generator().manual_seed(self.seed)
        shared, start = (orthonormal(20, 20, generator) for _ in range(2))
        values = torch.randn(10, 1, 20, generator=generator, dtype=torch.float64)
        matrices = shared * values @ shared.T

        def loss(constrained, plain, step):
            (x,) = constrained
            turned = x.T @ matrices @ x
            return turned.square().sum() - turned.diagonal(dim1=1, dim2=2).square().sum()

        return {"problem": Problem(loss, [start], steps=150, minimum=0.0)}
