# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Variational autoencoders and other models with networks, and Gaussian processes."""

from functools import partial
from itertools import pairwise
from typing import Any

import pyro
import pyro.contrib.gp as gp
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.contrib.cevae import CEVAE, TraceCausalEffect_ELBO
from pyro.contrib.easyguide import EasyGuide
from pyro.distributions import constraints
from pyro.infer import Trace_ELBO, TraceEnum_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO, config_enumerate
from pyro.infer.autoguide import AutoNormal
from torch import Tensor, nn
from torch.nn.functional import softplus

from benchmarks.guides._examples.program import Program

PIXELS, CLASSES, LATENT, HIDDEN, BATCH = 100, 4, 8, 64, 64


def images() -> Tensor:
    """Binary pixels."""
    return (torch.rand(BATCH, PIXELS) < 0.3).float()


def mlp(*sizes: int) -> nn.Sequential:
    """Layers with softplus between."""
    layers = [part for i, o in pairwise(sizes) for part in (nn.Linear(i, o), nn.Softplus())]
    return nn.Sequential(*layers[:-1])


class Autoencoder(nn.Module):
    """An encoder and a decoder, perhaps of what is known besides."""

    def __init__(self, known: int = 0) -> None:
        super().__init__()
        self.encode = mlp(PIXELS + known, HIDDEN, 2 * LATENT)
        self.decode = mlp(LATENT + known, HIDDEN, PIXELS)
        self.classify = mlp(PIXELS, HIDDEN, CLASSES)

    def posterior(self, x: Tensor) -> Any:
        """The normal distribution of the code."""
        loc, log_scale = self.encode(x).chunk(2, -1)
        return dist.Normal(loc, log_scale.exp()).to_event(1)

    def model(self, x: Tensor) -> None:
        """Images from codes."""
        pyro.module("autoencoder", self)
        with pyro.plate("images", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(LATENT), 1.0).to_event(1))
            pyro.sample("x", dist.Bernoulli(logits=self.decode(z)).to_event(1), obs=x)

    def guide(self, x: Tensor) -> None:
        """Codes of images."""
        pyro.module("autoencoder", self)
        with pyro.plate("images", len(x)):
            pyro.sample("z", self.posterior(x))


def vae(loss: Any = Trace_ELBO) -> Program:
    """Pyro's first network."""
    net = Autoencoder()
    return Program(net.model, net.guide, loss(), (images(),))


class SemiSupervised(Autoencoder):
    """Images of classes, which are seen or summed over in the guide."""

    def __init__(self) -> None:
        super().__init__(CLASSES)

    def model(self, x: Tensor, y: Tensor | None = None) -> None:
        """Images from codes and classes."""
        pyro.module("semi", self)
        with pyro.plate("images", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(LATENT), 1.0).to_event(1))
            y = pyro.sample("y", dist.OneHotCategorical(x.new_ones(CLASSES) / CLASSES), obs=y)
            both = torch.cat(expanded(z, y), -1)
            pyro.sample("x", dist.Bernoulli(logits=self.decode(both)).to_event(1), obs=x)

    def guide(self, x: Tensor, y: Tensor | None = None) -> None:
        """Classes of images, and codes of both."""
        pyro.module("semi", self)
        with pyro.plate("images", len(x)):
            if y is None:
                y = pyro.sample("y", dist.OneHotCategorical(logits=self.classify(x)))
            pyro.sample("z", self.posterior(torch.cat(expanded(x, y), -1)))


def expanded(*parts: Tensor) -> list[Tensor]:
    """Tensors with the same batch shape."""
    shape = torch.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return [part.expand(*shape, part.shape[-1]) for part in parts]


def semi_supervised() -> Program:
    """Classes that are not seen."""
    net = SemiSupervised()
    guide = config_enumerate(net.guide, "parallel", expand=True)
    return Program(net.model, guide, TraceEnum_ELBO(max_plate_nesting=1), (images(),))


def labeled() -> Program:
    """Classes that are seen."""
    net = SemiSupervised()
    guide = config_enumerate(net.guide, "parallel", expand=True)
    y = torch.eye(CLASSES)[torch.randint(CLASSES, (BATCH,))]
    return Program(net.model, guide, TraceEnum_ELBO(max_plate_nesting=1), (images(), y))


