from benchmark_utils import Problem, batch_of, orthonormal
from benchopt import BaseDataset


class Dataset(BaseDataset):
    """Digits by a perceptron, all or one of its matrices constrained, or row by row by an RNN."""

    name = "Digits"
    parameters = {"network": ["all", "hidden", "recurrent"], "seed": [0]}
    requirements = ["pip::torch", "pip::scikit-learn"]

    def get_data(self):
        import torch
        from sklearn.datasets import load_digits

        data = load_digits()
        order = torch.randperm(len(data.data), generator=torch.Generator().manual_seed(9))
        train = (torch.from_numpy(data.data).float() / 8 - 1)[order[:1400]]
        labels = torch.from_numpy(data.target).long()[order[:1400]]
        generator = torch.Generator().manual_seed(self.seed)

        def weight(n, m):
            return orthonormal(n, m, generator, torch.float32)

        def free(n, m):
            return torch.randn(n, m, generator=generator) / m**0.5

        if self.network == "all":
            constrained = [weight(64, 64), weight(64, 64), weight(64, 10)]
            plain = [torch.zeros(64), torch.zeros(64), torch.full((1,), 3.0)]
        elif self.network == "hidden":
            constrained = [weight(64, 64)]
            plain = [free(64, 64), free(10, 64), torch.zeros(64), torch.zeros(64)]
        elif self.network == "recurrent":
            constrained = [weight(48, 48)]
            plain = [free(48, 8), free(10, 48), torch.zeros(48)]
        else:
            raise ValueError(f"network must be all, hidden or recurrent, got {self.network!r}")

        def logits(constrained, plain, x):
            if self.network == "all":
                first, second, last = constrained
                x = torch.relu(x @ first + plain[0])
                return plain[2] * (torch.relu(x @ second + plain[1]) @ last)
            if self.network == "hidden":
                x = torch.relu(x @ plain[0].T + plain[2])
                return torch.relu(x @ constrained[0] + plain[3]) @ plain[1].T
            state = torch.zeros(len(x), 48)
            for row in x.unflatten(1, (8, 8)).unbind(1):
                state = torch.tanh(state @ constrained[0] + row @ plain[0].T + plain[2])
            return state @ plain[1].T

        def loss(constrained, plain, step):
            chosen = slice(None) if step is None else batch_of(1400, 50, step, self.seed)
            answers = logits(constrained, plain, train[chosen])
            return torch.nn.functional.cross_entropy(answers, labels[chosen])

        return {"problem": Problem(loss, constrained, plain, steps=56, scaled=False)}
