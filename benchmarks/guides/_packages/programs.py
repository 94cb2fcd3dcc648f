# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What packages give to Pyro's ``SVI`` when they train on made-up data.

Each package builds its own model, guide, loss, optimizer and batches. We only let ``SVI.step`` note its arguments
instead of taking a step, so no package's code is copied or changed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import pyro
import torch
from pyro.infer import ELBO, SVI, Trace_ELBO, TraceEnum_ELBO

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
#: Epochs over which scvi-tools raises the weight of the KL by default.
WARMUP_EPOCHS = 400


class NotedError(Exception):
    """Ends a package's training: enough steps are noted."""


class Noted(NamedTuple):
    """What a package gave to ``SVI``, and the arguments of its first steps."""

    svi: SVI
    batches: list[Arguments]

    @property
    def loss(self) -> ELBO:
        """The ELBO; ``SVI`` keeps its methods."""
        elbo: ELBO = self.svi.loss.__self__
        return elbo


@dataclass(frozen=True)
class Subject:
    """A package's program.

    :param distribution: the package's name on PyPI.
    :param data: what the data are like, for the table.
    :param make: a function of "whether in the smallest form" that trains with ``SVI.step`` noted.
    :param repeats: how many times each block of steps is timed.
    """

    distribution: str
    data: str
    make: Callable[[bool], Noted]
    repeats: int = 8


@contextmanager
def noted(steps: int) -> Iterator[list[Noted]]:
    """Let ``SVI.step`` note its arguments in the block, which ends after so many."""
    found: list[Noted] = []
    usual = SVI.step

    def step(self: SVI, *args: Any, **kwargs: Any) -> float:
        if not found or found[-1].svi is not self:
            found.append(Noted(self, []))
        found[-1].batches.append((args, kwargs))
        if len(found[-1].batches) == steps:
            raise NotedError
        return 1.0

    SVI.step = step  # type: ignore[method-assign]
    try:
        yield found
    except NotedError:
        pass
    finally:
        SVI.step = usual  # type: ignore[method-assign]


