# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import torch
from torch import nn

from pyro_radial import AutoRadial, TermsELBO
from tests.helpers.graphs import Graphed
from tests.helpers.networks import classifier, data

X, Y = data(8)


class Attending(nn.Module):
    """A transformer's layer over three tokens of four numbers, with dropout."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(3, 12)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
        self.head = nn.Linear(12, 2)

    def forward(self, x):
        return self.head(self.layer(self.lift(x).unflatten(-1, (3, 4))).flatten(1))


def graphed_attention():
    """Return a network with attention, its guide, and their loss, compiled at its first use."""
    torch.manual_seed(0)
    model = classifier(net=Attending())
    guide = AutoRadial(model)
    guide.setup(X, Y)
    return model, guide, Graphed(model, guide, TermsELBO(), compile_after=0)


def test_a_compiler_gets_no_random_numbers_to_draw_and_the_check_sees_the_same(recorded_only):
    _, _, loss = graphed_attention()
    # A refusal by the check would warn.
    losses = {float(loss((X, Y))[0]) for _ in range(4)}
    assert len(losses) == 4
    (module,) = recorded_only
    seeded = torch.Tag.nondeterministic_seeded
    assert not [node for node in module.graph.nodes if seeded in getattr(node.target, "tags", ())]


def test_compiled_noise_on_a_cpu_is_that_of_the_program(recorded_only):
    model, guide, loss = graphed_attention()
    loss((X, Y))
    torch.manual_seed(5)
    replayed = loss((X, Y))[0]
    torch.manual_seed(5)
    torch.testing.assert_close(replayed, TermsELBO()(model, guide)(X, Y).detach())
