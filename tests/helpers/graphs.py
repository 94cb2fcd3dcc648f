# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A loss by graphs, as a function of the arguments."""

from benchmarks.guides._examples.program import Program, evaluated
from pyro_radial.infer.step.loss_evaluation import AS_IT_IS
from pyro_radial.infer.step.loss_graphs import Graphs


class Graphed:
    """Returns the loss, and each parameter with its gradient."""

    def __init__(self, model, guide, loss, *, compile_after=None, **settings):
        self.model, self.guide, self.loss = model, guide, loss
        self.graphs = Graphs(**settings)
        self.graphs.compile_after = compile_after
        self.latest = None

    def __call__(self, args, kwargs=None, *, gradients=True):
        assert not kwargs
        self.latest = evaluated(Program(self.model, self.guide, self.loss, args), self.graphs, gradients=gradients)
        return self.latest.loss, self.latest.parameters_with_gradients()

    @property
    def recordings(self):
        return self.graphs.recordings

    @property
    def eager_reasons(self):
        return self.graphs.eager_reasons

    @property
    def parameters(self):
        return self.latest.parameters

    @property
    def replayed(self):
        return self.latest.mode != AS_IT_IS