class Completion(nn.Module):
    """The rest of images of which a quarter is seen; a fixed network makes the first guess."""

    def __init__(self, by_mask: bool) -> None:
        super().__init__()
        self.by_mask = by_mask
        self.prior, self.recognize = mlp(2 * PIXELS, HIDDEN, 2 * LATENT), mlp(2 * PIXELS, HIDDEN, 2 * LATENT)
        self.generate, self.guess = mlp(LATENT, HIDDEN, PIXELS), mlp(PIXELS, HIDDEN, PIXELS)

    def model(self, seen: Tensor, full: Tensor) -> None:
        """The unseen pixels."""
        pyro.module("completion", self)
        with pyro.plate("images", len(seen)):
            with torch.no_grad():
                guess = torch.sigmoid(self.guess(seen))
            loc, log_scale = self.prior(torch.cat([seen, guess], -1)).chunk(2, -1)
            z = pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))
            logits, unseen = self.generate(z), seen == -1
            if self.by_mask:
                pyro.sample("y", dist.Bernoulli(logits=logits).mask(unseen).to_event(1), obs=full)
            else:
                chosen, pixels = logits[unseen].view(len(seen), -1), full[unseen].view(len(seen), -1)
                pyro.sample("y", dist.Bernoulli(logits=chosen).to_event(1), obs=pixels)

    def guide(self, seen: Tensor, full: Tensor) -> None:
        """Codes of full images."""
        pyro.module("completion", self)
        loc, log_scale = self.recognize(torch.cat([seen, full], -1)).chunk(2, -1)
        with pyro.plate("images", len(seen)):
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))


def completion(by_mask: bool = False) -> Program:
    """Unseen pixels are picked by a mask, so shapes depend on data; or the distribution has the mask."""
    net, full = Completion(by_mask), images()
    seen = full.masked_fill(torch.arange(PIXELS) >= PIXELS // 4, -1.0)
    return Program(net.model, net.guide, Trace_ELBO(), (seen, full))


class Cells(nn.Module):
    """Counts of genes in cells of a few types, with zero inflation and batch norm."""

    def __init__(self, genes: int = 50) -> None:
        super().__init__()
        self.genes = genes
        self.decode = nn.Sequential(
            nn.Linear(LATENT + CLASSES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2 * genes)
        )
        self.encode = nn.Sequential(
            nn.Linear(genes, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2 * LATENT + 2)
        )
        self.classify = nn.Linear(LATENT, CLASSES)

    def model(self, counts: Tensor, kind: Tensor) -> None:
        """Counts of labeled cells."""
        pyro.module("cells", self)
        dispersion = pyro.param("dispersion", 10.0 * torch.ones(self.genes), constraint=constraints.positive)
        with pyro.plate("cells", len(counts)), poutine.scale(scale=1.0 / counts.numel()):
            z = pyro.sample("z", dist.Normal(counts.new_zeros(LATENT), 1.0).to_event(1))
            kind = pyro.sample("kind", dist.OneHotCategorical(logits=counts.new_zeros(CLASSES)), obs=kind)
            total = pyro.sample("total", dist.LogNormal(4.0, counts.new_ones(1)).to_event(1))
            gate, share = self.decode(torch.cat([z, kind], -1)).chunk(2, -1)
            logits = (total * share.softmax(-1) + 5e-3).log() - (dispersion + 5e-3).log()
            fn = dist.ZeroInflatedNegativeBinomial(gate_logits=gate, total_count=dispersion, logits=logits)
            pyro.sample("counts", fn.to_event(1), obs=counts)

    def guide(self, counts: Tensor, kind: Tensor) -> None:
        """Codes, with a loss for the classifier."""
        pyro.module("cells", self)
        with pyro.plate("cells", len(counts)), poutine.scale(scale=1.0 / counts.numel()):
            loc, log_scale, own = self.encode(counts.log1p()).split([LATENT, LATENT, 2], -1)
            pyro.sample("total", dist.LogNormal(own[:, :1], softplus(own[:, 1:])).to_event(1))
            z = pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))
            right = dist.OneHotCategorical(logits=self.classify(z)).log_prob(kind)
            pyro.factor("classifier", -50.0 * right, has_rsample=False)


def cells() -> Program:
    """Annotated single cells."""
    net = Cells()
    kind = torch.eye(CLASSES)[torch.randint(CLASSES, (BATCH,))]
    counts = torch.randint(6, (BATCH, 50)).float()
    return Program(net.model, net.guide, TraceEnum_ELBO(max_plate_nesting=1), (counts, kind))


