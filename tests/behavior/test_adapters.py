# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Adapters of `peft` in models of `transformers`, with random weights."""

import subprocess
import sys

import pyro.distributions as dist
import pytest
import torch

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, TermsELBO, fit, predict
from pyro_radial.nn import likelihoods

pytestmark = pytest.mark.site

ROWS, LENGTH, TOKENS, CLASSES = 6, 5, 20, 3


# Imported by the tests that run: `make test` leaves them out, and would import these libraries in each worker.
def bert(task="SequenceClassification"):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=TOKENS,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
    )
    return getattr(transformers, f"BertFor{task}")(config)


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def with_lora(net, *targets, **options):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=list(targets), **options)).eval()


def inputs():
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[: ROWS // 2, 3:] = 0
    return {"input_ids": torch.randint(1, TOKENS, (ROWS, LENGTH)), "attention_mask": mask}


def classes():
    torch.manual_seed(0)
    net = with_lora(bert(), "query", "value", task_type="SEQ_CLS")
    # peft also trains the head, as a copy.
    bnn = BayesianModule(net, dist.Normal(0.0, 0.1), select="lora_|modules_to_save")
    model = SupervisedModel(bnn, likelihoods.Categorical())
    return net, model, inputs(), torch.randint(CLASSES, (ROWS,))


def tokens():
    """The next token of each, where there is one."""
    torch.manual_seed(0)
    net = with_lora(llama(), "q_proj", "v_proj", task_type="CAUSAL_LM")
    bnn = BayesianModule(net, dist.Normal(0.0, 0.1), select="lora_")
    x = inputs()
    y = x["input_ids"].roll(-1, 1).masked_fill(x["attention_mask"].roll(-1, 1) == 0, -100)
    y[:, -1] = -100
    return net, SupervisedModel(bnn, likelihoods.Categorical(event_dim=2)), x, y


@pytest.mark.parametrize("task", [classes, tokens])
@pytest.mark.parametrize("guide", [AutoRadial, AutoMeanField])
def test_adapters_are_the_random_parameters_and_are_trained(task, guide):
    net, model, x, y = task()
    trained = [name for name, parameter in net.named_parameters() if parameter.requires_grad]
    assert list(model.bnn.sites) == trained
    assert BayesianModule(net).sites == model.bnn.sites
    posterior = guide(model)
    posterior.setup(x, y)
    before = model.bnn.fixed_tensors()
    result = fit(
        model, posterior, (x, y), epochs=2, batch_size=3, seed=0, loss=TermsELBO(strict_kl=True), progress=False
    )
    assert result.history[-1]["loss"] > 0
    frozen = {name for name, parameter in net.named_parameters() if not parameter.requires_grad}
    after = model.bnn.fixed_tensors()
    assert all(torch.equal(before[name], after[name]) for name in frozen)
    assert predict(model, posterior, x, num_samples=3).log_prob(y).shape == (ROWS,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adapters_take_local_reparameterization(dtype):
    """Peft reads the dtype of A's weight, which must be that of the network now."""
    _, model, x, y = classes()
    local = SupervisedModel(model.bnn, model.likelihood, local_reparameterization=True).to(dtype)
    guide = AutoRadial(local, init_stddev=0.5)
    guide.setup(x, y)
    drawn, undrawn = TermsELBO(num_particles=100), TermsELBO(num_particles=100)
    # Warnings are errors: no parameter is drawn for all rows.
    with torch.no_grad():
        by_rows, by_weights = undrawn(local, guide)(x, y), drawn(model.to(dtype), guide)(x, y)
    assert by_rows.dtype == dtype
    assert undrawn.terms.kl == pytest.approx(float(drawn.terms.kl))
    # The losses vary by 0.9 and 1.2 from draw to draw, so their difference has a standard error of 0.15.
    assert float(by_rows) == pytest.approx(float(by_weights), abs=0.6)


LOAD = """
import torch
from tests.behavior.test_adapters import AutoRadial, classes, predict

_, model, x, y = classes()
guide = AutoRadial(model)
guide.setup({name: part[:2] for name, part in x.items()}, y[:2])
guide.load_state_dict(torch.load("adapters.pt", weights_only=True))
torch.manual_seed(1)
torch.save(predict(model, guide, x, 3).samples, "samples.pt")
"""


def test_the_adapters_posterior_is_saved_alone_and_loaded_elsewhere(tmp_path, monkeypatch, request):
    net, model, x, y = classes()
    guide = AutoRadial(model)
    fit(model, guide, (x, y), epochs=2, seed=0, progress=False)
    state = guide.state_dict()
    trained = sum(parameter.numel() for parameter in net.parameters() if parameter.requires_grad)
    assert sum(value.numel() for value in state.values()) == 2 * trained  # a location and a scale each
    torch.save(state, tmp_path / "adapters.pt")
    torch.manual_seed(1)
    expected = predict(model, guide, x, 3).samples
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(request.config.rootpath))
    subprocess.run([sys.executable, "-c", LOAD], check=True, capture_output=True, text=True, timeout=120)
    torch.testing.assert_close(torch.load(tmp_path / "samples.pt"), expected)


def test_a_network_without_adapters_is_refused():
    with pytest.raises(ValueError, match=r"select must choose .*, got none of .* and \d+ more$"):
        BayesianModule(bert(), select="lora_")
    with pytest.raises(ValueError, match="all are frozen or belong to normalization layers"):
        BayesianModule(bert().requires_grad_(False))
    frozen = with_lora(bert(), "query", inference_mode=True)
    with pytest.raises(ValueError, match="all are frozen or belong to normalization layers"):
        BayesianModule(frozen)
    assert len(BayesianModule(frozen, select="lora_").sites) == 2


def test_an_output_without_logits_says_what_to_do():
    net = with_lora(bert().bert, "query")
    model = SupervisedModel(BayesianModule(net, select="lora_"), likelihoods.Categorical())
    with pytest.raises(ValueError, match=r"must return one tensor, got BaseModelOutputWithPooling.*: wrap it"):
        model(inputs())
