"""Networks of transformers that take token ids and mask as rows of one array, cut and joined again."""

import copy
import pickle

import pytest
import torch

from frostline import freeze
from frostline.core import TensorSpec
from frostline.core.errors import ModelError, NothingFrozen
from frostline.models.cutting import cut_network
from frostline.models.tracing import takes_rows
from support.texts import small_bert, small_distilbert

TOKENS = 16
NAMES = ("input_ids", "attention_mask")
INPUTS = (TensorSpec((TOKENS,), "int64"),) * 2
UNTIL = {small_bert: "bert.encoder.layer.0", small_distilbert: "distilbert.transformer.layer.0"}


def rows_of(seed, batch=6):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 20, (batch, TOKENS), generator=draw)
    lengths = torch.randint(1, TOKENS + 1, (batch, 1), generator=draw)
    return torch.stack([ids, (torch.arange(TOKENS) < lengths).long()], dim=1)


def frozen(make):
    return freeze(make(), UNTIL[make], input_shape=INPUTS)


@pytest.mark.parametrize("make", UNTIL)
def test_equals_the_same_network_with_a_single_array(make):
    model, rows = make().eval(), rows_of(1)
    taking = takes_rows(model, NAMES)
    meant = model(input_ids=rows[:, 0], attention_mask=rows[:, 1]).logits
    assert torch.equal(taking(rows), meant)
    assert list(taking.state_dict()) == list(model.state_dict())
    assert [path for path, _ in taking.named_modules()] == [path for path, _ in model.named_modules()]
    taking.train()
    assert model.training
    model.eval()
    assert not taking.training


@pytest.mark.parametrize("make", UNTIL)
def test_prefix_and_head_together_are_the_network_with_its_own_parameters(make):
    model = frozen(make)
    cut = cut_network(takes_rows(model, NAMES), (TensorSpec((2, TOKENS), "int64"),), frozen_in_eval=True)
    assert cut.fallback is None
    assert UNTIL[make] in cut.frost_line.name
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert trained == {id(parameter) for parameter in cut.head.parameters() if parameter.requires_grad}
    assert set(cut.head.state_dict()) <= set(model.state_dict())
    model.eval()
    rows = rows_of(2)
    from frostline.engines.graph_runner import Runner, leaf_values

    graph = cut.prefix.graph
    with torch.no_grad():
        features = Runner(graph).run([rows], leaf_values(graph, cut.prefix.tensors))
        cut.head.eval()
        meant = model(input_ids=rows[:, 0], attention_mask=rows[:, 1]).logits
        torch.testing.assert_close(cut.head(*features), meant, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda head: pickle.loads(pickle.dumps(head))])
def test_a_head_is_copied_and_pickled_with_weights_of_its_own(copied):
    model = frozen(small_bert)
    cut = cut_network(takes_rows(model, NAMES), (TensorSpec((2, TOKENS), "int64"),), frozen_in_eval=True)
    features = [
        torch.rand(2, *shape) if dtype == "float32" else torch.ones((2, *shape), dtype=torch.bool)
        for shape, dtype in zip(cut.frost_line.shapes, cut.frost_line.dtypes, strict=True)
    ]
    head = copied(cut.head.eval())
    meant = cut.head(*features)
    assert torch.equal(head(*features), meant)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    assert torch.equal(cut.head(*features), meant)
    assert not torch.equal(head(*features), meant)


def test_takes_the_first_tensor_where_there_are_no_logits():
    class Pair(torch.nn.Module):
        def forward(self, a, b):
            return {"sum": a + b, "more": a}

    rows = rows_of(3)
    assert torch.equal(takes_rows(Pair(), ("a", "b"))(rows), rows.sum(1))


def test_refuses_a_network_that_gives_no_tensor():
    class Nothing(torch.nn.Module):
        def forward(self, a, b):
            return "none"

    with pytest.raises(ModelError, match="no tensor, but str"):
        takes_rows(Nothing(), ("a", "b"))(rows_of(4))


class TinyText(torch.nn.Module):
    """Embeddings, a frozen layer or two, and a head that may share its weight with the embeddings."""

    def __init__(self, tied=False):
        super().__init__()
        self.embeddings = torch.nn.Embedding(20, 8)
        self.encoder = torch.nn.Linear(8, 8)
        self.lm_head = torch.nn.Linear(8, 20, bias=False)
        if tied:
            self.lm_head.weight = self.embeddings.weight

    def forward(self, input_ids, attention_mask):
        hidden = self.embeddings(input_ids) * attention_mask[..., None]
        return self.lm_head(torch.relu(self.encoder(hidden)).mean(1))


def nobody_froze():
    return TinyText()


def embeddings_forgotten():
    model = TinyText()
    model.encoder.requires_grad_(False)
    return model


def tied():
    model = TinyText(tied=True).requires_grad_(False)
    model.lm_head.requires_grad_(True)
    return model


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (nobody_froze, "nothing is frozen: every parameter is trained; freeze layers with"),
        (small_bert, "nothing is frozen: every parameter is trained; freeze layers with"),
        (
            embeddings_forgotten,
            (
                "nothing is frozen before the first layer that changes: parameter 'embeddings.weight' is trained, "
                "though 2 others are frozen; call requires_grad_(False) of it too, or freeze layers with"
            ),
        ),
        (
            tied,
            (
                "nothing is frozen before the first layer that changes: parameter 'lm_head.weight' (the same as "
                "'embeddings.weight') is trained; untie them"
            ),
        ),
    ],
)
def test_a_text_network_of_which_nothing_is_frozen_says_why(make, sentence):
    with pytest.raises(NothingFrozen) as refused:
        cut_network(takes_rows(make(), NAMES), (TensorSpec((2, TOKENS), "int64"),))
    assert str(refused.value).startswith(sentence)