def causal() -> Program:
    """The effect of a treatment behind hidden confounders."""
    net = CEVAE(feature_dim=5, outcome_dist="normal", latent_dim=4, hidden_dim=20, num_layers=2)
    x, t = torch.randn(BATCH, 5), torch.randint(2, (BATCH,)).float()
    net.whiten = lambda x: x
    return Program(net.model, net.guide, TraceCausalEffect_ELBO(), (x, t, t + 0.1 * torch.randn(BATCH), BATCH))


class Canvas(nn.Module):
    """Images of up to three parts, one after another, each present or not."""

    def __init__(self, steps: int = 3, side: int = 10) -> None:
        super().__init__()
        self.steps, self.side = steps, side
        self.cell, self.predict = nn.LSTMCell(PIXELS + LATENT + 1, HIDDEN), nn.Linear(HIDDEN, 1 + 2 * LATENT)
        self.decode, self.baseline = mlp(LATENT, HIDDEN, PIXELS), nn.Linear(PIXELS, 1)

    def model(self, x: Tensor) -> None:
        """The sum of all parts."""
        pyro.module("canvas", self)
        with pyro.plate("images", len(x)):
            mean, present = torch.zeros_like(x), x.new_ones(len(x), 1)
            for t in range(self.steps):
                present = pyro.sample(f"present_{t}", dist.Bernoulli(0.5 * present).to_event(1))
                what = pyro.sample(f"what_{t}", dist.Normal(x.new_zeros(len(x), LATENT), 1.0).mask(present).to_event(1))
                mean = mean + present * torch.sigmoid(self.decode(what))
            pyro.sample("x", dist.Normal(mean, 0.3).to_event(1), obs=x)

    def guide(self, x: Tensor) -> None:
        """A recurrent network, and a baseline for the presence of each part."""
        pyro.module("canvas", self)
        with pyro.plate("images", len(x)):
            state = x.new_zeros(len(x), HIDDEN), x.new_zeros(len(x), HIDDEN)
            present, what = x.new_ones(len(x), 1), x.new_zeros(len(x), LATENT)
            for t in range(self.steps):
                state = self.cell(torch.cat([x, present, what], -1), state)
                chance, loc, log_scale = self.predict(state[0]).split([1, LATENT, LATENT], -1)
                baseline = {"baseline": {"baseline_value": self.baseline(x).squeeze(-1)}}
                fn = dist.Bernoulli(torch.sigmoid(chance) * present).to_event(1)
                present = pyro.sample(f"present_{t}", fn, infer=baseline)
                what = pyro.sample(f"what_{t}", dist.Normal(loc, log_scale.exp()).mask(present).to_event(1))


def canvas() -> Program:
    """Attend, infer, repeat."""
    net = Canvas()
    return Program(net.model, net.guide, TraceGraph_ELBO(), (images(),))


WIDTHS = (4, 8, PIXELS)


def gamma_layers(x: Tensor) -> None:
    """A sparse gamma deep exponential family of two layers."""
    weights = []
    for layer, (above, below) in enumerate(pairwise(WIDTHS)):
        with pyro.plate(f"weights_{layer}", above * below):
            weights.append(pyro.sample(f"w_{layer}", dist.Gamma(0.1, 0.3)).reshape(above, below))
    with pyro.plate("rows", len(x)):
        top = pyro.sample("z_0", dist.Gamma(0.1, 0.1).expand([WIDTHS[0]]).to_event(1))
        middle = pyro.sample("z_1", dist.Gamma(0.1, 0.1 / (top @ weights[0] + 1e-6)).to_event(1))
        pyro.sample("x", dist.Poisson(middle @ weights[1] + 1e-6).to_event(1), obs=x)


def gamma_guide(x: Tensor) -> None:
    """Gamma sites by hand."""

    def site(name: str, *shape: int) -> Any:
        shape_of = softplus(pyro.param(f"shape_{name}", lambda: 0.5 + 0.1 * torch.randn(shape)))
        mean = softplus(pyro.param(f"mean_{name}", lambda: 0.1 * torch.randn(shape)))
        return dist.Gamma(shape_of, shape_of / mean)

    for layer, (above, below) in enumerate(pairwise(WIDTHS)):
        with pyro.plate(f"weights_{layer}", above * below):
            pyro.sample(f"w_{layer}", site(f"w_{layer}", above * below))
    with pyro.plate("rows", len(x)):
        for layer, width in enumerate(WIDTHS[:2]):
            pyro.sample(f"z_{layer}", site(f"z_{layer}", len(x), width).to_event(1))


def counts() -> Tensor:
    """Pixels as counts."""
    return dist.Poisson(torch.rand(32, PIXELS)).sample()


