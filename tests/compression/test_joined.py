# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Networks with skip connections: what is cut together, and that nothing else changes."""

import copy
import sys

import pytest
import torch
from torch import nn

from pyro_radial import AutoMeanField, AutoRadialDirectional, BayesianModule, SupervisedModel
from pyro_radial.compression import count_flops, count_weights, cut_path, mean_network, prune
from pyro_radial.compression.joined import JoinedChannels
from pyro_radial.compression.scores import Cut, Scores
from pyro_radial.nn import likelihoods
from pyro_radial.nn.priors import RadialDirectionalPrior

pytest.importorskip("torch_pruning")


class Residual(nn.Module):
    """A stem, a block beside the identity, and a block beside a convolution; softplus is not zero at zero."""

    def __init__(self):
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.a, self.a_norm = nn.Conv2d(4, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.b, self.b_norm = nn.Conv2d(5, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.c, self.slopes = nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.PReLU(6)
        self.d, self.beside = nn.Conv2d(6, 6, 1), nn.Conv2d(4, 6, 1, stride=2)
        self.head = nn.Linear(6 * 9, 3)

    def forward(self, x):
        x = nn.functional.softplus(self.stem_norm(self.stem(x)))
        inner = nn.functional.softplus(self.a_norm(self.a(x)))
        x = nn.functional.softplus(x + self.b_norm(self.b(inner)))
        x = self.d(self.slopes(self.c(x))) + self.beside(x)
        return self.head(torch.flatten(x.sigmoid(), 1))


class Dense(nn.Module):
    """Two layers whose outputs join what they read, a transition with a pool, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(7), nn.BatchNorm2d(9)])
        self.first, self.second = nn.Conv2d(4, 3, 3, padding=1), nn.Conv2d(7, 2, 3, padding=1)
        self.transition, self.head = nn.Conv2d(9, 4, 1), nn.Linear(4, 3)

    def forward(self, x):
        x = self.stem(x)
        for norm, layer in zip(self.norms, (self.first, self.second), strict=False):
            x = torch.cat([x, layer(nn.functional.softplus(norm(x)))], 1)
        x = nn.functional.avg_pool2d(self.transition(nn.functional.softplus(self.norms[2](x))), 2)
        return self.head(x.mean((2, 3)))


# Written by hand: the outputs that go together, and where layers read them: the first input of channel 0, and how many
# inputs a channel has.
GROUPS = {
    Residual: [
        (["stem", "b"], {"a": (0, 1), "c": (0, 1), "beside": (0, 1)}),
        (["a"], {"b": (0, 1)}),
        (["c"], {"d": (0, 1)}),
        (["d", "beside"], {"head": (0, 9)}),
    ],
    Dense: [
        (["stem"], {"first": (0, 1), "second": (0, 1), "transition": (0, 1)}),
        (["first"], {"second": (4, 1), "transition": (4, 1)}),
        (["second"], {"transition": (7, 1)}),
        (["transition"], {"head": (0, 1)}),
    ],
}
X = torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def trained_like(kind, seed=0):
    """Odd statistics and affine maps, as after training."""
    torch.manual_seed(seed)
    net = kind().double().eval()
    for name, tensor in net.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + 0.5 if "var" in name else torch.randn_like(tensor))
    return net


def random_masks(joined, kind, seed):
    generator = torch.Generator().manual_seed(seed)
    masks = {}
    for outputs, _ in GROUPS[kind]:
        (root,) = (name for name in outputs if name in joined.groups)
        mask = torch.rand(joined.sizes[root][0], generator=generator) < 0.6
        mask[int(torch.randint(len(mask), (), generator=generator))] = True
        masks[root] = mask
    return masks


def reading_zeros(net, kind, masks):
    """The network with hooks that set the channels that are cut to zero where layers read them."""
    net = copy.deepcopy(net)
    for outputs, readers in GROUPS[kind]:
        (mask,) = (masks[name] for name in outputs if name in masks)
        for name, (start, positions) in readers.items():
            gone = ~mask.repeat_interleave(positions)

            def zero(module, inputs, start=start, gone=gone):
                x = inputs[0].clone()
                x[:, start : start + len(gone)][:, gone] = 0
                return x

            net.get_submodule(name).register_forward_pre_hook(zero)
    return net


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", GROUPS)
def test_a_cut_gives_the_outputs_of_the_network_whose_layers_read_zeros(kind, seed):
    net = trained_like(kind, seed)
    joined = JoinedChannels(net, X[:2])
    masks = random_masks(joined, kind, seed)
    small, zeroed = joined.cut(Cut(masks)), reading_zeros(net, kind, masks)
    torch.testing.assert_close(small(X), zeroed(X), rtol=1e-10, atol=1e-10)
    for outputs, _ in GROUPS[kind]:
        widths = {small.get_submodule(name).out_channels for name in outputs}
        assert widths == {int(next(masks[name] for name in outputs if name in masks).sum())}
    # Also while training, where batch norms have the statistics of the batch.
    torch.testing.assert_close(small.train()(X), zeroed.train()(X), rtol=1e-10, atol=1e-10)


class Mixed(nn.Module):
    """Channels that are concatenated and added to others."""

    def __init__(self):
        super().__init__()
        self.p, self.q, self.beside = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(2, 2, 1), nn.Conv2d(2, 5, 1)
        self.norm, self.last, self.head = nn.BatchNorm2d(5), nn.Conv2d(5, 4, 1), nn.Linear(4 * 36, 3)

    def joined(self, x):
        return torch.cat([self.p(x).sigmoid(), self.q(x)], 1) + self.beside(x)

    def forward(self, x):
        return self.head(self.last(self.norm(self.joined(x)).cos()).tanh().flatten(1))


class MixedAndFlat(Mixed):
    """Torch-Pruning takes the width after the flatten for that of the concatenation."""

    def __init__(self):
        super().__init__()
        self.norm, self.last, self.head = nn.BatchNorm1d(5 * 36), nn.Linear(5 * 36, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.last(self.norm(self.joined(x).flatten(1)).cos()).tanh())


@pytest.mark.parametrize("seed", range(5))
def test_concatenated_channels_that_are_added_to_others_are_cut_with_them(seed):
    net, generator = trained_like(Mixed, seed), torch.Generator().manual_seed(seed)
    joined = JoinedChannels(net, X[:2])
    assert joined.groups.keys() in ({"beside", "last"}, {"p", "q", "last"})
    masks = {
        name: torch.rand(sizes[0], generator=generator) < 0.6
        for name, sizes in joined.sizes.items()
        if name in joined.groups
    }
    for mask in masks.values():
        mask[0] = True
    small, zeroed = joined.cut(Cut(masks)), copy.deepcopy(net)
    together = masks["beside"] if "beside" in masks else torch.cat([masks["p"], masks["q"]])
    zeroed.last.weight.data[:, ~together] = 0
    zeroed.head.weight.data[:, ~masks["last"].repeat_interleave(36)] = 0
    torch.testing.assert_close(small(X), zeroed(X), rtol=1e-10, atol=1e-10)
    assert small.p.out_channels + small.q.out_channels == small.beside.out_channels == int(together.sum())


@pytest.mark.parametrize("kind", GROUPS)
def test_groups_are_what_additions_join_and_concatenations_do_not(kind):
    joined = JoinedChannels(trained_like(kind), X[:2])
    found = {
        frozenset(n for n, side, *_ in members if side == 0 and n in dict(GROUPS_BY_NAME[kind]))
        for members in joined.groups.values()
    }
    assert found == {frozenset(outputs) for outputs, _ in GROUPS[kind]}


GROUPS_BY_NAME = {kind: [(name, 0) for outputs, _ in groups for name in outputs] for kind, groups in GROUPS.items()}


def test_neither_the_network_nor_its_settings_change():
    net = trained_like(Residual).train()
    net.stem.weight.requires_grad_(False)
    net.a_norm.eval()
    before = copy.deepcopy(net.state_dict())
    joined = JoinedChannels(net, X[:2])
    small = joined.cut(Cut({"a": torch.arange(5) < 2}))
    for tensor in (*small.parameters(), *small.buffers()):
        tensor.data.fill_(7)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert not small.stem.weight.requires_grad
    assert small.a.weight.requires_grad
    assert (small.training, small.a_norm.training, small.a_norm.num_features) == (True, False, 2)
    assert type(small) is Residual


def test_joined_channels_have_one_score():
    joined = JoinedChannels(trained_like(Residual), X[:2])
    (root,) = {"stem", "b"} & joined.groups.keys()
    stem, b = torch.tensor([0.0, 5.0, 2.0, -1.0]), torch.tensor([3.0, 4.0, 1.0, -2.0])
    assert joined.pool(Scores({"stem": stem, "b": b})).outputs[root].tolist() == [3, 5, 2, -1]
    uses = {"a": torch.tensor([0.0, 9.0, 0.0, 0.0]), "beside": torch.tensor([1.0, 0.0, 0.0, 7.0])}
    assert joined.pool(Scores(inputs=uses)).outputs[root].tolist() == [1, 9, 0, 7]
    # Of both sides the smaller one, as for a unit of a chain.
    assert joined.pool(Scores({"stem": stem, "b": b}, uses)).outputs[root].tolist() == [1, 5, 0, -1]


def test_concatenated_channels_take_the_scores_of_their_own_inputs():
    joined = JoinedChannels(trained_like(Dense), X[:2])
    pooled = joined.pool(Scores(inputs={"transition": torch.arange(9.0)})).outputs
    assert {name: values.tolist() for name, values in pooled.items()} == {
        "stem": [0, 1, 2, 3],
        "first": [4, 5, 6],
        "second": [7, 8],
    }


def test_a_group_has_scores_only_if_all_its_channels_have():
    joined = JoinedChannels(trained_like(Mixed), X[:2])
    p, q, last = torch.tensor([2.0, 0.0, 1.0]), torch.tensor([4.0, 3.0]), torch.arange(4.0)
    assert joined.pool(Scores({"p": p, "last": last})).outputs.keys() == {"last"}
    pooled = joined.pool(Scores({"p": p, "q": q})).outputs
    assert pooled["beside"].tolist() == [2, 0, 1, 4, 3]


class Around(nn.Module):
    def __init__(self, inner, after=None):
        super().__init__()
        self.inner, self.after = inner, after or nn.Identity()

    def forward(self, x):
        return self.after(x + self.inner(x))


def test_what_reaches_inputs_and_outputs_stays():
    hidden = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
    joined = JoinedChannels(Around(hidden), torch.randn(2, 3))
    assert [*joined.groups] == ["inner.0"]
    joined = JoinedChannels(nn.Sequential(nn.Linear(2, 3), Around(hidden)), torch.randn(2, 2))
    assert [*joined.groups] == ["1.inner.0"]


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv1d(1, 4, 1), nn.Linear(4, 2)

    def forward(self, x):
        return self.b(self.a(x).mean(2).view(-1, 4))


class LoneWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.zeros(3)), nn.Linear(3, 3)

    def forward(self, x):
        return self.inner(x) + self.weight


@pytest.mark.parametrize(
    ("net", "shape", "message"),
    [
        (
            Around(nn.Sequential(nn.Linear(3, 4), nn.Softmax(1), nn.Linear(4, 3))),
            (3,),
            "not mix the channels of 'inner.0'",
        ),
        (Views(), (1, 3), "must not mix the channels of 'a'"),
        (MixedAndFlat(), (2, 6, 6), "must not mix the channels of 'beside', .* out of bounds"),
        (Around(nn.LSTM(3, 3)), (3,), "must hold tensors in known layers only, got LSTM at 'inner'"),
        (Around(nn.Linear(3, 3), nn.LayerNorm(3)), (3,), "got LayerNorm at 'after'"),
        (LoneWeight(), (3,), "got LoneWeight at ''"),
        (Around(nn.Conv2d(2, 2, 1, groups=2)), (2, 4, 4), "groups=1 in the Conv2d 'inner'"),
        (Around(nn.Linear(2, 3)), (3,), "net must give an output for x that Torch-Pruning can trace, got RuntimeError"),
        (Around(nn.Linear(3, 3), nn.Unflatten(1, (3,))), (), "net must give an output for x"),
        (nn.Sequential(nn.ReLU()), (3,), "must hold a linear layer or a convolution"),
    ],
)
def test_networks_that_cannot_be_cut_are_refused_by_name(net, shape, message):
    with pytest.raises(ValueError, match=message):
        JoinedChannels(net, torch.randn(2, *shape))


def test_the_library_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(
        ImportError,
        match=r"skip connections need Torch-Pruning: pip install 'pyro-radial\[pruning\]'",
    ):
        JoinedChannels(Residual(), torch.randn(2, 2, 6, 6))


def test_counts_follow_skip_connections_and_repeated_calls():
    net = Residual()
    assert count_weights(net).by_layer["head"] == 6 * 9 * 3
    assert count_flops(net, (2, 6, 6)).by_layer["beside"] == (4 + 1) * 6 * 9
    assert count_flops(net, (2, 6, 6)).by_layer["stem"] == (2 * 9 + 1) * 4 * 36

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            return self.inner(self.inner(x))

    assert (count_weights(Twice()).total, count_flops(Twice(), (3,)).total) == (9, 24)


def rows(number, seed):
    """Four classes: which quarter of the image is bright."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (number,), generator=generator)
    x = 0.5 * torch.randn(number, 1, 4, 4, generator=generator)
    for row, label in enumerate(y):
        x[row, 0, 2 * (label // 2) :, 2 * (label % 2) :][:2, :2] += 1.0
    return x, y


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.a, self.b, self.b_norm = nn.Conv2d(6, 7, 3, padding=1), nn.Conv2d(7, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.head = nn.Linear(6 * 16, 4)

    def forward(self, x):
        x = self.stem_norm(self.stem(x)).relu()
        return self.head((x + self.b_norm(self.b(self.a(x).relu()))).relu().flatten(1))


@pytest.fixture(scope="module")
def trained():
    """A residual network that fits, with a guide of rows and one of directions of columns; its statistics are off."""
    torch.manual_seed(0)
    net, (x, y) = Small(), rows(400, 0)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        net.stem_norm.running_mean += 10.0
    found = {}
    for name, family, prior in (
        ("rows", AutoMeanField, None),
        ("columns", AutoRadialDirectional, RadialDirectionalPrior("column")),
    ):
        model = SupervisedModel(BayesianModule(net, prior) if prior else BayesianModule(net), likelihoods.Categorical())
        guide = family(model)
        guide.setup(x, y)
        found[name] = model, guide
    return found


def error(net, data):
    return 100 * float((net.eval()(data[0]).argmax(-1) != data[1]).double().mean())


@pytest.mark.parametrize("side", ["rows", "columns"])
@pytest.mark.parametrize("tolerance", [0.0, 10.0, 100.0])
def test_a_residual_network_is_pruned_within_the_tolerance(trained, side, tolerance):
    model, guide = trained[side]
    validation = rows(1_500, 1)
    result = prune(model, guide, validation, tolerance, num_cuts=8)
    assert result.network.training
    assert result.record.loss == pytest.approx(error(result.network, validation))
    assert result.record.loss <= result.path[0].loss + tolerance + 1e-9
    assert result.record.weights == count_weights(result.network).total
    assert result.path[0].weights == count_weights(mean_network(model.bnn, guide)).total
    assert result.network.stem.out_channels == result.network.b.out_channels >= 1
    assert result.network.a.out_channels == result.network.b.in_channels >= 1
    if tolerance == 100:
        assert (result.network.stem.out_channels, result.network.a.out_channels) == (1, 1)


def test_batch_norms_get_the_statistics_of_the_network_that_is_left(trained):
    model, guide = trained["rows"]
    validation = rows(300, 1)
    assert error(mean_network(model.bnn, guide), validation) > 40  # by the statistics of the network as it was
    result = prune(model, guide, validation, 0.0, num_cuts=4)
    assert result.path[0].loss < 15
    signal = result.network.stem(validation[0])
    torch.testing.assert_close(result.network.stem_norm.running_mean, signal.mean((0, 2, 3)), rtol=1e-4, atol=1e-4)


def test_dropouts_do_not_make_results_random():
    torch.manual_seed(0)
    x, y = torch.randn(60, 4), torch.arange(60) % 2
    net = nn.Sequential(nn.Linear(4, 30), nn.Dropout(0.5), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 2))
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical())
    guide = AutoMeanField(model)
    guide.setup(x, y)
    before = torch.get_rng_state()
    results = []
    for seed in range(4):
        torch.manual_seed(seed)
        results.append(prune(model, guide, (x, y), 5.0, num_cuts=6))
        assert error(results[-1].network, (x, y)) == pytest.approx(results[-1].record.loss)
    assert all([r.loss for r in result.path] == [r.loss for r in results[0].path] for result in results)
    torch.set_rng_state(before)
    prune(model, guide, (x, y), 5.0, num_cuts=6)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_path_leaves_each_group_a_channel():
    joined = JoinedChannels(trained_like(Dense), X[:2])
    path = cut_path(joined.pool(Scores(inputs={"transition": torch.arange(9.0)})))
    small = joined.cut(path[-1])
    assert (small.stem.out_channels, small.first.out_channels, small.second.out_channels) == (1, 1, 1)
    assert small.transition.in_channels == 3
