import torch

from rollart.backends.trainers.muon import Muon, orthogonal


def test_directions_are_nearly_orthogonal_and_the_same_as_before():
    for shape in ((3, 8, 8), (2, 6, 20), (2, 20, 6)):
        matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        made = orthogonal(matrices)
        singular = torch.linalg.svdvals(made)
        assert singular.max() < 1.3
        assert singular.median() > 0.6
        left, _, right = torch.linalg.svd(matrices, full_matrices=False)
        along = torch.einsum("nij,nij->n", made, left @ right) / singular.sum(-1)
        assert along.min() > 0.99


def test_it_goes_down_where_the_gradient_points():
    """A matrix is pulled towards another one; several shapes at once, one of them without a gradient."""
    torch.manual_seed(0)
    target = torch.randn(6, 10)
    pulled, tall, idle = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((6, 10), (10, 6), (6, 10)))
    muon = Muon([pulled, tall, idle])
    for step in range(200):
        loss = ((pulled - target) ** 2).sum() + ((tall - target.T) ** 2).sum()
        loss.backward()
        muon.step(0.1 * (1 - step / 200))
        pulled.grad = tall.grad = None
    assert float(loss.detach()) < 0.05 * 2 * float((target**2).sum())
    assert not idle.any()