def sparse_gamma() -> Program:
    """Its guide by hand."""
    return Program(gamma_layers, gamma_guide, TraceMeanField_ELBO(), (counts(),))


def sparse_gamma_auto() -> Program:
    """Normal sites."""
    return Program(gamma_layers, AutoNormal(gamma_layers), Trace_ELBO(), (counts(),))


class GroupGuide(EasyGuide):
    """All weights in one site, all local sites in another."""

    def guide(self, x: Tensor) -> None:
        """The two groups."""
        weights, local = self.group(match="w_.*"), self.group(match="z_.*")
        loc = pyro.param("loc", lambda: 0.5 + 0.1 * torch.randn(weights.event_shape))
        scale = softplus(pyro.param("scale", lambda: 0.1 * torch.randn(weights.event_shape)))
        weights.sample("all_w", dist.Normal(loc, scale).to_event(1))
        with self.plate("rows", len(x)):
            shape = (len(x), *local.event_shape)
            loc = pyro.param("local_loc", lambda: 0.5 + 0.1 * torch.randn(shape))
            scale = softplus(pyro.param("local_scale", lambda: 0.1 * torch.randn(shape)))
            local.sample("all_z", dist.Normal(loc, scale).to_event(1))


def sparse_gamma_easy() -> Program:
    """EasyGuide."""
    return Program(gamma_layers, GroupGuide(gamma_layers), Trace_ELBO(), (counts(),))


def curve(number: int) -> tuple[Tensor, Tensor]:
    """A noisy sine."""
    x = torch.linspace(0.0, 5.0, number)
    return x, torch.sin(3.0 * x) + 0.2 * torch.randn(number)


def gp_regression() -> Program:
    """The hyperparameters of an exact process."""
    x, y = curve(40)
    process = gp.models.GPRegression(x, y, gp.kernels.RBF(1), noise=torch.tensor(0.1))
    process.kernel.lengthscale = gp.parameterized.PyroSample(dist.LogNormal(0.0, 1.0))
    return Program(process.model, process.guide, Trace_ELBO())


def sparse_gp() -> Program:
    """A variational sparse process with inducing points."""
    x, y = curve(200)
    process = gp.models.VariationalSparseGP(
        x,
        y,
        gp.kernels.RBF(1, lengthscale=torch.tensor(0.3)),
        torch.linspace(0.0, 5.0, 20),
        gp.likelihoods.Gaussian(),
        whiten=True,
        jitter=1e-4,
    )
    return Program(process.model, process.guide, TraceMeanField_ELBO())


def deep_kernel() -> Program:
    """Classes of images by a sparse process on features of a network."""
    features = nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 4))
    kernel = gp.kernels.Warping(gp.kernels.RBF(4, lengthscale=torch.ones(4)), iwarping_fn=features)
    likelihood = gp.likelihoods.MultiClass(num_classes=CLASSES)
    x, y = images(), torch.randint(CLASSES, (BATCH,)).float()
    process = gp.models.VariationalSparseGP(
        x, y, kernel, x[:10].clone(), likelihood, latent_shape=torch.Size([CLASSES]), num_data=1_000, whiten=True,
        jitter=1e-3,
    )  # fmt: skip
    return Program(process.model, process.guide, TraceMeanField_ELBO())


def gplvm() -> Program:
    """Latent inputs of a sparse process."""
    y = torch.randn(5, 30)
    kernel = gp.kernels.RBF(2, lengthscale=torch.ones(2))
    base = gp.models.SparseGPRegression(torch.zeros(30, 2), y, kernel, torch.randn(8, 2), noise=torch.tensor(0.1))
    base.X = gp.parameterized.PyroSample(dist.Normal(torch.zeros(30, 2), 0.1).to_event())
    base.autoguide("X", dist.Normal)
    return Program(base.model, base.guide, TraceMeanField_ELBO())


PROGRAMS = {
    "vae": vae,
    "vae, TraceMeanField_ELBO": partial(vae, TraceMeanField_ELBO),
    "ss_vae, unlabeled": semi_supervised,
    "ss_vae, labeled": labeled,
    "cvae": completion,
    "cvae, masked": partial(completion, by_mask=True),
    "scanvi": cells,
    "cevae": causal,
    "air": canvas,
    "sparse_gamma_def": sparse_gamma,
    "sparse_gamma_def, AutoNormal": sparse_gamma_auto,
    "sparse_gamma_def, EasyGuide": sparse_gamma_easy,
    "gp": gp_regression,
    "svgp": sparse_gp,
    "sv-dkl": deep_kernel,
    "gplvm": gplvm,
}