def kl_weight_at(step: int, batches: int) -> float:
    """The weight that scvi-tools' training plans pass in a step."""
    return float(max(1e-6, min(1.0, (step // batches) / WARMUP_EPOCHS)))


def arguments_at(noted: Noted, step: int) -> Arguments:
    """The arguments of a step: batches in turn, and the weight of the KL of its epoch."""
    args, kwargs = noted.batches[step % len(noted.batches)]
    if "kl_weight" in kwargs:
        kwargs = kwargs | {"kl_weight": kl_weight_at(step, len(noted.batches))}
    return args, kwargs


def counts(rows: int, genes: int, types: int, seed: int = 0) -> tuple[Any, Any]:
    """Counts of genes, and the expected counts of each type of cell."""
    rng = np.random.default_rng(seed)
    signatures = rng.gamma(0.5, 2.0, size=(types, genes)) + 0.01
    shares = rng.dirichlet(np.full(types, 0.3), size=rows)
    return rng.poisson(10.0 * shares @ signatures).astype(np.float32), signatures


def annotated(rows: int, genes: int, types: int) -> Any:
    """The counts of cells with a type, a batch and a place each, as AnnData; scvi-tools then draws the same batches."""
    import anndata
    import scvi

    scvi.settings.seed = 0
    values, _ = counts(rows, genes, types)
    rng = np.random.default_rng(1)
    data = anndata.AnnData(values)
    data.var_names = [f"gene{number}" for number in range(genes)]
    data.obs_names = [f"cell{number}" for number in range(rows)]
    data.obs["type"] = [f"type{number % types}" for number in range(rows)]
    data.obs["batch"] = [f"batch{number % 2}" for number in range(rows)]
    data.obsm["X_spatial"] = rng.uniform(size=(rows, 2))
    return data


def give_deep_getattr() -> None:
    """Let Pyro have a helper that cell2location 0.1.5 imports and Pyro 1.9.2 no longer has."""
    from pyro.infer.autoguide import utils

    if not hasattr(utils, "deep_getattr"):
        utils.deep_getattr = lambda holder, path: attrgetter(path)(holder)


QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "logger": False}


def cell2location(rows: int, genes: int, types: int) -> Noted:
    """Cell2location with its defaults: all locations in each step."""
    import pandas as pd

    give_deep_getattr()
    from cell2location.models import Cell2location

    data = annotated(rows, genes, types)
    _, signatures = counts(rows, genes, types)
    names = [f"type{number}" for number in range(types)]
    states = pd.DataFrame(signatures.T, index=data.var_names, columns=names)
    Cell2location.setup_anndata(data, batch_key="batch")
    model = Cell2location(data, cell_state_df=states, N_cells_per_location=8, detection_alpha=20.0)
    with noted(1) as found:
        model.train(max_epochs=2, batch_size=None, train_size=1.0, accelerator="cpu", enable_progress_bar=False)
    return found[-1]


def regression_model(small: bool) -> Noted:
    """cell2location's RegressionModel, which estimates the signatures of types from single cells, in mini-batches."""
    give_deep_getattr()
    from cell2location.models import RegressionModel

    rows, genes = (60, 20) if small else (2_000, 500)
    data = annotated(rows, genes, 8)
    RegressionModel.setup_anndata(data, batch_key="batch", labels_key="type")
    model = RegressionModel(data)
    with noted(8) as found:
        model.train(max_epochs=8, batch_size=rows // 8, train_size=1.0, accelerator="cpu", enable_progress_bar=False)
    return found[-1]


def amortized_lda(small: bool) -> Noted:
    """scvi-tools' latent Dirichlet allocation with encoders."""
    from scvi.model import AmortizedLDA

    rows, genes = (64, 20) if small else (1_024, 500)
    data = annotated(rows, genes, 8)
    AmortizedLDA.setup_anndata(data)
    model = AmortizedLDA(data, n_topics=10)
    with noted(4) as found:
        model.train(max_epochs=4, batch_size=rows // 4, train_size=1.0, **QUIET)
    return found[-1]


def resolvi(small: bool) -> Noted:
    """scvi-tools' RESOLVI for spatial transcriptomics."""
    from scvi.external import RESOLVI

    rows, genes = (64, 20) if small else (1_024, 200)
    data = annotated(rows, genes, 8)
    data.layers["counts"] = data.X.copy()
    RESOLVI.setup_anndata(data, layer="counts", batch_key="batch", prepare_data_kwargs={"spatial_rep": "X_spatial"})
    model = RESOLVI(data)
    with noted(4) as found:
        model.train(max_epochs=4, batch_size=rows // 4, train_size=1.0, **QUIET)
    return found[-1]


def decipher(small: bool) -> Noted:
    """scvi-tools' Decipher, two levels of latent variables with networks between them."""
    from scvi.external import Decipher

    rows, genes = (64, 20) if small else (1_024, 500)
    data = annotated(rows, genes, 8)
    Decipher.setup_anndata(data)
    model = Decipher(data)
    with noted(4) as found:
        model.train(max_epochs=4, batch_size=rows // 4, train_size=1.0, **QUIET)
    return found[-1]


def mofaflex(small: bool) -> Noted:
    """MOFA-FLEX: factors shared by two views, one of them with missing values."""
    import anndata
    import mofaflex
    import mudata

    rows, genes = (40, 12) if small else (500, 200)
    rng = np.random.default_rng(0)
    factors = rng.normal(size=(rows, 5))
    views = {}
    for name, features in (("rna", genes), ("protein", genes // 4)):
        values = factors @ rng.normal(size=(5, features)) + 0.5 * rng.normal(size=(rows, features))
        if name == "protein":
            values[rng.random(values.shape) < 0.1] = np.nan
        views[name] = anndata.AnnData(values.astype(np.float32))
        views[name].obs_names = [f"cell{number}" for number in range(rows)]
        views[name].var_names = [f"{name}{number}" for number in range(features)]
    with noted(1) as found:
        mofaflex.MOFAFLEX(
            mudata.MuData(views),
            mofaflex.DataOptions(plot_data_overview=False),
            mofaflex.ModelOptions(n_factors=5, weight_prior="Horseshoe", likelihoods="Normal"),
            mofaflex.TrainingOptions(device="cpu", max_epochs=2_000, seed=0, save_path=False),
        )
    return found[-1]


def py_irt(small: bool) -> Noted:
    """py-irt's two-parameter model with hierarchical priors."""
    from py_irt.models.two_param_logistic import TwoParamLog

    people, items = (20, 5) if small else (200, 50)
    rng = np.random.default_rng(0)
    person, item = (part.ravel() for part in np.meshgrid(np.arange(people), np.arange(items), indexing="ij"))
    logits = rng.normal(size=people)[person] - rng.normal(size=items)[item]
    answers = (rng.random(len(logits)) < 1.0 / (1.0 + np.exp(-logits))).astype(np.float32)
    model = TwoParamLog("hierarchical", "cpu", items, people)
    with noted(1) as found:
        model.fit(torch.tensor(person), torch.tensor(item), torch.tensor(answers), 2)
    return found[-1]


def ipolng(small: bool) -> Noted:
    """iPoLNG: topics that two kinds of measurements of a cell share, in the part with both."""
    from iPoLNG.iPoLNG import iPoLNG_helper

    rows, genes = (20, 12) if small else (300, 200)
    values = {f"W{number}": torch.tensor(counts(rows, genes, 5, number)[0]) for number in (1, 2)}
    helper = iPoLNG_helper(5, alpha0s=[1.0, 2.0])
    svi = SVI(helper.model, helper.guide, pyro.optim.Adam({"lr": 0.01}), pyro.infer.TraceMeanField_ELBO())
    return Noted(svi, [((values,), {})])


def pyroved(small: bool, invariances: list[str] | None = None) -> Noted:
    """PyroVED's variational autoencoder, perhaps one that is invariant to rotations."""
    from pyroved.models import iVAE
    from pyroved.trainers import SVItrainer

    size = 8 if small else 28
    images = torch.rand(400, size, size, generator=torch.Generator().manual_seed(0))
    trainer = SVItrainer(iVAE((size, size), latent_dim=2, invariances=invariances), lr=1e-3)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images), batch_size=100)
    with noted(4) as found:
        trainer.step(loader, scale_factor=1.5)
    return found[-1]


def gpytorch(small: bool) -> Noted:
    """A sparse Gaussian process of GPyTorch with its Pyro interface."""
    from gpytorch import distributions, kernels, likelihoods, means, models, variational

    rows, inducing = (40, 5) if small else (500, 32)

    class Process(models.PyroGP):
        def __init__(self) -> None:
            points = torch.linspace(0.0, 1.0, inducing)[:, None]
            family = variational.CholeskyVariationalDistribution(inducing)
            strategy = variational.VariationalStrategy(self, points, family)
            super().__init__(strategy, likelihoods.GaussianLikelihood(), num_data=rows)
            self.mean_module = means.ConstantMean()
            self.covar_module = kernels.ScaleKernel(kernels.RBFKernel())

        def forward(self, x: torch.Tensor) -> Any:
            return distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    x = torch.linspace(0.0, 1.0, rows)[:, None]
    y = torch.sin(6.0 * x[:, 0])
    model = Process()
    svi = SVI(model.model, model.guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO(retain_graph=True))
    return Noted(svi, [((x, y), {})])


def pylineagt(small: bool) -> Noted:
    """pylineaGT: a mixture of normal distributions of coverage, with an enumerated component."""
    from pylineaGT.mvnmm import MVNMixtureModel

    rows = 40 if small else 500
    rng = np.random.default_rng(0)
    values = rng.poisson(rng.gamma(2.0, 30.0, size=(4, 3))[rng.integers(4, size=rows)] + 5.0)
    model = MVNMixtureModel(4, torch.tensor(values), columns=["early", "mid", "late"], lineages=["T"])
    with noted(1) as found:
        model.fit(steps=10, seed_optim=False, seed=5, show_progr=False)
    return found[-1]


def cellbender(small: bool) -> Noted:
    """CellBender's full model: cells, empty droplets and swapped barcodes, with an enumerated indicator."""
    from cellbender.remove_background.model import RemoveBackgroundPyroModel
    from cellbender.remove_background.vae.decoder import Decoder
    from cellbender.remove_background.vae.encoder import CompositeEncoder, EncodeNonZLatents, EncodeZ

    droplets, genes = (64, 20) if small else (1_000, 200)
    values = torch.tensor(counts(droplets, genes, 5)[0])
    values[droplets // 2 :] = torch.poisson(torch.full((droplets - droplets // 2, genes), 0.3))
    totals = values.sum(-1)
    cells, empty = float(totals[: droplets // 2].mean()), float(totals[droplets // 2 :].mean())
    crossover = float(np.log((cells * empty) ** 0.5))
    ambient = values.mean(0) / values.mean(0).sum()
    priors = {
        "d_std": 0.2, "cell_counts": cells, "empty_counts": empty, "d_empty_std": 0.2, "cell_logit": 0.0,
        "chi_ambient": ambient, "chi_bar": ambient,
    }  # fmt: skip
    encoders = CompositeEncoder(
        {
            "z": EncodeZ(genes, [64, 64], 10, use_batch_norm=False, use_layer_norm=False, input_transform="normalize"),
            "other": EncodeNonZLatents(
                n_genes=genes,
                z_dim=10,
                log_count_crossover=crossover,
                prior_log_cell_counts=np.log1p(cells),
                empty_log_count_threshold=np.log1p(empty),
                prior_logit_cell_prob=0.0,
                input_transform="log_normalize",
            ),
        }
    )
    decoder = Decoder(10, hidden_dims=[64], use_batch_norm=True, use_layer_norm=False, output_dim=genes)
    names = np.array([f"gene{number}" for number in range(genes)])
    model = RemoveBackgroundPyroModel(
        "full", encoders, decoder, priors, genes, droplets, names, int(empty), crossover, use_cuda=False
    )
    pyro.enable_validation(False)
    loss = TraceEnum_ELBO(max_plate_nesting=1, strict_enumeration_warning=False)
    svi = SVI(model.model, model.guide, pyro.optim.ClippedAdam({"lr": 1e-4}), loss)
    order = torch.randperm(droplets, generator=torch.Generator().manual_seed(0))
    return Noted(svi, [((batch,), {}) for batch in values[order].chunk(4)])


SUBJECTS = {
    "cell2location": Subject(
        "cell2location",
        "200 locations, 500 genes, 8 types",
        lambda small: cell2location(20, 30, 3) if small else cell2location(200, 500, 8),
    ),
    "cell2location, large": Subject(
        "cell2location",
        "600 locations, 3,000 genes, 20 types",
        lambda small: cell2location(30, 50, 4) if small else cell2location(600, 3_000, 20),
        repeats=4,
    ),
    "cell2location, RegressionModel": Subject(
        "cell2location", "batches of 250 of 2,000 cells, 500 genes, 8 types", regression_model
    ),
    "MOFA-FLEX": Subject("mofaflex", "500 samples, 200 and 50 features, 5 factors", mofaflex),
    "py-irt": Subject("py-irt", "200 people, 50 items", py_irt),
    "iPoLNG": Subject("iPoLNG", "300 cells, 200 and 200 features, 5 topics", ipolng),
    "pyroVED, iVAE": Subject("pyroved", "batches of 100 of 400 images of 28 x 28", pyroved),
    "pyroVED, iVAE, rotations": Subject(
        "pyroved", "batches of 100 of 400 images of 28 x 28", lambda small: pyroved(small, ["r"])
    ),
    "scvi-tools, AmortizedLDA": Subject("scvi-tools", "batches of 256 of 1,024 cells, 500 genes", amortized_lda),
    "scvi-tools, RESOLVI": Subject("scvi-tools", "batches of 256 of 1,024 cells, 200 genes", resolvi),
    "scvi-tools, Decipher": Subject("scvi-tools", "batches of 256 of 1,024 cells, 500 genes", decipher),
    "GPyTorch": Subject("gpytorch", "500 rows, 32 inducing points", gpytorch),
    "pylineaGT": Subject("pylineagt", "500 rows, 3 columns, 4 components", pylineagt),
    "CellBender": Subject("cellbender", "batches of 250 of 1,000 droplets, 200 genes", cellbender),
}
